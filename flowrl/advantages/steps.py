"""Credit step by step: (advantage [N] or state_reward [N, T+1], edge [N, T], ...) -> [N, T].

Either every state is scored and a step earns what it changed, or the outcome is multiplied by a number per step; such
multipliers come after the clamp of the advantage, and belong here and not in `weight`, which scales penalties too.
Trainable are all steps but the last, which draws no noise. Decisions that do not exist (edge -1) get 0.
state_reward [N, T+1]: score of each state on a rollout's path (or of the clean estimate there), the first at noise.
stds, slopes [T]: of the kernel at each step of the schedule (samplers.kernels.scales).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.advantages.tree import broadcast, edge_share
from flowrl.groups import group_centre, group_std

Advantage = Float[Tensor, " N"]
StateReward = Float[Tensor, "N T1"]
Edge = Int[Tensor, "N T"]
Group = Int[Tensor, " N"]
PerStep = Float[Tensor, " T"]
Credit = Float[Tensor, "N T"]


def gain(
    state_reward: StateReward, edge: Edge, group: Group, *, ddof: int = 0, eps: float = 1e-8, clamp: float = 5.0
) -> Credit:
    """Stepwise-Flow-GRPO: how much a step raised the score, z-scored over all steps of the group.  arXiv:2603.28718

    One mean and std for all steps together: early gains are larger and stay so. The last, determined step takes part
    in them; eps is OUR READING.
    """
    flat, exists = state_reward.diff(dim=1).flatten(), (edge >= 0).flatten()
    each, weight = group.repeat_interleave(edge.shape[1]), exists.to(state_reward.dtype)
    score = group_centre(flat, each, weight) / (group_std(flat, each, weight, ddof=ddof) + eps)
    return torch.where(exists, score, 0).clamp(-clamp, clamp).view(edge.shape)


def siblings(
    state_reward: StateReward,
    edge: Edge,
    root: Int[Tensor, " N"],
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    clamp: float = 5.0,
) -> Credit:
    """DRM's step-wise GRPO: compare the score a step reached with those of the others that left the same state.

    A candidate that was not walked on from is a row that ends there: edge -1 from then on. ddof, eps and clamp are OUR
    READING.  https://github.com/jjaxonx/DRM
    """
    before = -1 - root  # no edge: the state is the initial noise
    out, share = [], edge_share(edge)
    for t in range(edge.shape[1]):
        exists, value = edge[:, t] >= 0, state_reward[:, t + 1]
        once = torch.where(exists, 1 / share[:, t], 0).to(value.dtype)
        score = group_centre(value, before, once) / (group_std(value, before, once, ddof=ddof) + eps)
        out.append(torch.where(exists, score, 0).clamp(-clamp, clamp))
        before = torch.where(exists, edge[:, t], before)
    return torch.stack(out, 1)


def noise_aware(advantage: Advantage, edge: Edge, stds: PerStep) -> Credit:
    """TempFlow-GRPO: times the noise a step injects, std_k over its mean over the trainable steps.  arXiv:2508.04324

    The size of a step's gradient is inverse to its noise, so late steps decide alone otherwise. SuperFlow's step
    factor is the same (arXiv:2512.17951).
    """
    return broadcast(advantage, edge) * (stds / stds[:-1].mean())


def snr_aware(advantage: Advantage, edge: Edge, sigmas: Float[Tensor, " T1"]) -> Credit:
    """noise_aware with sqrt(sigma / (1 - sigma)), which does not see the length of a step.

    A third party's rendering of TempFlow-GRPO.  https://github.com/xingzhejun/GCPO
    """
    odds = sigmas[:-1] / (1 - torch.minimum(sigmas[:-1], sigmas[1]))
    return broadcast(advantage, edge) * (odds.sqrt() / odds[:-1].sqrt().mean())


def per_dt(advantage: Advantage, edge: Edge, sigmas: Float[Tensor, " T1"], *, eps: float = 1e-6) -> Credit:
    """GRPO-Guard: over the length of the step, so that the gradients of a guarded ratio are of one size.

    The mean of Flow-SDE moves with velocity by a constant times dt; with another kernel use per_slope.
    arXiv:2510.22319
    """
    return broadcast(advantage, edge) / (sigmas[:-1] - sigmas[1:] + eps)


def per_slope(advantage: Advantage, edge: Edge, slopes: PerStep) -> Credit:
    """per_dt for any kernel: over |d mean / d velocity|; for Dance-SDE dt (1 + eta^2 (1-sigma) / 2 sigma).

    That the factor divides, as equal gradients need, is OUR READING.  arXiv:2510.22319
    """
    return broadcast(advantage, edge) / slopes.abs()


def equalised(advantage: Advantage, edge: Edge, stds: PerStep, slopes: PerStep) -> Credit:
    """SAGE-GRPO: times median(J) / J with J = |slope| / std, so that all steps' gradients are of one size.

    The median over the trainable steps; a step without noise gets 0.  arXiv:2603.21872
    """
    size = slopes.abs() / stds
    return broadcast(advantage, edge) * (size[:-1].quantile(0.5) / size)
