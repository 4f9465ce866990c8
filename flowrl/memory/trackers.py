"""(quantities, memory) -> (more quantities, memory): what an update learns from those before it.

memory maps names to tensors and is saved with the checkpoint; it is empty at first, what a tracker keeps stands under
its own name, and the mapping that is given is never written to. Trackers see the table of all ranks, so that every rank
keeps the same. prompt [N] names a prompt for good, the same number in every update of a run.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.advantages.outcome import raw
from flowrl.groups import group_centre, group_max, group_mean, group_sparsity, group_spread, group_std

Memory = Mapping[str, Tensor]
Tracked = tuple[dict[str, Tensor], dict[str, Tensor]]
Reward = Float[Tensor, "N R"]
RewardWeight = Float[Tensor, " R"]
PerRollout = Int[Tensor, " N"]

ROUNDING = 1e-6  # of a sum of weighted rewards: .27 + .66 + .07 is more than 1 in fp32


def per_prompt(
    reward: Reward,
    reward_weight: RewardWeight,
    prompt: PerRollout,
    memory: Memory,
    *,
    size: int = 16,
    needed: int = 16,
) -> Tracked:
    """DDPO: mean and std (population) of a prompt's last `size` rewards, this update's included.  arXiv:2305.13301

    Of a prompt with fewer than `needed` rewards those of the whole update. Gives history_mean and history_std [N].
    """
    score, nothing = raw(reward, reward_weight), reward.new_full((size,), torch.nan)
    kept = dict(zip(_seen(memory, "history"), memory.get("history/reward", nothing[None][:0]), strict=True))
    for one in prompt.unique().tolist():
        kept[one] = torch.cat([kept.get(one, nothing), score[prompt == one]])[-size:]
    kept = dict(sorted(kept.items()))
    of_batch = _mean_and_std(score)
    found = [torch.stack(_mean_and_std(kept[p][~kept[p].isnan()], needed) or of_batch) for p in prompt.tolist()]
    mean, std = torch.stack(found, 1)
    more = {"history/prompt": torch.tensor(list(kept)), "history/reward": torch.stack(list(kept.values()))}
    return {"history_mean": mean, "history_std": std}, {**memory, **more}


def beta_counts(
    reward: Reward, reward_weight: RewardWeight, prompt: PerRollout, memory: Memory, *, kept: float = 0.9
) -> Tracked:
    """SuperFlow: forgetful counts of good and bad, good <- kept good + r and bad <- kept bad + 1 - r.  arXiv:2512.17951

    r in [0, 1] is the mean reward of the prompt in this update; both start at 1. Gives expected [N] = good / (good +
    bad) as it was before this update, so that a rollout is not compared with itself. A constant `kept`, the mean and
    the order are OUR READING.
    """
    score = _in_unit_range(raw(reward, reward_weight), "beta_counts: weighted rewards", "it counts")
    before = expected_reward(prompt, memory)
    known = {p: n for n, p in enumerate(_seen(memory, "beta"))}
    ids = sorted({*known, *prompt.tolist()})
    counts = score.new_ones(len(ids), 2)
    counts[[ids.index(p) for p in known]] = memory.get("beta/counts", counts[:0])
    now = torch.tensor([ids.index(p) for p in prompt.tolist()])
    mean = group_mean(score, prompt)
    counts[now] = kept * counts[now] + torch.stack([mean, 1 - mean], 1)
    return {"expected": before.to(score)}, {**memory, "beta/prompt": torch.tensor(ids), "beta/counts": counts}


def expected_reward(prompt: PerRollout, memory: Memory) -> Float[Tensor, " N"]:
    """What beta_counts remembers of prompts, in (0, 1); 1/2 of one that was never seen."""
    counts = dict(zip(_seen(memory, "beta"), memory.get("beta/counts", torch.ones(0, 2)), strict=True))
    good, bad = torch.stack([counts.get(p, torch.ones(2)) for p in prompt.tolist()], 1)
    return good / (good + bad)


def proficiency(reward: Reward, reward_weight: RewardWeight, memory: Memory, *, kept: float = 0.8) -> Tracked:
    """AdaGRPO: moving mean and variance (population) of what the policy scores on all prompts.  arXiv:2606.06828

    m <- kept m + (1 - kept) m of this update, the first update's as it is. Gives proficiency_mean and proficiency_std,
    this update included. The rewards are those of the candidates, one deterministic picture each.
    """
    mean, std = _mean_and_std(raw(reward, reward_weight))
    now = {"proficiency/mean": mean, "proficiency/variance": std**2}
    more = {name: kept * memory[name] + (1 - kept) * x if name in memory else x for name, x in now.items()}
    found = {"proficiency_mean": more["proficiency/mean"], "proficiency_std": more["proficiency/variance"].sqrt()}
    return found, {**memory, **more}


def self_paced(
    reward: Reward,
    reward_weight: RewardWeight,
    group: PerRollout,
    memory: Memory,
    *,
    tau: Sequence[float] = (0.75, 0.75),
    beta: float = 0.3,
    sharpness: float = 1.0,
    temperature: float = 1.0,
) -> Tracked:
    """Self-Paced GRPO: mix rewards in [0, 1], the easy ones first, by how far each prompt has come.  arXiv:2511.19356

    Column j, in the order of the stages, has the mean m_j and the sparsity S_j in a group. Its share is the softmax of
    temperature * (sigmoid(sharpness (m_j - tau_j)) + beta (S_j - S_{j+1})), S = 0 after the last; stages beyond the
    given tau take the last one, and weights multiply the rewards that are mixed (OUR READING). Gives reward [N, 1] with
    reward_weight [1], and stage_share [N, R]. Remembers nothing.
    """
    stages = reward.shape[1]
    reward = _in_unit_range(reward, "self_paced: rewards", "it mixes what lies")
    if not 1 <= len(tau) <= max(stages, 1):
        raise ValueError(f"self_paced: {len(tau)} values of tau for {stages} rewards: expected one for each at most.")
    level = reward.new_tensor([*tau, *[tau[-1]] * (stages - len(tau))])
    sparse = group_sparsity(reward, group)
    competence = (sharpness * (group_mean(reward, group) - level)).sigmoid()
    onward = torch.cat([sparse[:, 1:], torch.zeros_like(sparse[:, :1])], 1)
    share = (temperature * (competence + beta * (sparse - onward))).softmax(1)
    mixed = (reward * reward_weight * share).sum(1, keepdim=True)
    return {"reward": mixed, "reward_weight": torch.ones_like(mixed[0]), "stage_share": share}, dict(memory)


def best_path(
    reward: Reward,
    reward_weight: RewardWeight,
    group: PerRollout,
    memory: Memory,
    *,
    kept: float = 0.9,
    eps: float = 1e-8,
) -> Tracked:
    """LayerTuning-RL: how much better the best of a group is than the rest, if it is worth imitating.  arXiv:2509.23352

    Gives best_advantage [N], its z-score; -inf where the group has no best one, or where that lies below the moving
    mean of all rewards before this update. kept, eps and the mean are OUR READING.
    """
    score = raw(reward, reward_weight)
    best, spread = group_max(score, group), group_spread(score, group)
    z = (best - group_mean(score, group)) / (group_std(score, group, ddof=0) + eps)
    usual = memory.get("best_path/mean")
    worth = (spread > 0) if usual is None else (spread > 0) & (best >= usual)
    mean = score.mean() if usual is None else kept * usual + (1 - kept) * score.mean()
    return {"best_advantage": torch.where(worth, z, -torch.inf)}, {**memory, "best_path/mean": mean}


def adaptive_coefficient(
    divergence: Float[Tensor, ""],
    memory: Memory,
    *,
    target: float = 1e-5,
    least: float = 1e-7,
    most: float = 1e-5,
    factor: float = 1.5,
) -> Tracked:
    """SAGE-GRPO: raise the coefficient of the trust region where the divergence exceeds its target, else lower it.

    It starts at `least` and stays in least..most. factor is OUR READING.  arXiv:2603.21872
    """
    before = memory.get("coefficient", divergence.new_tensor(least))
    after = torch.where(divergence > target, before * factor, before / factor).clamp(least, most)
    return {"coefficient": after}, {**memory, "coefficient": after}


def _in_unit_range(reward, name, does):
    """reward, refused where it leaves 0..1 by more than what weights that sum to 1 round to."""
    if bool(((reward < -ROUNDING) | (reward > 1 + ROUNDING)).any()):
        low, high = float(reward.min()), float(reward.max())
        raise ValueError(f"{name} from {low:.4g} to {high:.4g}; {does} between 0 and 1. Rescale the rewards.")
    return reward.clamp(0, 1)


def _seen(memory, name):
    """Prompts of which something is kept, in order."""
    return memory[f"{name}/prompt"].tolist() if f"{name}/prompt" in memory else []


def _mean_and_std(x, needed=1):
    """Of all of x, exact where all are equal; nothing of fewer than `needed`."""
    everyone = torch.zeros(len(x), dtype=torch.long)
    if len(x) < needed:
        return None
    return x[0] - group_centre(x, everyone)[0], group_std(x, everyone, ddof=0)[0]


# what each adds to the table
per_prompt.gives = ("history_mean", "history_std")
beta_counts.gives = ("expected",)
proficiency.gives = ("proficiency_mean", "proficiency_std")
self_paced.gives = ("reward", "reward_weight", "stage_share")
best_path.gives = ("best_advantage",)
adaptive_coefficient.gives = ("coefficient",)
