"""Which of C candidates that leave one state is walked on from: (score [P, C][, generator]) -> index [P].

DRM's step-wise sampling: every state draws candidates, a reward model scores them, one goes on.
https://github.com/jjaxonx/DRM
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def random_one(score: Float[Tensor, "P C"], generator: torch.Generator) -> Int[Tensor, " P"]:
    """Any of them: the states that are visited stay those of the policy.  In training; OUR READING."""
    return torch.randint(score.shape[1], score.shape[:1], generator=generator)


def best_one(score: Float[Tensor, "P C"]) -> Int[Tensor, " P"]:
    """The best scored, the first of equals: greedy guidance, for sampling."""
    return (score == score.max(1, keepdim=True).values).int().argmax(1)
