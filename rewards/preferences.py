"""What a reward model of one's own is trained by: pairs of pictures of which people preferred one."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def bradley_terry(winner: Float[Tensor, " P"], loser: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """-log sigmoid(winner - loser) of the scores of a pair: ln 2 where they are equal.  https://github.com/jjaxonx/DRM

    DRM scores noisy latents, both of a pair at one random level.
    """
    return functional.softplus(loser - winner)
