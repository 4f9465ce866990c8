"""An update makes the network calls that were counted and holds little beside what it needs; both are deterministic."""

import bench_limit
import pytest
import torch

from flowrl import plan

pytestmark = pytest.mark.long

PROMPTS = 2


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("branch_grpo", "lora"), id="branch_grpo-lora"),
        pytest.param(("flow_grpo", "full"), id="flow_grpo-full", marks=pytest.mark.slow),
    ],
)
def measured(request):
    ready = bench_limit.prepared_for(*request.param, PROMPTS)
    bench_limit.one_update(ready)
    before = ready.policy.forwards, ready.policy.backwards
    work = bench_limit.record(ready)
    made = ready.policy.forwards - before[0], ready.policy.backwards - before[1]
    return ready, work, made


def test_an_update_makes_exactly_the_calls_that_plan_counts_and_the_limit_makes_them_too(measured):
    ready, work, made = measured
    one = plan.count(ready.recipe, ready.policy.sigmas(ready.recipe.rollout.steps))
    rows = sum(call.rows for call in work.calls)
    trained = sum(call.rows for call in work.calls if call.cotangent is not None)
    assert (rows, trained) == made and len(work.decoded) == len(work.scored) == 1
    assert rows <= PROMPTS * one.forwards and trained <= PROMPTS * one.backwards
    if not ready.recipe.skips_zero_advantage:
        assert (rows, trained) == (PROMPTS * one.forwards, PROMPTS * one.backwards)
    assert {call.weights for call in work.calls} == {"current", *ready.recipe.snapshots}
    fewest = -(-PROMPTS * one.backwards // 64) + sum(-(-PROMPTS * n // 64) for n in frontier(ready))
    snapshots = len(ready.recipe.snapshots) * -(-PROMPTS * one.backwards // 64)
    assert len(work.calls) <= fewest + snapshots, "calls are as large as micro_batch and batch_size allow"

    seen = []
    hook = ready.policy.pipe.transformer.register_forward_hook(lambda module, args, out: seen.append(len(out[0])))
    bench_limit.bare(ready, work)
    hook.remove()
    assert sorted(seen) == sorted(call.rows for call in work.calls)
    assert all(p.grad is None for p in ready.learner.parameters)


def test_an_update_refreshes_every_snapshot_once(measured):
    """The loop does it: a second copy would be no part of an update's time."""
    ready, seen = measured[0], []
    kept = ready.policy.snapshot
    ready.policy.snapshot = lambda name, *rest: seen.append(name) or kept(name, *rest)
    bench_limit.one_update(ready)
    del ready.policy.snapshot
    assert seen == list(ready.recipe.snapshots)


def frontier(ready):
    from samplers import tree_layout

    rollout = ready.recipe.rollout
    noisy = range(rollout.steps - 1) if rollout.noisy else ()
    return tree_layout(rollout.roots, rollout.steps, noisy, rollout.forks).frontier[:-1]


def test_an_update_holds_little_beside_what_it_needs(measured):
    """At most 1.15 times weights, optimiser, gradients, one call's activations and the stored states."""
    ready, work, _ = measured
    parts = bench_limit.memory(ready, work)
    assert all(size > 0 for size in parts.values()), parts
    assert parts["peak"] <= 1.15 * bench_limit.limit_of(parts), parts
    assert parts["peak"] >= 0.9 * bench_limit.limit_of(parts), "the parts do not explain the peak"
    assert bench_limit.memory(ready, work) == parts


def test_live_counts_storages_once_while_they_live():
    """Views and in-place writes are no new bytes; what autograd keeps is alive until the graph is gone."""
    given = torch.ones(256)
    with bench_limit.Live() as live:
        x = torch.zeros(1024)
        assert live.now == 4096
        x.view(32, 32).add_(1)
        given.mul_(2)
        assert live.now == 4096
        y = x + 1
        assert (live.now, live.peak) == (8192, 8192)
        del y
        assert (live.now, live.peak) == (4096, 8192)
        w = torch.ones(1024, requires_grad=True)
        z = (w.exp() * 2).sum()
        kept = live.now
        del z
        assert live.now < kept
