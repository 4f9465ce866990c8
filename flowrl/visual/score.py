"""What rewards are shown of latents: the pictures that they decode to, the latents and their noise level, or both."""

from collections.abc import Callable, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from flowrl.visual.policy import Example
from rewards.table import RewardTable

# Called (images, example of each, group of each), and with latents and sigma where its `sees` names "latents".
Score = Callable[..., RewardTable]


def show(
    score: Score,
    decode: Callable,
    latents: Float[Tensor, "N *L"],
    examples: Sequence[Example],
    group: Int[Tensor, " N"],
    sigma: Float[Tensor, " N"] | None = None,
) -> RewardTable:
    """What the rewards say of latents at their noise levels, 0 by default.

    Nothing is decoded for a score that looks at latents alone; its images are None.
    """
    sees = getattr(score, "sees", {"images"})
    if "latents" not in sees:
        return score(decode(latents), examples, group)
    images = decode(latents) if "images" in sees else None
    level = latents.new_zeros(len(latents)) if sigma is None else sigma
    return score(images, examples, group, latents=latents, sigma=level)
