"""How many children the states of a step get: (noisy) -> {step: children}; noisy: the steps that draw noise.

Where a plan draws the noisy steps, the tree forks along with them: no second draw, and no fork without noise.
"""

from collections.abc import Sequence


def every_noisy(noisy: Sequence[int], *, children: int = 3) -> dict[int, int]:
    """At every noisy step.  arXiv:2512.08153

    TreeGRPO: 3 children at 3 steps. TempFlow-GRPO: 6 at its one step (arXiv:2508.04324).
    """
    return dict.fromkeys(noisy, children)


def first_noisy(noisy: Sequence[int], *, children: int = 9) -> dict[int, int]:
    """At the first noisy step only; the others move every branch by itself.

    Flow-GRPO-Fast's branch form: 9 copies of one state, two noisy steps.  arXiv:2505.05470
    """
    return dict.fromkeys(noisy[:1], children)
