"""What rewards are shown of latents: the pictures or videos that they decode to, themselves and their noise level."""

from collections.abc import Callable, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from flowrl.visual.policy import Example
from rewards.table import RewardTable

# Called (pictures or videos, example of each, group of each); with latents and sigma where its `sees` names "latents".
Score = Callable[..., RewardTable]


def looks(score: Score) -> bool:
    """Whether it looks at pictures or videos."""
    return not {"images", "videos"}.isdisjoint(getattr(score, "sees", {"images"}))


def show(
    score: Score,
    decode: Callable,
    latents: Float[Tensor, "N *L"],
    examples: Sequence[Example],
    group: Int[Tensor, " N"],
    sigma: Float[Tensor, " N"] | None = None,
) -> RewardTable:
    """What the rewards say of latents at their noise levels, 0 by default.

    Nothing is decoded for a score that looks at latents alone; its pictures are None.
    """
    sees = getattr(score, "sees", {"images"})
    if "latents" not in sees:
        return score(decode(latents), examples, group)
    pictures = decode(latents) if looks(score) else None
    level = latents.new_zeros(len(latents)) if sigma is None else sigma
    return score(pictures, examples, group, latents=latents, sigma=level)
