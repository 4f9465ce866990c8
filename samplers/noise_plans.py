"""Which steps draw noise: (steps[, iteration][, generator][, forks]) -> increasing step indices.

Step 0 is the noisiest, step `steps - 1` ends at sigma = 0. The last step never draws: its noise would land on the
finished picture and its density is degenerate. A plan is a pure function of the iteration, so that resuming needs no
state; one that draws takes a private generator, the same on every rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

THEN = ("restart", "stay")


def all_but_last(steps: int) -> tuple[int, ...]:
    """Every step but the last."""
    return tuple(range(steps - 1))


def listed(steps: int, *, at: Sequence[int] = (0, 2, 4, 6)) -> tuple[int, ...]:
    """The steps given; AdaGRPO perturbs four of sixteen, each by itself.  arXiv:2606.06828"""
    for t in at:
        window(steps, start=t, width=1)
    if len(set(at)) < len(at) or not at:
        raise ValueError(f"noisy steps {list(at)}: expected one or more, all different.")
    return tuple(sorted(at))


def window(steps: int, *, start: int = 0, width: int = 4) -> tuple[int, ...]:
    """`width` consecutive steps from `start` on; the others follow the ODE.  arXiv:2507.21802"""
    if width < 1 or start < 0 or start + width > steps - 1:
        raise ValueError(
            f"a window of {width} steps from step {start} on does not fit: steps 0..{steps - 2} of {steps} may draw "
            f"noise (step {steps - 1} ends at sigma_next = 0 and has no transition noise)."
        )
    return tuple(range(start, start + width))


def random_window(steps: int, generator: torch.Generator, *, width: int = 3, within: float = 0.5) -> tuple[int, ...]:
    """`width` consecutive steps, their start drawn uniformly so that they lie in the first `within` of the steps.

    Flow-GRPO-Fast's window form: width 2 or 3 in the first half (its published runs).  arXiv:2505.05470
    MixGRPO's random form: width 4, within 1.  arXiv:2507.21802
    """
    room = min(int(within * steps), steps - 1) - width
    if room < 0:
        raise ValueError(f"a window of {width} steps does not fit into the first {within} of {steps} steps.")
    start = int(torch.randint(room + 1, (), generator=generator))
    return window(steps, start=start, width=width)


def single(steps: int, generator: torch.Generator, *, within: float = 1.0) -> tuple[int, ...]:
    """One step, drawn uniformly among the first `within` of the steps: what happens there earns it all.

    TempFlow-GRPO's branching step.  arXiv:2508.04324
    """
    return random_window(steps, generator, width=1, within=within)


def geometric_window(steps: int, generator: torch.Generator, *, width: int = 3, ratio: float = 0.5) -> tuple[int, ...]:
    """`width` consecutive steps; P(start = i) falls like ratio^i over all places.  TreeGRPO.  arXiv:2512.08153"""
    if not 0 < ratio <= 1:
        raise ValueError(f"a geometric window of ratio {ratio}: expected more than 0 and at most 1.")
    window(steps, start=0, width=width)
    weight = ratio ** torch.arange(steps - width, dtype=torch.float64)
    start = int(torch.multinomial(weight, 1, generator=generator))
    return window(steps, start=start, width=width)


def progressive(
    steps: int, iteration: int, *, width: int = 4, every: int = 25, stride: int = 1, then: str = "restart"
) -> tuple[int, ...]:
    """A window that moves on by `stride` every `every` iterations, from the noise to the picture.  arXiv:2507.21802

    It keeps its full width inside 0..steps-2, the last move being shorter if need be (published code lets it shrink to
    nothing). then: at the end "restart" or "stay".
    """
    return _moving(steps, iteration, width, stride, then, lambda start, last: every)


def decaying(
    steps: int,
    iteration: int,
    *,
    width: int = 4,
    most: int = 10,
    least: int = 1,
    stride: int = 1,
    then: str = "restart",
) -> tuple[int, ...]:
    """progressive, staying `most` iterations at the first place and linearly fewer until `least` at the last.

    Rounded to the nearest whole number: OUR READING.  arXiv:2507.21802
    """
    return _moving(
        steps, iteration, width, stride, then, lambda start, last: round(most - (most - least) * start / max(last, 1))
    )


def exp_decaying(
    steps: int,
    iteration: int,
    *,
    width: int = 4,
    most: int = 25,
    rate: float = 0.1,
    after: int = 13,
    stride: int = 1,
    then: str = "restart",
) -> tuple[int, ...]:
    """progressive, staying ceil(most * exp(-rate * max(start - after, 0))) iterations at a place.  arXiv:2507.21802

    most: OUR READING (the length of progressive's stay).
    """
    return _moving(
        steps,
        iteration,
        width,
        stride,
        then,
        lambda start, last: math.ceil(most * math.exp(-rate * max(start - after, 0))),
    )


def window_and_forks(
    steps: int,
    iteration: int,
    forks: Mapping[int, int],
    *,
    width: int = 4,
    every: int = 25,
    stride: int = 1,
    then: str = "restart",
) -> tuple[int, ...]:
    """A progressive window, and the steps where the tree forks.  BranchGRPO-Mix.  arXiv:2509.06040

    every, stride and then: OUR READING (MixGRPO's).
    """
    moving = progressive(steps, iteration, width=width, every=every, stride=stride, then=then)
    return listed(steps, at=tuple({*moving, *(t for t, children in forks.items() if children > 1)}))


def _moving(
    steps: int, iteration: int, width: int, stride: int, then: str, stay: Callable[[int, int], int]
) -> tuple[int, ...]:
    """The window of this iteration; stay: (start, last start) -> iterations it stays there."""
    if then not in THEN or stride < 1:
        raise ValueError(
            f"a moving window of stride {stride} that at the end does {then!r}: expected a stride of 1 or more, and "
            f"one of {', '.join(THEN)}."
        )
    last = steps - 1 - width
    window(steps, start=0, width=width)
    starts = [*range(0, last, stride), last]
    stays = [stay(start, last) for start in starts]
    if min(stays) < 1:
        raise ValueError(f"a moving window stays for {stays} iterations: expected 1 or more everywhere.")
    ends = list(accumulate(stays))
    if then == "restart":
        iteration %= ends[-1]
    passed = sum(end <= iteration for end in ends)
    return window(steps, start=starts[min(passed, len(starts) - 1)], width=width)
