"""The methods, each as its difference from another, and the catalogue that is read off their docstrings."""

import re
from collections.abc import Callable
from importlib import import_module
from inspect import cleandoc, getmembers, isfunction
from pkgutil import walk_packages

from flowrl.part import nearest
from flowrl.recipe import Recipe

PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})|(https?://\S+)")


def catalogue() -> dict[str, Callable[[], Recipe]]:
    """{key: recipe function} of every public function in the modules below this package."""
    found = {}
    for info in walk_packages(__path__, __name__ + "."):
        module = import_module(info.name)
        for key, fn in getmembers(module, isfunction):
            if fn.__module__ == module.__name__ and not key.startswith("_"):
                found[key] = fn
    return dict(sorted(found.items()))


def find(key: str) -> Callable[[], Recipe]:
    """The recipe function called `key`."""
    known = catalogue()
    if key not in known:
        raise ValueError(f"recipe.name = {key!r}: no such recipe. {nearest(key, known)}Recipes: {', '.join(known)}.")
    return known[key]


def describe(key: str) -> dict[str, object]:
    """What the catalogue says of a recipe: key, title, paper, summary, kind, parts, and what it asks of the policy."""
    fn = find(key)
    recipe, line = fn(), cleandoc(fn.__doc__).splitlines()[0]
    paper = PAPER.search(line)
    title, summary = line[: paper.start()].strip().split(": ", 1)
    return {
        "key": key,
        "title": title,
        "paper": paper.group(1) or paper.group(2),
        "summary": summary.rstrip("."),
        "kind": fn.__module__.removeprefix(__name__ + "."),
        "parts": {role: filled.name for role, filled in recipe.parts()},
        "asks": sorted(recipe.needs),
    }
