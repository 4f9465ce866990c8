"""Compare the rollouts of one prompt: (reward [N, R], reward_weight [R], group [N]) -> advantage [N].

An advantage ignores the order of rows and a shift of all rewards, and is exactly 0 for a group whose rewards are equal.
Invalid rollouts are left out before these functions see the table. `raw` breaks the shift rule on purpose.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.groups import group_centre, group_count, group_max, group_spread, group_std

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
    scale: float = 1.0,
) -> Advantage:
    """Weighted reward minus its group's mean, over a standard deviation.  arXiv:2402.03300

    scope: whose std divides: "group", "batch" (all rollouts of the update) or "none" (arXiv:2503.20783).
    ddof:  0 divides the variance by n (Flow-GRPO), 1 by n - 1 (DanceGRPO).
    scale: multiplies what was clamped; .2 makes +-5 to the +-1 of AWM (arXiv:2509.25050).
    """
    return scale * _z_score(reward, reward_weight, group, scope, ddof, eps).clamp(-clamp, clamp)


def grpo_per_noise(
    reward: Reward,
    reward_weight: RewardWeight,
    root: Int[Tensor, " N"],
    *,
    ddof: int = 0,
    eps: float = 1e-4,
    clamp: float = 5.0,
) -> Advantage:
    """grpo among the rollouts of one initial noise: TempFlow-GRPO's seed groups.  arXiv:2508.04324

    Which mean and std a seed group takes is OUR READING; the other, all noises of the prompt together, is grpo.
    """
    return grpo(reward, reward_weight, root, scope="group", ddof=ddof, eps=eps, clamp=clamp)


def grpo_soft(
    reward: Reward,
    reward_weight: RewardWeight,
    group: Group,
    *,
    scope: str = "batch",
    ddof: int = 0,
    eps: float = 1e-4,
    limit: float = 3.0,
) -> Advantage:
    """grpo with the soft clamp limit * tanh(z / limit): no outlier decides an update.  arXiv:2604.23380

    Whose std divides is OUR READING; scope and ddof are those of grpo.
    """
    return limit * (_z_score(reward, reward_weight, group, scope, ddof, eps) / limit).tanh()


def _z_score(reward, reward_weight, group, scope, ddof, eps):
    score = raw(reward, reward_weight)
    everyone = torch.zeros_like(group)
    if scope not in SCOPES:
        raise ValueError(f"scope {scope!r}: accepted are {', '.join(SCOPES)}.")
    centred = group_centre(score, group)
    if scope == "none":
        return centred
    return centred / (group_std(score, group if scope == "group" else everyone, ddof=ddof) + eps)


def rloo(reward: Reward, reward_weight: RewardWeight, group: Group) -> Advantage:
    """Reward minus the mean reward of the *other* rollouts of the prompt.  arXiv:2402.14740

    r_i - mean_{j != i} r_j  =  (r_i - mean_j r_j) * n / (n - 1);  0 for a group of one.
    """
    n = group_count(group)
    return group_centre(raw(reward, reward_weight), group) * n / (n - 1).clamp(min=1)


def raw(reward: Reward, reward_weight: RewardWeight) -> Advantage:
    """The weighted reward itself, for tree credit that compares edges instead of leaves.

    Keeps a shift of the rewards: not a comparison yet.
    """
    return (reward * reward_weight).sum(1)  # a matrix product rounds equal rows differently


def best_and_worst(reward: Reward, reward_weight: RewardWeight, group: Group) -> Advantage:
    """1 for the best rollout of a group, -1 for the worst, 0 for the others and in a group without difference.

    Of several best or worst ones the first counts.  arXiv:2311.12908
    """
    score = raw(reward, reward_weight)
    winner, loser = (_first_of_largest(sign * score, group) for sign in (1, -1))
    return (winner.to(score.dtype) - loser.to(score.dtype)) * (group_spread(score, group) > 0)


def best_of_group(reward: Reward, reward_weight: RewardWeight, group: Group) -> Advantage:
    """1 for every rollout as good as the best of its group, 0 for the others: SFT on the best.  arXiv:2304.06767

    Copies equal rewards: a group without difference is all 1, there is nothing better to imitate.
    """
    score = raw(reward, reward_weight)
    return (score == group_max(score, group)).to(score.dtype)


def reward_itself(reward: Reward, reward_weight: RewardWeight) -> Advantage:
    """The weighted reward as the weight of a picture: reward-weighted regression.  arXiv:2302.12192

    Keeps a shift of the rewards, and they must not be negative: such a weight would unlearn without bound.
    """
    score = raw(reward, reward_weight)
    if bool((score < 0).any()):
        raise ValueError(
            f"reward_itself: the weighted reward {float(score.min()):.4g} is negative, and a picture cannot weigh less "
            "than nothing. Shift or rescale the reward, or use advantage = best_of_group."
        )
    return score


def _first_of_largest(x, group):
    """Whether a row is the first among the largest of its group."""
    row = torch.arange(len(x))
    candidate = torch.where(x == group_max(x, group), row, len(x))
    return row == -group_max(-candidate, group)
