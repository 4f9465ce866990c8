"""Packages that only some runs need."""

from importlib.util import find_spec


def installed(name: str) -> bool:
    """Whether a package can be imported; a folder of that name on the path, as wandb leaves them, is none."""
    found = find_spec(name)
    return found is not None and found.origin is not None
