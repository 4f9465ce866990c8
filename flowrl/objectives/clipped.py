"""Clipped surrogates: (ratio, advantage: [B, K]) -> loss [B, K].  At ratio 1 the gradient is -advantage."""

import torch
from jaxtyping import Float
from torch import Tensor

BK = Float[Tensor, "B K"]


def ppo_clip(ratio: BK, advantage: BK, *, clip_low: float = 0.2, clip_high: float = 0.2) -> BK:
    """The worse of the clipped and the unclipped gain, per decision.  Silent at advantage 0.  arXiv:1707.06347"""
    gain = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return -torch.minimum(gain, clipped)


ppo_clip.silent = True  # no advantage, no gradient: such rows may be skipped
