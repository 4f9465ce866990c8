"""Trees against dance_grpo: the same leaves and steps, the rows that were counted, and a table that says so."""

from pathlib import Path

import bench_trees
import pytest
import torch
from bench_trees import Bench, Job, Row, alike

from flowrl.recipes import find

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    return Bench(width=8, prompts=2)


@pytest.fixture(scope="module")
def rows(bench):
    return bench_trees.measure(bench, ["branch_grpo", "branch_grpo_depth_pruned", "tree_grpo_visual"], repeats=2)


def test_a_recipe_is_compared_with_dance_grpo_of_its_leaves_and_steps_all_of_them_trained(bench):
    """Sixteen leaves of twenty steps from one noise: 1 + 19 x 16 rows to draw, the first 19 steps trained."""
    counts = bench.job(alike(find("branch_grpo")(), 16)).counts
    assert (counts.leaves, counts.rollout_calls, counts.train_calls) == (2 * 16, 2 * 305, 2 * 289)
    assert (counts.forwards, counts.backwards) == (2 * 594, 2 * 289)


def test_cost_is_forwards_and_twice_backwards(rows):
    """branch_grpo: 203 + 187 + 2 x 187; its dance_grpo: 305 + 289 + 2 x 289."""
    by_key = {row.key: row for row in rows}
    assert by_key["branch_grpo"].job.cost == 2 * 764
    assert by_key["branch_grpo"].cost == pytest.approx(764 / 1172)
    assert by_key["tree_grpo_visual"].job.counts.backwards == 2 * 13


@pytest.mark.parametrize("key", bench_trees.RECIPES)
def test_an_update_makes_the_rows_that_were_counted(bench, key):
    assert bench.seconds(bench.job(find(key)())) > 0


def test_rows_that_were_not_counted_are_seen(bench):
    job = bench.job(find("branch_grpo")())
    other = bench.job(find("branch_grpo_depth_pruned")())
    with pytest.raises(AssertionError, match="forwards and backwards where"):
        bench.seconds(Job(job.recipe, other.counts))


def test_every_repeat_gives_a_ratio_and_no_update_moves_a_weight(bench, rows):
    before = [p.clone() for _, p in bench.policy.trainable()]
    assert all(len(row.times) == 2 and min(row.times) > 0 for row in rows)
    bench.seconds(bench.job(find("branch_grpo")()))
    moved = max(float((p - b).detach().abs().max()) for (_, p), b in zip(bench.policy.trainable(), before, strict=True))
    assert moved < 1e-10


def test_the_table_has_the_median_its_range_and_the_papers_ratio(bench):
    job = bench.job(find("branch_grpo")())
    lines = bench_trees.table([Row("branch_grpo", job, 0.652, [0.7, 0.6, 0.9])], prompts=2).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    counts = ["branch_grpo", "20", "16", "390", "187", "764"]
    assert cells == [*counts, "0.652", "0.700 (0.600 to 0.900)", "1.074", "0.71"]
    assert all(line.count("|") == 11 for line in lines)


def test_the_network_is_wide_and_its_pictures_differ(bench):
    widths = {p.shape[0] for name, p in bench.policy.trainable() if name.endswith("weight")}
    assert 8 in widths and bench.policy.noise(3, torch.Generator().manual_seed(0)).shape == (3, bench_trees.DIMS)
    pictures = bench.policy.decode(torch.randn(4, bench_trees.DIMS, generator=torch.Generator().manual_seed(1)))
    table = bench_trees.score(pictures, [], torch.zeros(4, dtype=torch.long))
    assert pictures.shape == (4, 3, 4, 4) and len(table.value.unique()) == 4


def test_the_table_that_is_recorded_has_the_counts_of_today_and_keeps_the_bound(bench):
    lines = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").splitlines()
    recorded = {
        cells[1]: cells for cells in ([c.strip() for c in line.split("|")] for line in lines) if len(cells) == 12
    }
    for key in bench_trees.RECIPES:
        job, cells = bench.job(find(key)()), recorded[key]
        leaves = job.counts.leaves // 2
        beside = bench.job(alike(job.recipe, leaves))
        counts = [leaves, job.counts.forwards // 2, job.counts.backwards // 2, job.cost // 2]
        assert [int(cell) for cell in cells[3:7]] == counts
        assert float(cells[7]) == pytest.approx(job.cost / beside.cost, abs=5e-4)
        assert float(cells[9]) <= bench_trees.LARGEST
