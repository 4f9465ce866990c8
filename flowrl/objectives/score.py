"""The score function itself: (log_prob, advantage: [B, K]) -> loss [B, K], without a ratio and its old policy."""

from jaxtyping import Float
from torch import Tensor

BK = Float[Tensor, "B K"]


def reinforce(log_prob: BK, advantage: BK) -> BK:
    """-advantage * log_prob: on the first, on-policy update the gradient of every surrogate.  Silent at advantage 0.

    TreeGRPO's loss as its algorithm states it (its text clips a ratio).  arXiv:2512.08153
    """
    return -advantage * log_prob


reinforce.silent = True  # no advantage, no gradient: such rows may be skipped
