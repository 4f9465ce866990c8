"""Tables and sums across processes; one process is the first-class case, two run in tests/scripts/test_train.py."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flowrl.run import processes as module
from flowrl.run.peers import PeerLost
from flowrl.run.processes import Processes


def test_one_process_sees_itself():
    """C77."""
    alone = Processes("cpu")
    rows = torch.rand(3, 2)
    assert (alone.index, alone.count, alone.main, alone.device.type) == (0, 1, True, "cpu")
    assert torch.equal(alone.gather(rows), rows) and alone.sum([1.5, -2.0]) == [1.5, -2.0]
    assert alone.largest(0.25) == 0.25
    tensors = [torch.ones(2), torch.ones(2, 2)]
    alone.sum_(tensors)
    assert all(torch.equal(x, torch.ones_like(x)) for x in tensors)
    assert alone.ranks().share([1, 2, 3]) == (0, [1, 2, 3])
    alone.wait()


@pytest.fixture
def together(monkeypatch):
    """Run a function as each of `count` processes: threads, with the two collectives that are used played by hand."""

    def run(count, function):
        meeting, table = threading.Barrier(count, timeout=30), {}

        def exchange(index, x):
            meeting.wait()
            table[index] = x.clone()
            meeting.wait()
            return [table[i] for i in range(count)]

        def member(index):
            one = object.__new__(Processes)
            one.__dict__.update(index=index, count=count, main=index == 0, device=torch.device("cpu"))
            one.__dict__.update(sharded=False, _deaf=False)
            return one

        local = threading.local()

        def gather(received, x):
            for slot, rows in zip(received, exchange(local.index, x), strict=True):
                assert slot.shape == rows.shape and slot.dtype == rows.dtype, "gloo wants equal shapes"
                slot.copy_(rows)

        def reduce(x):
            x.copy_(sum(exchange(local.index, x)))

        monkeypatch.setattr(module.torch.distributed, "all_gather", gather)
        monkeypatch.setattr(module.torch.distributed, "all_reduce", reduce)

        def body(index):
            local.index = index
            return function(member(index))

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(body, range(count)))

    return run


def rows_of(process):
    return torch.arange(2.0 * process.index + 1)[:, None] + 10 * process.index


def test_rows_of_uneven_processes_come_back_in_order(together):
    """C72: one, three and five rows."""
    expected = torch.cat([torch.arange(2.0 * i + 1)[:, None] + 10 * i for i in range(3)])
    for seen in together(3, lambda process: process.gather(rows_of(process))):
        assert torch.equal(seen, expected) and len(seen) == 9


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_table_keeps_its_type(together, dtype):
    for seen in together(2, lambda process: process.gather(torch.tensor([0, process.index + 1]).to(dtype))):
        assert seen.dtype == dtype and seen.tolist() == [0, 1, 0, 1 if dtype == torch.bool else 2]


def test_a_process_may_have_no_row_at_all(together):
    for seen in together(2, lambda process: process.gather(torch.ones(process.index, 4))):
        assert seen.shape == (1, 4)


def test_gradients_are_summed_in_place_whatever_their_shapes(together):
    def job(process):
        gradients = [torch.full((2, 3), float(process.index + 1)), torch.tensor(10.0 * (process.index + 1))]
        process.sum_(gradients)
        return gradients

    for matrix, number in together(3, job):
        assert torch.equal(matrix, torch.full((2, 3), 6.0)) and number == 60


def test_sums_in_buckets_are_those_of_one_message(together, monkeypatch):
    """A tensor larger than a bucket stands alone, types do not mix, and a transposed one keeps its layout."""

    def gradients_of(index):
        draw = torch.Generator().manual_seed(index)
        shapes = [((2, 3), torch.float32), ((4,), torch.float32), ((10, 10), torch.float32), ((1,), torch.float64)]
        found = [torch.rand(shape, generator=draw).to(dtype) for shape, dtype in shapes]
        return [*found, torch.rand(2, 3, generator=draw).T]

    def job(process):
        gradients = gradients_of(process.index)
        process.sum_(gradients)
        return gradients

    sizes = [[x.nbytes for x in bucket] for bucket in module.buckets(gradients_of(0), 40)]
    assert sizes == [[24, 16], [400], [8], [24]]
    expected = [mine + theirs for mine, theirs in zip(gradients_of(0), gradients_of(1), strict=True)]
    for size in (40, 2**20):
        monkeypatch.setattr(module, "BUCKET", size)
        for summed in together(2, job):
            assert all(torch.equal(x, total) for x, total in zip(summed, expected, strict=True))


def test_sums_and_the_largest_are_the_same_everywhere(together):
    assert together(3, lambda process: process.sum([1.0, float(process.index)])) == [[3.0, 3.0]] * 3
    assert together(3, lambda process: process.largest(float(-process.index))) == [0.0] * 3


def test_shares_make_up_the_whole_in_order(together):
    """Three prompts on two processes."""
    assert together(2, lambda process: process.ranks().share("abc")) == [(0, "a"), (1, "bc")]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (torch.distributed.DistNetworkError("broken pipe"), "while tables were gathered."),
        (
            RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer"),
            "while tables were gathered.",
        ),
        (
            torch.distributed.DistBackendError("NCCL error:\nCuda failure 'device-side assert triggered'"),
            "while tables were gathered (NCCL error: Cuda failure 'device-side assert triggered').",
        ),
    ],
)
def test_a_fault_of_the_transport_is_a_lost_peer(fault, said):
    alone = Processes("cpu", timeout=7)
    with pytest.raises(PeerLost) as caught:
        alone._meet(module.TABLES, raising(fault))
    assert str(caught.value) == f"another process ended or did not answer within 7 s, {said}"
    assert caught.value.__cause__ is fault


@pytest.mark.parametrize(
    "fault", [RuntimeError("CUDA error: device-side assert triggered"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_any_other_fault_is_ones_own_and_keeps_its_words(fault):
    with pytest.raises(type(fault)) as caught:
        Processes("cpu")._meet(module.TABLES, raising(fault))
    assert caught.value is fault


def raising(fault):
    def meeting():
        raise fault

    return meeting


def test_replicas_wait_for_nccl_on_the_host_and_shards_do_not(monkeypatch):
    """FSDP2 gathers weights while the network computes."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    with pytest.raises(ValueError, match="nobody to share the weights with"):
        Processes("cpu", sharded=True)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    Processes("cpu")
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
