"""Recipes on two real processes, replicas and shards: the gradient and the next weights of one process.

Those whose way through the loop no other one takes; tests/visual/test_trainer.py has all, with threads for processes.
"""

import json

import pytest
import torch

NAMES = [
    *("flow_grpo", "dance_grpo", "branch_grpo", "flow_dppo", "chunk_grpo", "e_grpo", "mix_grpo_flash", "drm_stepwise"),
    *("stepwise_flow_grpo", "dynamic_tree_rpo", "sage_grpo", "adagrpo", "diffusion_nft", "v_grpo", "dgpo", "ddpo"),
]

CODE = """
import torch
from flowrl.changes import changed
from flowrl.recipes import find
from flowrl.run import sharding
from flowrl.run.learner import Learner
from flowrl.run.processes import Processes
from flowrl.visual.policy import Example
from flowrl.visual.toy import ToyPolicy
from flowrl.visual.trainer import update
from rewards.table import RewardTable
import copy

def score(images, examples, group):
    value = images[:, 0].mean((1, 2)) * (group > 0)  # the first group has nothing to learn from
    valid = torch.tensor([hash(tuple(x)) % 5 > 0 for x in images.flatten(1).mul(1e4).long().tolist()])
    return RewardTable(value[:, None] * valid[:, None], torch.ones(1, dtype=value.dtype), group, valid, ("red",))

def learn(policy, recipe, sharded):
    if sharded:
        policy.distribute(process.share_out)
    for name, rule in recipe.snapshots.items():
        policy.snapshot(name, rule, 0)
    seen, counts = [], []
    def reduce(gradients):
        process.sum_(gradients)
        seen.append(torch.cat([sharding.whole(g).flatten() for g in gradients]))
    assert sharded == any(isinstance(p, sharding.DTensor) for _, p in policy.trainable())
    learner = Learner(policy.trainable(), lambda update: 2e-3, micro_batch=7, reduce=reduce, agree=process.agree)
    examples, memory = [Example(name) for name in "102"], {}
    for iteration in range(2):
        before = policy.forwards, policy.backwards
        given = dict(seed=0, iteration=iteration, batch_size=7, ranks=process.ranks(), memory=memory)
        log, memory = update(policy, recipe, examples, score, learner, **given)
        counts.append([policy.forwards - before[0], policy.backwards - before[1], log["train_calls"]])
    weights = torch.cat([sharding.whole(p.detach()).flatten() for _, p in policy.trainable()])
    counts = [[int(x) for x in process.sum(row)] for row in counts]
    return {"gradients": torch.stack(seen), "weights": weights, "counts": torch.tensor(counts)}

def made(name):
    recipe = find(name)()
    return changed(recipe, {"pilot.candidates": 1}) if recipe.pilot else recipe  # three examples for two ranks

torch.set_num_threads(1)
process, fitted = Processes("cpu", timeout=60, sharded=SHARDED), ToyPolicy(dtype=torch.float64)
found = {name: learn(copy.deepcopy(fitted), made(name).check(), SHARDED) for name in NAMES}
if process.main:
    torch.save(found, FILE)
process.close()
"""


def made(real_processes, folder, count, sharded):
    file = folder / f"{count}-{sharded}.pt"
    code = (
        CODE.replace("SHARDED", str(sharded)).replace("FILE", json.dumps(str(file))).replace("NAMES", json.dumps(NAMES))
    )
    for done in real_processes(code, range(count), count):
        assert done.code == 0, done.err
    return torch.load(file)


@pytest.fixture(scope="module")
def alone(real_processes, tmp_path_factory):
    return made(real_processes, tmp_path_factory.mktemp("alone"), 1, False)


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="replicas"), pytest.param(True, id="shards", marks=pytest.mark.slow)],
)
def together(request, real_processes, tmp_path_factory):
    return made(real_processes, tmp_path_factory.mktemp("together"), 2, request.param)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_have_the_gradients_and_the_weights_of_one(alone, together, name):
    """D11: three prompts on two processes, a fifth of the scores masked, and one process without anything to learn."""
    one, two = alone[name], together[name]
    assert one["gradients"].shape == two["gradients"].shape and bool(one["gradients"].any(1).all())
    for mine, theirs in zip(one["gradients"], two["gradients"], strict=True):
        assert (mine - theirs).norm() <= 1e-10 * mine.norm()
    assert (one["weights"] - two["weights"]).norm() <= 1e-10 * one["weights"].norm()


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_only_keep_step_are_not_counted(alone, together, name):
    """D2: forwards, backwards and calls of an update are those of one process."""
    assert together[name]["counts"].tolist() == alone[name]["counts"].tolist()
