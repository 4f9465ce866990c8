"""Which steps draw noise: (steps[, iteration][, generator]) -> increasing step indices.

Step 0 is the noisiest, step `steps - 1` ends at sigma = 0. The last step never draws: its noise would land on the
finished picture and its density is degenerate. A plan that draws takes a private generator, the same on every rank.
"""

import torch


def all_but_last(steps: int) -> tuple[int, ...]:
    """Every step but the last."""
    return tuple(range(steps - 1))


def window(steps: int, *, start: int = 0, width: int = 4) -> tuple[int, ...]:
    """`width` consecutive steps from `start` on; the others follow the ODE.  arXiv:2507.21802"""
    if width < 1 or start < 0 or start + width > steps - 1:
        raise ValueError(
            f"a window of steps {start}..{start + width - 1} does not fit: steps 0..{steps - 2} of {steps} may draw "
            f"noise (step {steps - 1} ends at sigma_next = 0 and has no transition noise)."
        )
    return tuple(range(start, start + width))


def random_window(steps: int, generator: torch.Generator, *, width: int = 3, within: float = 0.5) -> tuple[int, ...]:
    """`width` consecutive steps, their start drawn uniformly so that they lie in the first `within` of the steps.

    Flow-GRPO-Fast's window form: width 2 or 3 in the first half (its published runs).  arXiv:2505.05470
    """
    room = min(int(within * steps), steps - 1) - width
    if room < 0:
        raise ValueError(f"a window of {width} steps does not fit into the first {within} of {steps} steps.")
    start = int(torch.randint(room + 1, (), generator=generator))
    return window(steps, start=start, width=width)
