"""flowrl/visual/watch.py: what the loop looks at while an update evaluates its rows."""

import pytest
import torch

from flowrl.objectives import penalties
from flowrl.part import part
from flowrl.recipes.visual.steps import flow_grpo, sage_grpo
from flowrl.visual.watch import Watch


def test_a_process_without_rows_has_a_divergence_of_0_so_that_nobody_waits_for_it():
    """What is gathered over processes has to be there on each."""
    assert Watch(sage_grpo(), {}).log()["divergence"] == 0.0
    assert "divergence" not in Watch(flow_grpo(), {}).log()


def test_the_divergence_is_the_kl_to_the_anchor_by_the_weights_of_the_rows():
    """By hand: means 0.2 and 0.4 apart at std 0.5: .2^2 / (2 * .25) and four times that, weighed .75 and .25."""
    watch = Watch(sage_grpo(), {})
    apart = torch.tensor([0.2, 0.4])[:, None, None]
    rows = {"mean": apart.expand(2, 1, 3), "mean_anchor": torch.zeros(2, 1, 3), "std": torch.full((2, 1), 0.5)}
    watch._look(rows | {"weight": torch.tensor([[0.75], [0.25]])}, on_policy=True)
    assert watch.log()["divergence"] == pytest.approx(0.75 * 0.08 + 0.25 * 0.32)
    assert watch.log()["snapshot/anchor_distance"] == pytest.approx(0.4)


def test_the_divergence_stays_that_of_the_means_where_velocities_are_compared_with_the_anchor_as_well():
    """What is logged as the distance is then that of the velocities."""
    more = (1e-3, part(penalties.velocity_mse_anchor))
    watch = Watch(sage_grpo().but(penalties=(*sage_grpo().penalties, more)).check(), {})
    rows = {name: torch.full((1, 1, 3), x) for name, x in (("mean", 0.2), ("velocity", 0.7))}
    rows |= {f"{name}_anchor": torch.zeros(1, 1, 3) for name in ("mean", "velocity")}
    watch._look(rows | {"std": torch.full((1, 1), 0.5), "weight": torch.ones(1, 1)}, on_policy=True)
    assert watch.log()["divergence"] == pytest.approx(0.08)
    assert watch.log()["snapshot/anchor_distance"] == pytest.approx(0.7)


def only_means(mean, mean_anchor):
    """A penalty that asks for no std."""
    return (mean - mean_anchor).square().flatten(2).mean(2)


def test_a_penalty_that_asks_for_means_alone_has_a_divergence_too(toy, loop):
    """The KL needs the std of the step, whatever the penalty asks for."""
    recipe = sage_grpo().but(penalties=((1.0, part(only_means)), sage_grpo().penalties[1])).check()
    policy = toy(recipe)
    learner = loop.learner(policy)
    logs = [loop.update(policy, recipe, learner, iteration) for iteration in range(2)]
    assert logs[0]["divergence"] == 0 < logs[1]["divergence"]


def test_numbers_of_the_tracker_reach_every_row(toy):
    """sage_grpo's penalties are its coefficient times something; at 0 they are 0."""
    recipe = sage_grpo()
    policy = toy(recipe)
    rows = {"prompt": torch.tensor([1]), "call": torch.tensor([[0]]), "sigma": torch.tensor([[0.6]])}
    rows |= {"sigma_next": torch.tensor([[0.5]]), "latents": torch.ones(1, 1, 2), "next_latents": torch.ones(1, 1, 2)}
    rows |= {name: torch.tensor([[8]]) for name in ("step", "depth")} | {"weight": torch.ones(1, 1)}
    evaluated = Watch(recipe, {"coefficient": torch.tensor(0.25)})(policy, torch.linspace(1, 0, 21), on_policy=True)
    q = evaluated(rows, {"mean", "mean_anchor", "std", "coefficient"}, gradient=False)
    assert float(q["coefficient"]) == 0.25 and torch.equal(q["mean"], q["mean_anchor"])
