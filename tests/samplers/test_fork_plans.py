"""samplers/fork_plans.py: how many children the states of a step get."""

from samplers import fork_plans, tree_layout


def test_a_tree_forks_at_every_noisy_step():
    """TreeGRPO, 3 children in a window of 3: 27 leaves, 39 trained edges out of 13 states."""
    forks = fork_plans.every_noisy((2, 3, 4), children=3)
    assert forks == {2: 3, 3: 3, 4: 3}
    layout = tree_layout(1, 10, tuple(forks), forks)
    assert layout.frontier[-1] == 27
    trained = [int((layout.step == t).sum()) for t in (2, 3, 4)]
    assert trained == [3, 9, 27] and sum(layout.frontier[t] for t in (2, 3, 4)) == 13


def test_a_tree_forks_once_where_its_noise_begins():
    """Flow-GRPO-Fast's branch form: nine branches, each with two noisy steps."""
    assert fork_plans.first_noisy((4, 5), children=9) == {4: 9}
    assert fork_plans.every_noisy((), children=9) == fork_plans.first_noisy((), children=9) == {}
