"""FSDP2: a network's weights, gradients and optimiser state shared out over processes, whole where they are written.

A sharded parameter is a DTensor whose memory belongs to the network: its values may change, its place may not.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def share_out(network: nn.Module, blocks: Collection[str], device: torch.device, processes: int) -> None:
    """Give every process its part of each parameter; a block is gathered when its turn comes, and let go after it.

    blocks: class names of the modules that are gathered one at a time; what is in none of them is gathered at first
    """
    mesh = init_device_mesh(device.type, (processes,))
    for module in [m for m in network.modules() if type(m).__name__ in blocks]:
        fully_shard(module, mesh=mesh)
    fully_shard(network, mesh=mesh)
    network.register_forward_hook(_let_go)


def _let_go(network, arguments, out):
    """Without a gradient no backward pass lets the outermost weights go, and a snapshot may follow."""
    if not torch.is_grad_enabled():
        network.reshard()


def whole(x: Tensor) -> Tensor:
    """A tensor with the parts of all processes; every process calls it alike."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def in_host_memory(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole copies on the CPU, or {} where none is kept; every process calls it alike."""
    copies = {}
    for name, x in tensors.items():
        full = whole(x)
        if keep:
            copies[name] = full.to("cpu", copy=True).contiguous()
    return copies


def shared_as(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor shared out as another one is; every process calls it alike."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full.to(like.device, like.dtype), like.device_mesh, like.placements)


def sum_(gradients: Iterable[Tensor], processes: int) -> None:
    """Turn the mean over processes, which FSDP2 makes of gradients, into their sum."""
    for gradient in gradients:
        gradient.mul_(processes)
