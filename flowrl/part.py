"""A pure function with its numbers: arguments before the `*` are quantities, arguments after it numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, signature


def nearest(name: str, known) -> str:
    """A hint for an error message: the most similar known name, or nothing."""
    match = get_close_matches(str(name), [str(k) for k in known], n=1)
    return f"Did you mean {match[0]!r}? " if match else ""


@dataclass(frozen=True)
class Part:
    """A function with its numbers bound.  Arguments before the `*` are quantities, after it numbers."""

    fn: Callable
    numbers: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def takes(self) -> dict[str, Parameter]:
        """The numbers it may be given."""
        return {n: p for n, p in signature(self.fn).parameters.items() if p.kind is Parameter.KEYWORD_ONLY}

    @property
    def needs(self) -> list[str]:
        """The quantities it asks for, in order."""
        return [n for n, p in signature(self.fn).parameters.items() if p.kind is not Parameter.KEYWORD_ONLY]

    def number(self, name: str) -> object:
        """The value of a number: the recipe's, else the function's default; None if it takes no such number."""
        return self.numbers.get(name, self.takes[name].default) if name in self.takes else None

    def __call__(self, **quantities):
        return self.fn(*[quantities[n] for n in self.needs], **self.numbers)

    @property
    def bound(self) -> Callable:
        """The plain function with its numbers filled in."""
        return partial(self.fn, **self.numbers)


def part(fn: Callable, **numbers) -> Part:
    """Bind numbers to `fn`; reject one that it does not take, demand one that it must have."""
    takes = Part(fn).takes
    for name in numbers.keys() - takes.keys():
        hint = nearest(name, takes)
        raise ValueError(f"{fn.__name__} takes no {name!r}. {hint}Numbers here: {', '.join(takes) or 'none'}.")
    for name in [n for n, p in takes.items() if p.default is p.empty and n not in numbers]:
        raise ValueError(f"{fn.__name__} needs a value for {name!r}.")
    return Part(fn, numbers)
