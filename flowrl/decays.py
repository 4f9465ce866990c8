"""How much of itself a snapshot keeps when it is refreshed: (refresh, ...) -> share in [0, 1].

refresh counts from 1 and by updates of the run, not by optimizer steps: with `every` = 1 it is the number of complete
updates. 0 makes a copy of the policy, values near 1 a slow average of it.
"""


def constant(refresh: int, *, share: float) -> float:
    """The same share always."""
    return share


def warming(refresh: int, *, share: float = 0.9) -> float:
    """min(share, (1 + n) / (10 + n)): an average that follows fast at first.  arXiv:2505.05470"""
    return min(share, (1 + refresh) / (10 + refresh))


def linear(refresh: int, *, slope: float, most: float, start: float = 0.0, after: int = 0) -> float:
    """start + slope * max(n - after, 0), at most `most`: a policy that follows ever more slowly.  arXiv:2509.16117

    DiffusionNFT's old policy: slope .001, most .5; or after 75, slope .0075, most .999.
    """
    return min(start + slope * max(refresh - after, 0), most)
