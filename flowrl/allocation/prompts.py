"""Which prompts an update trains on: a pure function of (number of prompts, seed, iteration).

No loader and no state: resuming at an iteration gives the same prompts.
"""

from collections.abc import Callable

import torch


def shuffled(count: int, per_update: int, iteration: int, generator_of: Callable[[int], torch.Generator]) -> list[int]:
    """Indices [per_update] of this update; each pass over the prompts is a fresh permutation without repeats.

    generator_of: pass number -> private generator (named by the run's seed)
    """
    first = iteration * per_update
    passes = {}
    for position in range(first, first + per_update):
        if (number := position // count) not in passes:
            passes[number] = torch.randperm(count, generator=generator_of(number))
    return [int(passes[i // count][i % count]) for i in range(first, first + per_update)]
