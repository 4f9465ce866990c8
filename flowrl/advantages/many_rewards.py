"""Compare rollouts reward by reward: (reward [N, R], reward_weight [R], group [N]) -> advantage [N].

The contract is that of advantages.outcome. Each function says what becomes of the scales of the rewards.
"""

import torch

from flowrl.advantages.outcome import Advantage, Group, Reward, RewardWeight, grpo, raw
from flowrl.groups import group_centre, group_mean, group_spread, group_std


def per_reward(
    reward: Reward,
    reward_weight: RewardWeight,
    group: Group,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    clamp: float = 5.0,
) -> Advantage:
    """Z-score each reward within its group, weigh and sum.  MixGRPO.  arXiv:2507.21802

    Scales drop out. With one reward it is grpo.
    """
    return raw(_z_scores(reward, group, ddof, eps), reward_weight).clamp(-clamp, clamp)


def gdpo(reward: Reward, reward_weight: RewardWeight, group: Group, *, ddof: int = 0, eps: float = 1e-6) -> Advantage:
    """Z-score each reward within its group, weigh and sum, then whiten over the batch.  arXiv:2601.05242

    Scales of the rewards drop out, so the weights say what they seem to say.
    """
    total = raw(_z_scores(reward, group, ddof, eps), reward_weight)  # its mean over the batch is 0 already
    return total / (group_std(total, torch.zeros_like(group), ddof=ddof) + eps)


def gd2po(
    reward: Reward,
    reward_weight: RewardWeight,
    group: Group,
    *,
    tau: float = 0.2,
    ddof: int = 0,
    eps: float = 1e-6,
) -> Advantage:
    """gdpo without the rollouts whose rewards contradict each other; they get exactly 0.  arXiv:2606.16771

    A rollout is in conflict where one weighed z-score is above 1e-8 and another below -1e-8; it is left out where also
    |sum| / (sum of |.| + 1e-6) < tau. Published: tau .2, .8 in the script; 1 leaves out every conflict. The sum of the
    others is multiplied by the share kept of their group, then whitened over the kept. A group whose rewards are all
    equal stays 0 (OUR READING). Scales drop out. Leave the zeros out of the loss by select = kept.
    """
    each = _z_scores(reward, group, ddof, eps) * reward_weight
    conflict = (each > 1e-8).any(1) & (each < -1e-8).any(1)
    agreement = each.sum(1).abs() / (each.abs().sum(1) + 1e-6)
    kept = (~conflict | (agreement >= tau)).to(reward.dtype)
    total = each.sum(1) * group_mean(kept, group)
    everyone = torch.zeros_like(group)
    white = group_centre(total, everyone, kept) / (group_std(total, everyone, kept, ddof=ddof) + eps)
    return torch.where((kept > 0) & (group_spread(reward, group) > 0).any(1), white, 0)


def dvao(reward: Reward, reward_weight: RewardWeight, group: Group, *, ddof: int = 0, eps: float = 1e-8) -> Advantage:
    """Z-scores weighed by weight * std of their reward in the group: what has no spread here fades.  arXiv:2605.25604

    = sum of weight * centred reward, over the sum of |weight| * std. A larger scale weighs more: bring the rewards to
    one range first. With one reward it is grpo.
    """
    scale = (group_std(reward, group, ddof=ddof) * reward_weight.abs()).sum(1)
    return raw(group_centre(reward, group), reward_weight) / (scale + eps)


def standardised(
    reward: Reward,
    reward_weight: RewardWeight,
    group: Group,
    *,
    ddof: int = 0,
    eps: float = 1e-8,
    clamp: float = 5.0,
) -> Advantage:
    """Standardise each reward over the batch, weigh and sum, z-score within the group.  TreeGRPO.  arXiv:2512.08153

    Scales drop out; a reward that hardly differs within a group weighs little there. ddof and eps are OUR READING.
    """
    score = raw(_z_scores(reward, torch.zeros_like(group), ddof, eps), reward_weight)
    return grpo(score[:, None], torch.ones_like(score[:1]), group, ddof=ddof, eps=eps, clamp=clamp)


def _z_scores(reward, group, ddof, eps):
    """Of every reward by itself, [N, R]."""
    return group_centre(reward, group) / (group_std(reward, group, ddof=ddof) + eps)


for _scaled in (per_reward, gdpo, gd2po, standardised):
    _scaled.scales_each = True  # every reward is brought to one scale before they are summed
