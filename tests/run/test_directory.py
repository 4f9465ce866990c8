"""flowrl/run/directory.py: what a run says before it starts."""

import pytest

from flowrl.run import directory


@pytest.mark.parametrize(
    ("rollout", "evaluation", "said"),
    [
        (4.5, {}, "guidance: 4.5 in rollouts and training, 4.5 in evaluations"),
        (4.5, {"guidance": 1}, "guidance: 4.5 in rollouts and training, 1 in evaluations"),
        (1, {"guidance": 2.0}, "guidance: 1 in rollouts and training, 2 in evaluations"),
    ],
)
def test_both_guidances_are_said_before_a_run_starts(prepared, rollout, evaluation, said):
    """C45: a good training curve with guidance says little of pictures without it, or the other way round."""
    recipe = {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4, "rollout.guidance": rollout}
    assert said in directory.overview(prepared(recipe=recipe, evaluation=evaluation))
