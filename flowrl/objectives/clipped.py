"""Surrogates of the ratio: (ratio, advantage, ...: [B, K]) -> loss [B, K].  At ratio 1 the gradient is -advantage."""

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.objectives.penalties import kl_gaussian

BK = Float[Tensor, "B K"]
Latents = Float[Tensor, "B K *L"]


def ppo_clip(ratio: BK, advantage: BK, *, clip_low: float = 0.2, clip_high: float = 0.2) -> BK:
    """The worse of the clipped and the unclipped gain, per decision.  Silent at advantage 0.  arXiv:1707.06347"""
    return _clip(ratio, advantage, 1 - clip_low, 1 + clip_high)


def ppo_clip_by_outcome(
    ratio: BK, advantage: BK, *, clip_low: float = 1e-4, clip_high: float = 1e-4, sensitivity: float = 0.5
) -> BK:
    """ppo_clip that lets good samples move further up and bad ones further down.  Silent at advantage 0.

    Dynamic-TreeRPO: with z = advantage clamped to +-1 the upper range is clip_high (1 + sensitivity max(z, 0)), the
    lower clip_low (1 + sensitivity max(-z, 0)). The form and its numbers are OUR READING.  arXiv:2509.23352
    """
    z = advantage.clamp(-1, 1)
    low = 1 - clip_low * (1 + sensitivity * (-z).clamp(min=0))
    high = 1 + clip_high * (1 + sensitivity * z.clamp(min=0))
    return _clip(ratio, advantage, low, high)


def unclipped(ratio: BK, advantage: BK) -> BK:
    """-advantage * ratio: the score function where the policy that drew is the current one.  Silent at advantage 0.

    AdaGRPO's loss, exp(log_prob - its detached self) as the ratio.  arXiv:2606.06828
    """
    return -advantage * ratio


def dppo(ratio: BK, advantage: BK, mean: Latents, mean_old: Latents, std: BK, *, largest: float = 1e-5) -> BK:
    """Flow-DPPO: unclipped, but nothing more is gained once a step has moved far enough.  Silent at advantage 0.

    0 where the step's KL to the old policy is `largest` or more *and* the ratio went the way the advantage wants.
    https://github.com/Tencent-Hunyuan/UniRL
    """
    far = kl_gaussian(mean, mean_old, std).detach() >= largest
    moved = ((advantage > 0) & (ratio.detach() > 1)) | ((advantage < 0) & (ratio.detach() < 1))
    return torch.where(far & moved, 0, -advantage * ratio)


def _clip(ratio, advantage, low, high):
    """The worse of the gain and the gain of the ratio held between low and high."""
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


# no advantage, no gradient: such rows may be skipped
ppo_clip.silent = ppo_clip_by_outcome.silent = unclipped.silent = dppo.silent = True
