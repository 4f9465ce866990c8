"""flowrl/run/sharding.py: runs with shared-out weights, from the launcher's word to the files that they leave."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_pipelines import tiny

from flowrl.run import sharding
from flowrl.run.config import from_dict
from flowrl.run.peers import sharded
from flowrl.run.prepare import prepare
from flowrl.run.processes import Processes
from flowrl.run.train import train
from tests.run.conftest import redness

CODE = """
import json, sys, torch
from tests.run.conftest import redness
from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import train
torch.set_num_threads(1)
run = from_dict(json.loads(SETTINGS))
train(prepare(run, functions={"redness": redness}, resume=RESUME))
"""
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
CASES = {
    "branch_grpo with an adapter": {
        "recipe": {"name": "branch_grpo", "rollout.steps": 4, "rollout.forks": {0: 2, 1: 2}}
    },
    "diffusion_nft with full weights": {
        "model": {"train": "full", "lora": None},
        "recipe": {"name": "diffusion_nft", "rollout.steps": 4, "rollout.roots": 4, "noising.draws": 2},
        "optimizer": {"ema": 0.9},
    },
}


def run(real_processes, settings, count, resume=False, **environment):
    code = CODE.replace("SETTINGS", repr(json.dumps(settings))).replace("RESUME", str(resume))
    for done in real_processes(code, range(count), count, **environment):
        assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def settings(world, base, tmp_path_factory):
    return {
        "model": {"path": str(base), "grid": "linear", "max_sequence_length": 0, "lora": {"rank": 4, "alpha": 16}},
        "data": {"train": str(world / "train.jsonl"), "test": str(world / "test.jsonl")},
        "rewards": {"redness": 1.0},
        "recipe": {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4},
        "budget": {"updates": 4, "prompts_per_update": 2},
        "evaluation": {"prompts": 3},
        "processes": {"timeout": 30},
        "output": str(tmp_path_factory.mktemp("odd") / "run"),
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * ("full weights" in name)) for name in CASES],
)
def both(request, real_processes, settings, tmp_path_factory):
    """(directory of a run on one process, of the same one on two with shards, stopped after one update and resumed)."""
    folder = tmp_path_factory.mktemp("shards")
    settings = settings | {
        "budget": {"updates": 2, "prompts_per_update": 3, "micro_batch": 5, "batch_size": 5},
        "evaluation": {"prompts": 3, "samples": 2, "every": 1},
    }
    for name, change in CASES[request.param].items():
        settings[name] = {**settings.get(name, {}), **change} if name != "recipe" else change
    one, two = folder / "one", folder / "two"
    train(prepare(from_dict({**settings, "output": str(one)}), functions={"redness": redness}))
    short = {**settings, "budget": {**settings["budget"], "updates": 1}}
    run(real_processes, {**short, "output": str(two)}, 2, **FSDP)
    run(real_processes, {**settings, "output": str(two)}, 2, resume=True, **FSDP)
    return one, two


def weights_of(folder):
    files = [*(folder / "checkpoints/000002").glob("*.safetensors"), *folder.glob("adapter/*.safetensors")]
    return {f"{file.name}/{n}": x for file in files for n, x in load_file(file).items()}


def test_shards_leave_the_log_and_the_files_of_one_process(both):
    """C61: what is written is whole: weights, optimiser and snapshots by name, and what plain diffusers loads."""
    one, two = both
    lines = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in both]
    for mine, theirs in zip(*lines, strict=True):
        assert mine.keys() == theirs.keys() and mine["forwards"] == theirs["forwards"]
        for name in (n for n in mine if n.startswith(("reward/", "eval/redness", "grad_norm"))):
            assert theirs[name] == pytest.approx(mine[name], rel=2e-4, abs=1e-5), name
    mine, theirs = weights_of(one), weights_of(two)
    assert mine.keys() == theirs.keys() and len(mine) > 20
    for name, x in mine.items():
        assert x.shape == theirs[name].shape and torch.allclose(x, theirs[name], atol=2e-5, rtol=2e-3), name


ODD = """
import json, os, signal, torch
from tests.run.conftest import redness
from flowrl.run import cli
from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import train
torch.set_num_threads(1)
calls = []

def odd(images):
    calls.append(len(images))
    if len(calls) == 4 and os.environ["RANK"] == "1":  # the third update; the first call was an evaluation
        os.kill(os.getpid(), signal.SIGNAL)
    return redness(images)

cli._running(lambda: train(prepare(from_dict(json.loads(SETTINGS)), functions={"redness": odd})))
"""


@pytest.mark.parametrize("name, codes", [("SIGTERM", (143, 143)), ("SIGKILL", (1, -9))])
def test_a_signal_to_one_process_ends_both(real_processes, settings, tmp_path, name, codes):
    """One that is told to stop takes the other along, and the last whole update is kept; one that is killed cannot."""
    output = str(tmp_path / "run")
    code = ODD.replace("SETTINGS", repr(json.dumps({**settings, "output": output}))).replace("SIGNAL", name)
    one, two = real_processes(code, **FSDP)
    assert (one.code, two.code) == codes, one.err + two.err
    kept = 2 if name == "SIGTERM" else 0
    assert len(one.lines) == 1 and f"pdate {kept} is checkpointed. Go on with:" in one.lines[0], one.err
    assert (tmp_path / f"run/checkpoints/{kept:06d}/state.json").is_file() and "Traceback" not in one.err + two.err


MIXED = """
import copy, torch
from torch import nn
from flowrl.recipe import copied
from flowrl.run import sharding
from flowrl.run.processes import Processes
from flowrl.visual.policy import Snapshots

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.low, self.up = nn.Linear(6, 6).bfloat16(), nn.Linear(6, 2), nn.Linear(2, 7)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.up(self.low(x))[:, :6]

process = Processes("cpu", timeout=60, sharded=True)
torch.manual_seed(0)
plain = nn.Sequential(Block(), Block(), nn.Linear(6, 3).bfloat16().float())
network, x = copy.deepcopy(plain), torch.randn(3, 6)
process.share_out(network, ("Block",))

def trained(network):
    return [p for p in network.parameters() if p.requires_grad]

snapshots = Snapshots(trained(network), pinned=True)
snapshots.refresh("old", copied(every=9), 0)
for shard, full in zip(trained(network), trained(plain)):
    shard.data.mul_(2.0), full.data.mul_(2.0)
first = network[0].up.weight.to_local().data_ptr()
with torch.no_grad():
    new = network(x)
    with snapshots.at("old"):
        old = network(x)
    assert torch.equal(new, plain(x)) and torch.equal(network(x), new) and not torch.allclose(old, new)
assert network[0].up.weight.to_local().data_ptr() == first
network(x).square().sum().backward(), plain(x).square().sum().backward()
for shard, full in zip(trained(network), trained(plain)):
    gradients = [shard.grad]
    process.sum_(gradients)
    assert torch.allclose(sharding.whole(gradients[0]), 2 * full.grad, rtol=1e-6)  # both processes have all rows
process.close()
"""


def test_a_bf16_base_with_fp32_trainables_is_shared_out_and_snapshots_swap_in_place(real_processes):
    """D16 and D15: uneven shards too (seven rows on two processes); the network draws from what was exchanged."""
    for done in real_processes(MIXED):
        assert done.code == 0, done.err


FAMILIES = """
import torch
from flowrl import randomness
from flowrl.run import sharding
from flowrl.run.processes import Processes
from flowrl.visual.pipelines import opening
from flowrl.visual.policy import Example

torch.set_num_threads(1)
process = Processes("cpu", timeout=60, sharded=True)
examples = [Example("a red circle"), Example("two blue squares")]

def opened(case, rank, **place):
    known = {"dtype": torch.float32, "device": torch.device("cpu"), "alpha": 8.0}
    policy = opening.load(case["folder"], rank=rank, **known, **case["settings"], **place)
    policy.guidance = case["guidance"]
    for name, p in policy.trainable():
        p.data.add_(0.1 * torch.randn(p.shape, generator=randomness.generator(0, name)))
    return policy

def check_places(plain, shards):
    for name, network in shards.networks.items():
        gathered = sum(isinstance(m, torch.distributed.fsdp.FSDPModule) for m in network.modules())
        blocks = sum(type(m).__name__ in plain.family.BLOCKS for m in plain.networks[name].modules())
        assert gathered == 1 + blocks > 1, name
        here = sum(p.to_local().numel() for p in network.parameters())
        assert here < 0.6 * sum(p.numel() for p in plain.networks[name].parameters()), name

for case in CASES:
    for rank in (4, 0):
        plain, shards = opened(case, rank), opened(case, rank, sharded=True)
        shards.distribute(process.share_out)
        check_places(plain, shards)
        noise, sigma = plain.noise(2, randomness.generator(1, "test")), torch.tensor(case["levels"][process.index])
        one, two = drawn = [policy.velocity(noise, sigma, policy.encode(examples)) for policy in (plain, shards)]
        assert (one - two).abs().max() < 1e-5 * one.abs().max(), case
        [v.square().sum().backward() for v in drawn]
        for (name, p), (other, q) in zip(plain.trainable(), shards.trainable(), strict=True):
            total, found = p.grad.clone(), [q.grad]
            torch.distributed.all_reduce(total)
            process.sum_(found)
            assert name == other
            off = sharding.whole(found[0]) - total
            assert 0 < total.abs().max() < torch.inf and off.abs().max() < 1e-5 * total.abs().max(), name
        weights = sharding.in_host_memory(shards.weights(), keep=True)
        assert all(torch.equal(x, weights[name]) for name, x in plain.weights().items())
process.close()
"""


def test_the_blocks_of_flux_and_wan_are_shared_out_and_compute_the_same(real_processes, tmp_path):
    """Outputs, the sum of gradients, and weights put together, of adapters and of all weights.

    Of Wan 2.2 each process has rows of one expert alone.
    """
    cases = []
    for name in ("flux-dev", "wan2.2"):
        known, folder = tiny()[name], str(tmp_path / name)
        known.build().save_pretrained(folder)
        settings = {**known.settings, "size": known.sizes[0]}
        cases.append({"folder": folder, "settings": settings, "guidance": known.guidance[1]})
        cases[-1]["levels"] = [[0.95, 0.9], [0.5, 0.3]]  # of each process
    for done in real_processes(FAMILIES.replace("CASES", repr(cases))):
        assert done.code == 0, done.err


def test_weights_are_put_together_everywhere_and_copied_where_they_are_kept(monkeypatch):
    """Putting together is a meeting; the copies of all processes of a machine would share its memory."""
    put_together, x = [], torch.arange(6.0).reshape(2, 3).T
    monkeypatch.setattr(sharding, "whole", lambda x: put_together.append(x.shape) or x)
    assert sharding.in_host_memory({"a": x, "b": x}, keep=False) == {} and len(put_together) == 2
    copies = sharding.in_host_memory({"a": x, "b": x}, keep=True)
    x += 1
    assert copies["a"].tolist() == copies["b"].tolist() == [[0, 3], [1, 4], [2, 5]] and len(put_together) == 4
    assert copies["a"].is_contiguous(), "as safetensors wants it"


def test_one_process_has_nobody_to_share_with():
    with pytest.raises(ValueError, match="no effect on one process"):
        Processes("cpu", sharded=True)
    assert sharded({"ACCELERATE_USE_FSDP": "True"}) and not sharded({})
