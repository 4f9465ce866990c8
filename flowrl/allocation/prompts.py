"""Which prompts an update trains on: a pure function of (number of prompts, seed, iteration), or of a score of each.

No loader and no state: resuming at an iteration gives the same prompts.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def shuffled(count: int, per_update: int, iteration: int, generator_of: Callable[[int], torch.Generator]) -> list[int]:
    """Indices [per_update] of this update; each pass over the prompts is a fresh permutation without repeats.

    generator_of: pass number -> private generator (named by the run's seed)
    """
    first, passes = iteration * per_update, {}
    for position in range(first, first + per_update):
        if (number := position // count) not in passes:
            passes[number] = torch.randperm(count, generator=generator_of(number))
    return [int(passes[i // count][i % count]) for i in range(first, first + per_update)]


def balanced(
    kinds: Sequence[Sequence[int]],
    per_update: int,
    iteration: int,
    generator_of: Callable[[int, int], torch.Generator],
) -> list[int]:
    """Prompts of an update that take their kinds in turn, so that a rare kind counts as much as a frequent one.

    kinds: the prompts of each kind; generator_of: (kind, pass) -> private generator
    """
    chosen = []
    for position in range(iteration * per_update, (iteration + 1) * per_update):
        turn, kind = divmod(position, len(kinds))
        (index,) = shuffled(len(kinds[kind]), 1, turn, lambda number, kind=kind: generator_of(kind, number))
        chosen.append(kinds[kind][index])
    return chosen


def by_weight(weight: Float[Tensor, " P"], per_update: int, generator: torch.Generator) -> list[int]:
    """Different prompts, drawn with a probability proportional to their weight.  SuperFlow.  arXiv:2512.17951"""
    if per_update > int((weight > 0).sum()):
        raise ValueError(f"{per_update} different prompts of {int((weight > 0).sum())} that have a weight: draw fewer.")
    return torch.multinomial(weight.double(), per_update, generator=generator).tolist()


def nearest_to_proficiency(
    score: Float[Tensor, " P"], proficiency_mean: Float[Tensor, ""], *, candidates: int = 10
) -> int:
    """The one of `candidates` prompts that is neither too easy nor too hard, the first of equals.  arXiv:2606.06828

    AdaGRPO: its score, that of one deterministic picture, is nearest to what the policy scores on all prompts.
    """
    distance = (score - proficiency_mean).abs()
    return int((distance == distance.min()).int().argmax())
