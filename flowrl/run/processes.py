"""The processes of a run, through accelerate: who this one is, sums of gradients, and tables seen by everybody."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed
from accelerate import PartialState
from torch import Tensor, nn

from flowrl.run import sharding
from flowrl.run.peers import PeerLost
from flowrl.visual.ranks import Ranks

BUCKET = 64 * 2**20  # bytes that are copied side by side for one sum over processes
START, TABLES, GRADIENTS, STEPS, SHARDS = (
    "the processes looked for each other",
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


def is_torn(fault: BaseException) -> bool:
    """Whether a fault says that a peer is gone; gloo has no exception of its own."""
    return isinstance(fault, torch.distributed.DistError) or "gloo/transport" in str(fault)


class Processes:
    """One process, or several under `accelerate launch` or torchrun; gloo on CPUs, nccl on GPUs.

    timeout: seconds in which all processes must meet; PeerLost says which meeting failed
    sharded: share out the weights with FSDP2; every process then has to call the network equally often
    """

    def __init__(self, device: str, timeout: int = 1800, sharded: bool = False):
        self.timeout, limit = timeout, timedelta(seconds=timeout)
        if not sharded:
            # What is left to NCCL is a peer that dies inside of a sum. Replicas wait for every sum anyhow: on the host
            # it costs nothing and ends in an exception, instead of an abort by the watchdog, with a page of its own.
            # FSDP2 gathers weights ahead of the network, which this would undo.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        self._state = self._told(START, partial(PartialState, cpu=device == "cpu", timeout=limit))
        self.device = self._state.device
        self.index, self.count = self._state.process_index, self._state.num_processes
        self.main = self._state.is_main_process
        if sharded and self.count == 1:
            raise ValueError("FSDP has no effect on one process: there is nobody to share the weights with.")
        self.sharded, self._deaf = sharded, "nccl" in str(self._state.backend)
        if self.sharded or self._deaf:
            self._hosts = self._told(START, partial(torch.distributed.new_group, backend="gloo", timeout=limit))

    @property
    def on_one_machine(self) -> bool:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.count)) == self.count

    def ranks(self) -> Ranks:
        return Ranks(self.index, self.count, self.gather, self.agree)

    def _meet(self, what: str, collective: Callable, *arguments) -> None:
        """Call a collective once all processes have come to it.

        NCCL would wait for a peer that has left, gloo sees that it has: a replica stops alone, at its own next call.
        """
        if self._deaf:
            self._told(what, torch.distributed.barrier, self._hosts)
        self._told(what, collective, *arguments)

    def _told(self, what: str, meeting: Callable, *arguments):
        """Meet others; that a peer is gone is told as PeerLost, any other fault is one's own."""
        try:
            return meeting(*arguments)
        except RuntimeError as fault:
            if not is_torn(fault):
                raise
            raise self._lost(what, fault) from fault

    def _lost(self, what, fault):
        # A device that has failed here reaches NCCL too, and then only its text tells.
        nccl = isinstance(fault, torch.distributed.DistBackendError)
        said = f" ({' '.join(str(fault).split())[:500]})" if nccl else ""
        return PeerLost(f"another process ended or did not answer within {self.timeout} s, while {what}{said}.")

    def lost(self, fault: BaseException) -> PeerLost | None:
        """The fault as that of a peer that is gone, if it is one; FSDP2 meets inside of the network."""
        if isinstance(fault, PeerLost):
            return fault
        return self._lost(SHARDS, fault) if self.sharded and is_torn(fault) else None

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
        self._told(STEPS, torch.distributed.all_reduce, found, torch.distributed.ReduceOp.MAX, self._hosts)
        return int(found)

    def share_out(self, network: nn.Module, blocks: Collection[str]) -> None:
        """Share out the weights of a network (flowrl.run.sharding)."""
        sharding.share_out(network, blocks, self.device, self.count)

    def wait(self) -> None:
        self._meet("all were waited for", self._state.wait_for_everyone)

    def close(self) -> None:
        self._state.destroy_process_group()
