"""The processes of a run, through accelerate: who this one is, sums of gradients, and tables seen by everybody."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed
from accelerate import PartialState
from torch import Tensor, nn

from flowrl.run import sharding
from flowrl.run.peers import PeerLost
from flowrl.visual.ranks import Ranks

BUCKET = 64 * 2**20  # bytes that are copied side by side for one sum over processes
TABLES, GRADIENTS, STEPS, SHARDS = (
    "tables were gathered",
    "gradients were summed",
    "they agreed on their calls",
    "weights were put together",
)


def buckets(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, at most `size` bytes together; a larger tensor stands alone."""
    bucket, held = [], 0
    for x in tensors:
        if bucket and (held + x.nbytes > size or x.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(x)
        held += x.nbytes
    if bucket:
        yield bucket


class Processes:
    """One process, or several under `accelerate launch` or torchrun; gloo on CPUs, nccl on GPUs.

    timeout: seconds in which all processes must meet; PeerLost says which meeting failed
    sharded: share out the weights with FSDP2; every process then has to call the network equally often
    """

    def __init__(self, device: str, timeout: int = 1800, sharded: bool = False):
        self.timeout = timeout
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a watchdog thread aborts, with a page of its own
        try:
            self._state = PartialState(cpu=device == "cpu", timeout=timedelta(seconds=timeout))
        except torch.distributed.DistError as error:
            raise self._lost("the processes looked for each other") from error
        self.device = self._state.device
        self.index, self.count = self._state.process_index, self._state.num_processes
        self.main = self._state.is_main_process
        if sharded and self.count == 1:
            raise ValueError("FSDP has no effect on one process: there is nobody to share the weights with.")
        self.sharded = sharded
        self._hosts = torch.distributed.new_group(backend="gloo") if sharded else None  # agrees without the GPUs

    def ranks(self) -> Ranks:
        return Ranks(self.index, self.count, self.gather, self.agree)

    def _meet(self, what: str, collective: Callable, *arguments) -> None:
        """Call a collective; that a peer is gone is all that can go wrong in one."""
        try:
            collective(*arguments)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._lost(what) from error

    def _lost(self, what):
        return PeerLost(f"another process ended or did not answer within {self.timeout} s, while {what}.")

    def lost(self, fault: BaseException) -> PeerLost | None:
        """The fault as that of a peer that is gone, if it is one; FSDP2 meets inside of the network."""
        torn = isinstance(fault, torch.distributed.DistError) or "gloo/transport" in str(fault)
        return fault if isinstance(fault, PeerLost) else self._lost(SHARDS) if torn and self.sharded else None

    def gather(self, rows: Tensor) -> Tensor:
        """[n, ...] of each process -> all rows on the CPU, in the order of processes; n may differ."""
        if self.count == 1:
            return rows.cpu()
        counts = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(self.count)]
        self._meet(TABLES, torch.distributed.all_gather, counts, torch.tensor([len(rows)], device=self.device))
        sizes = [int(n) for n in counts]
        sent = rows.to(self.device, torch.uint8 if rows.dtype == torch.bool else rows.dtype)
        padded = sent.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = sent
        received = [torch.empty_like(padded) for _ in range(self.count)]
        self._meet(TABLES, torch.distributed.all_gather, received, padded)
        return torch.cat([x[:n] for x, n in zip(received, sizes, strict=True)]).to("cpu", rows.dtype)

    def sum_(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over processes, in messages of BUCKET bytes: no second copy of all of them.

        Of sharded weights FSDP2 has made the mean already.
        """
        if self.sharded:
            sharding.sum_(tensors, self.count)
        if self.count == 1 or self.sharded:
            return
        for bucket in buckets(tensors, BUCKET):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._meet(GRADIENTS, torch.distributed.all_reduce, bucket[0])
                continue
            flat = torch.cat([x.flatten() for x in bucket])
            self._meet(GRADIENTS, torch.distributed.all_reduce, flat)
            for x, total in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                x.copy_(total.view_as(x))

    def sum(self, numbers: list[float]) -> list[float]:
        """The sums over processes of a few numbers."""
        return self.gather(torch.tensor([numbers], dtype=torch.float64)).sum(0).tolist()

    def largest(self, number: float) -> float:
        return float(self.gather(torch.tensor([number], dtype=torch.float64)).max())

    def agree(self, number: int) -> int:
        """The largest number of any process, where weights are sharded; else this one's own."""
        if not self.sharded:
            return number
        found = torch.tensor([number])
        self._meet(STEPS, torch.distributed.all_reduce, found, torch.distributed.ReduceOp.MAX, self._hosts)
        return int(found)

    def share_out(self, network: nn.Module, blocks: Collection[str]) -> None:
        """Share out the weights of a network (flowrl.run.sharding)."""
        sharding.share_out(network, blocks, self.device, self.count)

    def wait(self) -> None:
        self._meet("all were waited for", self._state.wait_for_everyone)

    def close(self) -> None:
        self._state.destroy_process_group()
