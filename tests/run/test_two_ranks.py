"""C42: over two real processes no picture comes twice, and the update is that of one process."""

import pytest
import torch

CODE = """
import sys
import torch
from flowrl.changes import changed
from flowrl.recipes import find
from flowrl.run.learner import Learner
from flowrl.run.processes import Processes
from flowrl.visual.policy import Example
from flowrl.visual.toy import ToyPolicy
from flowrl.visual.trainer import noisy_steps, roll_out, update
from rewards.table import RewardTable

def score(images, examples, group):
    value = images[:, 0].mean((1, 2))[:, None]
    return RewardTable(value, torch.ones(1), group, torch.ones(len(value), dtype=torch.bool), ("red",))

torch.set_num_threads(1)
process = Processes("cpu", timeout=60)
policy, examples = ToyPolicy(), [Example("1"), Example("1")]  # equal prompts: only their noise tells them apart
recipe = changed(find({name!r})(), {changes!r}).check()
for name, rule in recipe.snapshots.items():
    policy.snapshot(name, rule, 0)
first, mine = process.ranks().share(examples)
tree, _ = roll_out(policy, recipe, mine, seed=0, iteration=0, first_group=first)
learner = Learner(policy.trainable(), lambda update: 2e-3, micro_batch=16, reduce=process.sum_)
given = dict(seed=0, iteration=0, batch_size=16, ranks=process.ranks())
log, _ = update(policy, recipe, examples, score, learner, **given)
kept = {{"start": tree.states[tree.source[tree.edge[:, 0]]], "leaves": tree.leaves(), "group": tree.group}}
kept |= {{"pictures": policy.decode(tree.leaves()), "grad_norm": log["grad_norm"]}}
kept["windows"] = [list(noisy_steps(find("flow_grpo_fast")(), policy.sigmas(10), 0, i)) for i in range(8)]
kept["weights"] = torch.cat([p.detach().flatten() for _, p in policy.trainable()])
torch.save(kept, f"{folder}/{{process.count}}-{{process.index}}.pt")
process.close()
"""
MODES = {
    "own noise": ("flow_grpo", {"rollout.steps": 4, "rollout.roots": 8}),
    "one initial noise": ("dance_grpo", {"rollout.steps": 4, "rollout.forks": {0: 8}}),
}


@pytest.fixture(scope="module", params=MODES)
def ended(request, real_processes, tmp_path_factory):
    """(the mode, what one process kept, what each of two kept)."""
    folder = tmp_path_factory.mktemp("ranks")
    name, changes = MODES[request.param]
    code = CODE.format(name=name, changes=changes, folder=folder)
    for done in (*real_processes(code, (0,), 1), *real_processes(code)):
        assert done.code == 0, done.err
    one, *two = (torch.load(folder / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    return request.param, one, two


def test_sixteen_latents_and_pictures_of_two_prompts_are_distinct_over_two_processes(ended):
    mode, _, two = ended
    assert [x["group"].tolist() for x in two] == [[0] * 8, [1] * 8]
    for name in ("leaves", "pictures"):
        rows = torch.cat([x[name] for x in two])
        assert len(rows.unique(dim=0)) == len(rows) == 16
    starts = torch.cat([x["start"] for x in two]).unique(dim=0)
    assert len(starts) == (16 if mode == "own noise" else 2)


def test_two_processes_draw_what_one_draws(ended):
    _, one, two = ended
    assert torch.equal(torch.cat([x["start"] for x in two]), one["start"])
    assert torch.allclose(torch.cat([x["leaves"] for x in two]), one["leaves"], atol=1e-5)


def test_both_processes_draw_noise_in_the_same_window_of_every_update(ended):
    """C41."""
    _, one, two = ended
    assert one["windows"] == two[0]["windows"] == two[1]["windows"]
    assert len({tuple(window) for window in one["windows"]}) == 3


def test_the_first_update_has_the_gradient_norm_and_the_weights_of_one_process(ended):
    _, one, two = ended
    assert one["grad_norm"] > 1e-4 and torch.equal(two[0]["weights"], two[1]["weights"])
    for x in two:
        assert x["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert torch.allclose(x["weights"], one["weights"], atol=1e-5)
