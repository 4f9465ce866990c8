"""The hint that ends an error about a name."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(given: object, known: Iterable[object]) -> str:
    """ " Did you mean 'steps'?", or nothing where no known name is near."""
    near = get_close_matches(str(given), [str(name) for name in known], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
