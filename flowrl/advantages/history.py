"""Compare rollouts with what the run remembers: (reward, reward_weight, ..., what a tracker gives) -> advantage [N].

Equal rewards that the memory expects earn 0; a shift of the rewards that the memory went along with is ignored. A group
without difference may earn something here, on purpose: it is compared with more than itself.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.advantages.outcome import Advantage, Group, Reward, RewardWeight, grpo, raw
from flowrl.groups import group_centre, group_std, group_sum

Scalar = Float[Tensor, ""]
PerRollout = Float[Tensor, " N"]


def against_history(
    reward: Reward,
    reward_weight: RewardWeight,
    history_mean: PerRollout,
    history_std: PerRollout,
    *,
    eps: float = 1e-6,
    clamp: float = 5.0,
) -> Advantage:
    """DDPO: z-score against the last rewards of the prompt (memory.trackers.per_prompt).  arXiv:2305.13301"""
    return ((raw(reward, reward_weight) - history_mean) / (history_std + eps)).clamp(-clamp, clamp)


def against_expected(
    reward: Reward,
    reward_weight: RewardWeight,
    expected: PerRollout,
    *,
    ddof: int = 0,
    eps: float = 1e-4,
    clamp: float = 5.0,
) -> Advantage:
    """SuperFlow: reward minus the prompt's expected one, standardised over the batch.  arXiv:2512.17951

    expected is that of memory.trackers.beta_counts. ddof, eps and clamp are OUR READING (Flow-GRPO's).
    """
    above, everyone = raw(reward, reward_weight) - expected, torch.zeros(len(reward), dtype=torch.long)
    return (group_centre(above, everyone) / (group_std(above, everyone, ddof=ddof) + eps)).clamp(-clamp, clamp)


def cross_prompt(
    reward: Reward,
    reward_weight: RewardWeight,
    group: Group,
    proficiency_mean: Scalar,
    proficiency_std: Scalar,
    *,
    eps: float = 1e-8,
    least: float = 1e-6,
) -> Advantage:
    """AdaGRPO's global term: z-score against the policy's proficiency on all prompts.  arXiv:2606.06828

    In a group with values on both sides the positive ones are scaled to sum to 1, the negative ones to -1; where a side
    sums to less than `least`, values are centred instead. Components are O(1/G): a mild tilt beside a group's z-score.
    """
    z = (raw(reward, reward_weight) - proficiency_mean) / (proficiency_std + eps)
    above, below = group_sum(z.clamp(min=0), group), group_sum((-z).clamp(min=0), group)
    both = (above >= least) & (below >= least)
    return torch.where(both, z / torch.where(z > 0, above, below).clamp(min=least), group_centre(z, group))


def group_and_global(
    reward: Reward,
    reward_weight: RewardWeight,
    group: Group,
    proficiency_mean: Scalar,
    proficiency_std: Scalar,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    clamp: float = 5.0,
) -> Advantage:
    """AdaGRPO: z-score within the group plus cross_prompt, each clamped.  arXiv:2606.06828

    proficiency_mean and _std are those of memory.trackers.proficiency.
    """
    own = grpo(reward, reward_weight, group, scope="group", ddof=ddof, eps=eps, clamp=clamp)
    tilt = cross_prompt(reward, reward_weight, group, proficiency_mean, proficiency_std, eps=eps)
    return own + tilt.clamp(-clamp, clamp)
