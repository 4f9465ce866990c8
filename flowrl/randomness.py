"""Named randomness: every draw has a private CPU generator whose seed is a hash of what it is for.

The same name gives the same numbers on any device, in any process and after a resume; nothing touches torch's, numpy's
or Python's global generators, and no order of calls matters. torch's CPU engine keeps 32 bits of a seed, so two of very
many names may share their numbers; within one group that is out of the question.
"""

from hashlib import blake2b

import torch


def generator(seed: int, *name: int | str) -> torch.Generator:
    """A generator named by the run's seed and, say, (iteration, "step noise", group, member)."""
    digest = blake2b(repr((seed, *name)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
