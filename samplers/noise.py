"""The standard normal that children of one state are moved by: (own[, shared]) -> noise [P, C, *L].

Each is N(0, I), unless a function says that it breaks this.
own [P, C, *L] is drawn per child, shared [P, 1, *L] once per forking state and only if asked for.
"""

from jaxtyping import Float
from torch import Tensor


def independent(own: Float[Tensor, "P C *L"]) -> Float[Tensor, "P C *L"]:
    """Siblings know nothing of each other."""
    return own


def correlated(
    own: Float[Tensor, "P C *L"], shared: Float[Tensor, "P 1 *L"], *, strength: float = 4.0
) -> Float[Tensor, "P C *L"]:
    """(shared + strength * own) / sqrt(1 + strength^2): still N(0, I), siblings correlate by 1 / (1 + strength^2).

    BranchGRPO's branch noise.  arXiv:2509.06040
    """
    return (shared + strength * own) / (1 + strength**2) ** 0.5


def scaled(own: Float[Tensor, "P C *L"], *, strength: float = 4.0) -> Float[Tensor, "P C *L"]:
    """strength * own: as BranchGRPO's published code branches, to compare with.  arXiv:2509.06040

    Breaks N(0, I) on purpose: the log-prob is still taken with the kernel's std, so what is drawn does not follow the
    density that is trained.
    """
    return strength * own
