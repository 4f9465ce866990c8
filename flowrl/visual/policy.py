"""What RL needs to know of a flow generator, and the snapshots of its trainable weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flowrl.recipe import Snapshot


@dataclass(frozen=True)
class Example:
    """One line of a prompt file: what the generator is asked for, and what the rewards are told."""

    prompt: str
    negative_prompt: str = ""
    metadata: dict = field(default_factory=dict)
    pictures: tuple[str, ...] = ()  # files that condition the generator, where it edits


ShareOut = Callable[[nn.Module, Collection[str]], None]  # a network, class names of its blocks: weights become shards


@runtime_checkable
class Policy(Protocol):
    """A flow generator as RL sees it.  Guidance, packing and timestep = 1000 * sigma stay inside.

    `forwards` and `backwards` count rows: one state through the network once; where the policy runs a guided pair,
    rows_per_state is 2. Prompt ids stay on the CPU.
    """

    forwards: int
    backwards: int
    guidance: float
    frames: int  # of a sample; 1: it is a picture
    snapshots: "Snapshots"

    @property
    def rows_per_state(self) -> int: ...
    def encode(self, examples: Sequence[Example]) -> Tensor: ...  # -> prompt ids [P], append-only
    def noise(self, n: int, generator: torch.Generator) -> Tensor: ...  # [n, *L], drawn on the CPU
    def sigmas(self, steps: int) -> Tensor: ...  # [steps + 1], 1 -> 0
    def velocity(self, latents: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor: ...  # [B,*L],[B],[B] -> [B,*L]
    def decode(self, latents: Tensor) -> Tensor: ...  # [N, *L] -> [N, 3, H, W] or videos [N, F, 3, H, W] in [0, 1]
    def trainable(self) -> list[tuple[str, nn.Parameter]]: ...
    def snapshot(self, name: str, rule: Snapshot, update: int) -> None: ...
    def at(self, name: str) -> AbstractContextManager: ...  # "current" or a snapshot's suffix
    def distribute(self, share_out: ShareOut) -> None: ...  # before any snapshot is taken


@contextmanager
def uncounted(policy: Policy):
    """Rows of the network that are no part of an update's cost."""
    before = policy.forwards, policy.backwards
    try:
        yield
    finally:
        policy.forwards, policy.backwards = before


class Snapshots:
    """Copies of the trainable weights under a name; `at` swaps them in without copying and always swaps back.

    base:   a context manager that switches the adapters off; a frozen snapshot of a policy with adapters is that
    pinned: the parameters must stay where they are in memory, so that values are exchanged, not places
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        base: Callable[[], AbstractContextManager] | None = None,
        pinned: bool = False,
    ):
        self._parameters = list(parameters)
        self._base, self._pinned = base, pinned
        self._kept: dict[str, list[Tensor] | None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    @torch.no_grad()
    def refresh(self, name: str, rule: Snapshot, update: int) -> None:
        """Make the snapshot the first time; afterwards move it towards the current weights as its rule says."""
        live = [p.data for p in self._parameters]
        if name not in self._kept:
            without_copy = rule.decay is None and self._base is not None
            self._kept[name] = None if without_copy else [x.clone() for x in live]
        elif (share := rule.share_kept(update)) < 1:
            for kept, now in zip(self._kept[name], live, strict=True):
                kept.lerp_(now, 1 - share)

    def state(self) -> dict[str, list[Tensor]]:
        """The kept tensors by name, in the order of the parameters; a reference that is the base model has none."""
        return {name: list(kept) for name, kept in self._kept.items() if kept is not None}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Put what `state` returned into the snapshots of these names, which have been made."""
        assert state.keys() == self.state().keys(), f"snapshots {set(state)} where there are {set(self.state())}"
        for name, saved in state.items():
            for kept, tensor in zip(self._kept[name], saved, strict=True):
                kept.copy_(tensor)

    @contextmanager
    def at(self, name: str):
        """Run with the weights of the snapshot `name`, or with the current ones."""
        if name == "current":
            yield
        elif self._kept[name] is None:
            with self._base():
                yield
        else:
            self._swap(name)
            try:
                yield
            finally:
                self._swap(name)

    def adopt(self, name: str) -> None:
        """Make the snapshot `name` the current weights, for good."""
        if name != "current":
            self._swap(name)

    @torch.no_grad()
    def _swap(self, name):
        kept = self._kept[name]
        for i, parameter in enumerate(self._parameters):
            if self._pinned:
                before = parameter.data.clone()
                parameter.data.copy_(kept[i])
                kept[i].copy_(before)
            else:
                parameter.data, kept[i] = kept[i], parameter.data
