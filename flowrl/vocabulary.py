"""Every quantity that a pure function may ask for by name.  A closed list: tests hold all signatures to it.

P prompts, N rollouts (leaves), T decisions per rollout, S states, E distinct transitions, R rewards,
B rows of a micro-batch, K decisions per row, *L latent dims.

A name without suffix belongs to the current policy and carries its gradient. A suffix names a snapshot of it:
`mean_ref`, `log_prob_old`, `velocity_anchor`; suffixes are open, recipes define them (`snapshots`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    shape: str
    meaning: str
    of_policy: bool = False  # computed by running a policy: may carry a snapshot's suffix


VOCABULARY = {
    "reward": Quantity("[N, R]", "raw score of each reward, higher is better, in the reward's own unit"),
    "reward_weight": Quantity("[R]", "weight of each reward, by name in the run file"),
    "group": Quantity("[N]", "comparison set of each rollout"),
    "prompt": Quantity("[N]", "prompt of each rollout"),
    "root": Quantity("[N]", "initial noise that each rollout descends from"),
    "state_reward": Quantity("[N, T+1]", "score of each state on a rollout's path, or of the clean estimate there"),
    "history_mean": Quantity("[N]", "mean of the prompt's last rewards"),
    "history_std": Quantity("[N]", "their standard deviation"),
    "expected": Quantity("[N]", "reward that the memory expects of the prompt, in (0, 1)"),
    "proficiency_mean": Quantity("-", "moving mean of the policy's reward over all prompts"),
    "proficiency_std": Quantity("-", "its standard deviation"),
    "edge": Quantity("[N, T]", "id of the transition a rollout took at a step, -1 for none"),
    "noisy": Quantity("[N, T]", "1 where the decision was drawn at random, 0 where it was determined"),
    "mask": Quantity("[N, T]; of a row [B, K]", "1 where the decision is trained; of a row: where it belongs to it"),
    "chunk": Quantity("[T]", "number of the chunk of steps that a step belongs to, -1 for none"),
    "change": Quantity("[N, T]", "how far a step moved the latents, relative to their size"),
    "stage_share": Quantity("[N, R]", "of each reward in a self-paced mixture"),
    "advantage": Quantity("[N], then [N, T], then [B, K]", "how much better than its peers; dimensionless"),
    "weight": Quantity("[N, T], then [B, K]", "share of the loss; sums to 1 per optimiser update over all ranks"),
    "step": Quantity("[B, K]", "schedule index before the step; 0 is the noisiest"),
    "depth": Quantity("[B, K]", "how many of the noisy steps come before it: its depth in a tree that forks at them"),
    "sigma": Quantity("[B, K]", "noise level before the step; 1 noise, 0 data"),
    "sigma_next": Quantity("[B, K]", "noise level after the step"),
    "sigmas": Quantity("[T+1]", "the schedule"),
    "stds": Quantity("[T]", "of the kernel at each step of the schedule, as if it drew noise there"),
    "slopes": Quantity("[T]", "derivative of the kernel's mean by the velocity at each step"),
    "latents": Quantity("[B, K, *L]", "(1 - sigma) x0 + sigma noise, before the step"),
    "next_latents": Quantity("[B, K, *L]", "after the step; detached"),
    "x0": Quantity("[B, K, *L]", "finished latents, noised again to `latents` by `noise`"),
    "noise": Quantity("[B, K, *L]", "standard normal"),
    "peers": Quantity("[B, K]", "id of the rows compared with each other: of one group, noise level and noise"),
    "velocity": Quantity("[B, K, *L]", "noise - x0 as the network sees it, guidance included", of_policy=True),
    "mean": Quantity("[B, K, *L]", "mean of the Gaussian that the next latents are drawn from", of_policy=True),
    "std": Quantity("[B, K]", "its standard deviation, sqrt(dt) included; the same for all policies"),
    "log_prob": Quantity(
        "[B, K]; of the rollout [N, T]", "images: nats per latent dimension; text: nats per token", of_policy=True
    ),
    "elbo": Quantity("[B, K]", "minus the flow-matching error: stands in for log_prob", of_policy=True),
    "best_velocity": Quantity("[B, K, *L]", "on the best path of the group, by the policy that drew; detached"),
    "best_advantage": Quantity("[N], then [B, K]", "how much better the best of the group is; -inf: no better"),
    "coefficient": Quantity("-", "of the penalties that adapt"),
    "ratio": Quantity("[B, K]", "current over old policy, after the recipe's `ratio`"),
    "iteration": Quantity("-", "number of the update, from 0; plans are pure functions of it"),
    "steps": Quantity("-", "T"),
    "forks": Quantity("-", "{step: children of each state}; a noise plan may follow them"),
    "generator": Quantity("-", "private and named by (seed, iteration, purpose); the same on every rank"),
    "memory": Quantity("-", "mapping of names to tensors: what trackers keep from update to update"),
    "divergence": Quantity("-", "how far an update moved the policy, nats per latent dim"),
    "draws": Quantity("-", "noise levels per finished picture"),
    "refresh": Quantity("-", "how often a snapshot has been refreshed, from 1"),
    "tree": Quantity("-", "samplers.RolloutTree; only `points` functions see it"),
    "drawn": Quantity("-", "noise levels and noises of the finished pictures; only `points` functions see it"),
}

CURRENT = ""


def per_rollout(name: str) -> bool:
    """Whether a quantity has a row for every rollout while advantages are assigned."""
    return name == "log_prob_old" or (name in VOCABULARY and VOCABULARY[name].shape.startswith("[N"))


def split(name: str) -> tuple[str, str]:
    """'mean_ref' -> ('mean', 'ref'); a name without a snapshot's suffix -> (name, '')."""
    if name in VOCABULARY:
        return name, CURRENT
    for quantity, entry in VOCABULARY.items():
        if entry.of_policy and name.startswith(quantity + "_"):
            return quantity, name.removeprefix(quantity + "_")
    raise ValueError(f"{name!r} is not a quantity. Known: {', '.join(VOCABULARY)}; of a snapshot: mean_ref, ...")
