"""Bytes that a pipeline takes, from its shapes alone: networks run on the meta device, and nothing is computed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

from flowrl.visual.pipelines import parts
from flowrl.visual.pipelines.family import Family


@dataclass(frozen=True)
class Activations:
    """Bytes of one state on its way through the networks with a gradient.

    kept:         for the backward pass
    checkpointed: the same where blocks are computed twice: what goes into them, and the inside of the largest
    block:        the inside of the largest block
    """

    kept: int
    checkpointed: int
    block: int


def activations(family: Family, dtype: torch.dtype) -> Activations:
    """Run one state through networks on the meta device, with every weight that asks for a gradient."""
    text = {name: x.to(dtype) if x.is_floating_point() else x for name, x in family.blank().items()}
    latents = torch.empty(1, *family.shape(), dtype=dtype, device="meta")
    sigma, guidance = (torch.full((1,), x, device="meta") for x in (0.5, 3.5))
    networks = parts.networks(family.pipe, family.NETWORKS)
    ledger = Ledger([p for network in networks.values() for p in network.parameters()])
    for network in networks.values():
        ledger.watch(network, family.BLOCKS)
    fused = mock.patch.object(nn.functional, "scaled_dot_product_attention", _fused)
    with fused, torch.autograd.graph.saved_tensors_hooks(ledger.saved, lambda x: x):
        family.velocity(latents, sigma, [text], guidance if family.embeds_guidance() else None)
    block = max(ledger.inside.values(), default=0)
    outside = ledger.total - sum(ledger.inside.values())
    return Activations(ledger.total, outside + ledger.inputs + block, block)


def _fused(query, key, value, *_, **__):
    return Fused.apply(query, key, value)


class Fused(torch.autograd.Function):
    """Attention as fused kernels keep it, without a matrix of scores, which the meta device would keep."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out)
        return out


class Ledger:
    """Bytes that autograd keeps, each storage once and without weights; and those of blocks."""

    def __init__(self, weights: Collection[nn.Parameter]):
        self.total = self.inputs = 0
        self.inside: dict[int, int] = {}  # by block
        self._seen = {p.untyped_storage()._cdata for p in weights}
        self._held: list[Tensor] = []  # a storage that is let go would lend its address to another
        self._block: int | None = None
        self._blocks = 0

    def watch(self, network: nn.Module, blocks: Collection[str]) -> None:
        for module in network.modules():
            if type(module).__name__ in blocks:
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave)

    def saved(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._held.append(x)
            self.total += storage.nbytes()
            if self._block is not None:
                self.inside[self._block] = self.inside.get(self._block, 0) + storage.nbytes()
        return x

    def _enter(self, module, args, kwargs):
        if self._block is None:
            self._blocks += 1
            self._block, self._module = self._blocks, module
            self.inputs += sum(x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, Tensor))

    def _leave(self, module, args, out):
        if module is self._module:
            self._block = None


def weights(components: Mapping[str, nn.Module], dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each component's weights in dtype."""
    size = torch.empty((), dtype=dtype).element_size()
    return {name: size * sum(p.numel() for p in module.parameters()) for name, module in components.items()}
