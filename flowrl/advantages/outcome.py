"""Compare the rollouts of one prompt: (reward [N, R], reward_weight [R], group [N]) -> advantage [N].

An advantage ignores the order of rows and a shift of all rewards, and is exactly 0 for a group whose rewards are equal.
Invalid rollouts are left out before these functions see the table. `raw` breaks the shift rule on purpose.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.groups import group_centre, group_count, group_std

Reward = Float[Tensor, "N R"]
RewardWeight = Float[Tensor, " R"]
Group = Int[Tensor, " N"]
Advantage = Float[Tensor, " N"]

SCOPES = ("group", "batch", "none")


def grpo(
    reward: Reward,
    reward_weight: RewardWeight,
    group: Group,
    *,
    scope: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    clamp: float = 5.0,
) -> Advantage:
    """Weighted reward minus its group's mean, over a standard deviation.  arXiv:2402.03300

    scope: whose std divides: "group", "batch" (all rollouts of the update) or "none" (arXiv:2503.20783).
    ddof:  0 divides the variance by n (Flow-GRPO), 1 by n - 1 (DanceGRPO).
    """
    score = raw(reward, reward_weight)
    everyone = torch.zeros_like(group)
    if scope not in SCOPES:
        raise ValueError(f"scope {scope!r}: accepted are {', '.join(SCOPES)}.")
    centred = group_centre(score, group)
    if scope != "none":
        centred = centred / (group_std(score, group if scope == "group" else everyone, ddof=ddof) + eps)
    return centred.clamp(-clamp, clamp)


def rloo(reward: Reward, reward_weight: RewardWeight, group: Group) -> Advantage:
    """Reward minus the mean reward of the *other* rollouts of the prompt.  arXiv:2402.14740

    r_i - mean_{j != i} r_j  =  (r_i - mean_j r_j) * n / (n - 1);  0 for a group of one.
    """
    n = group_count(group)
    return group_centre(raw(reward, reward_weight), group) * n / (n - 1).clamp(min=1)


def gdpo(reward: Reward, reward_weight: RewardWeight, group: Group, *, ddof: int = 0, eps: float = 1e-6) -> Advantage:
    """Z-score each reward within its group, weigh and sum, then whiten over the batch.  arXiv:2601.05242

    Scales of the rewards drop out, so the weights say what they seem to say.
    """
    z = group_centre(reward, group) / (group_std(reward, group, ddof=ddof) + eps)
    total = raw(z, reward_weight)  # its mean over the batch is 0 already
    return total / (group_std(total, torch.zeros_like(group), ddof=ddof) + eps)


def raw(reward: Reward, reward_weight: RewardWeight) -> Advantage:
    """The weighted reward itself, for tree credit that compares edges instead of leaves.

    Keeps a shift of the rewards: not a comparison yet.
    """
    return (reward * reward_weight).sum(1)  # a matrix product rounds equal rows differently
