"""Online reinforcement learning for diffusion and flow-matching generators."""

from importlib.util import find_spec
from pathlib import Path

for _name in ("rewards", "samplers"):
    _found = find_spec(_name)
    if (
        _found is None
        or _found.origin is None
        or Path(_found.origin).resolve().parents[1] != Path(__file__).resolve().parents[1]
    ):
        raise ImportError(
            f"{_found.origin if _found else 'nothing'} stands where flowrl's own package {_name!r} should be found. "
            f"Rename your {_name}.py (say my_{_name}.py), or start Python from another directory."
        )

from flowrl.part import Part, part  # noqa: E402
from flowrl.recipe import Noising, Recipe, Rollout, Snapshot, copied, frozen  # noqa: E402
from flowrl.train_step import train_step  # noqa: E402

__all__ = [
    "Noising",
    "Part",
    "Recipe",
    "Rollout",
    "Snapshot",
    "align",
    "copied",
    "frozen",
    "part",
    "train_step",
]


def __getattr__(name: str):
    """`flowrl.align` is loaded when it is asked for: it brings diffusers along."""
    if name == "align":
        from flowrl.run.align import align

        return align
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")
