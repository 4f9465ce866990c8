"""Properties that every function of a menu has, whatever it computes.

A function that breaks a property on purpose says so in its docstring; these tests read that and hold it to it.
"""

import inspect

import pytest
import torch

from flowrl.part import part
from flowrl.randomness import generator
from samplers import tree_layout

KEEPS_SHIFT, COPIES_EQUAL, NOT_NEGATIVE = "Keeps a shift of the rewards", "Copies equal rewards", "not be negative"


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ask(function, **quantities):
    """Call by name: a function takes of the quantities what its signature asks for; one noise per group."""
    return part(function)(**{"root": quantities.get("group")} | quantities)


def row_quantities(**changes):
    """One micro-batch [B, K] in which the current policy and every snapshot are equal, unless changed."""
    mean, velocity, log_prob = draw(5, 2, 3), draw(5, 2, 3, seed=1), draw(5, 2, seed=2)
    rows = {"std": draw(5, 2, seed=3).abs() + 0.2, "advantage": draw(5, 2, seed=4), "ratio": torch.ones(5, 2).double()}
    rows |= {"sigma": torch.full((5, 2), 0.7).double(), "sigma_next": torch.full((5, 2), 0.5).double()}
    rows |= {"x0": draw(5, 2, 3, seed=7), "noise": draw(5, 2, 3, seed=8), "peers": torch.arange(10).view(5, 2) % 4}
    for name, value in {"mean": mean, "velocity": velocity, "log_prob": log_prob, "elbo": -log_prob.abs()}.items():
        rows |= {name: value, **{f"{name}_{suffix}": value for suffix in ("ref", "old", "anchor")}}
    rows |= {"best_velocity": velocity, "best_advantage": draw(5, 2, seed=10), "mask": torch.ones(5, 2).double()}
    rows["coefficient"] = torch.tensor(1.0).double()
    return rows | changes


LAYOUT = tree_layout(3, 4, range(3), {0: 2, 2: 2})
LEAVES = len(LAYOUT.edge)
REWARD, WEIGHT, GROUP = draw(LEAVES, 2).abs(), torch.tensor([1.0, 0.5]).double(), LAYOUT.leaf_root


@pytest.mark.menu("flowrl.advantages.outcome", "flowrl.advantages.many_rewards")
def test_an_advantage_ignores_a_shift_of_all_rewards(public):
    ours = ask(public, reward=REWARD, reward_weight=WEIGHT, group=GROUP)
    shifted = ask(public, reward=REWARD + 3, reward_weight=WEIGHT, group=GROUP)
    if KEEPS_SHIFT in public.__doc__:
        torch.testing.assert_close(shifted - ours, torch.full((LEAVES,), 4.5).double())
    else:
        torch.testing.assert_close(shifted, ours, atol=1e-9, rtol=0)


@pytest.mark.menu("flowrl.advantages.outcome", "flowrl.advantages.many_rewards")
def test_an_advantage_ignores_the_order_of_rows(public):
    """C07: also in ragged groups."""
    kept = torch.tensor([0, 1, 2, 5, 4, 8, 9, 10, 11])
    ours = ask(public, reward=REWARD[kept], reward_weight=WEIGHT, group=GROUP[kept])
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))
    mixed = ask(public, reward=REWARD[kept][order], reward_weight=WEIGHT, group=GROUP[kept][order])
    torch.testing.assert_close(mixed, ours[order], atol=1e-12, rtol=0)


@pytest.mark.menu("flowrl.advantages.outcome", "flowrl.advantages.many_rewards")
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -26.3, 1e4])
def test_an_advantage_is_exactly_0_on_equal_rewards(public, value):
    """C01: bit for bit, in groups of 3, 4 and 1."""
    if value < 0 and NOT_NEGATIVE in public.__doc__:
        with pytest.raises(ValueError, match="is negative"):
            ask(public, reward=torch.full((8, 1), value), reward_weight=torch.ones(1), group=torch.arange(8))
        return
    expected = 1 if COPIES_EQUAL in public.__doc__ else value if KEEPS_SHIFT in public.__doc__ else 0
    reward, group = torch.full((8, 1), value), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    ours = ask(public, reward=reward, reward_weight=torch.ones(1), group=group)
    assert bool((ours == expected).all())


@pytest.mark.menu("flowrl.advantages.outcome", "flowrl.advantages.many_rewards")
def test_the_rewards_of_one_group_do_not_turn_another_groups_order(public):
    """C07: groups of 3 and 4.  What divides may be shared; who is better than whom may not."""
    group = torch.tensor([0, 1, 0, 1, 1, 0, 1])
    reward = torch.tensor([0.1, 5.0, 0.4, 3.0, 8.0, 0.2, 1.0]).double()
    other = torch.where(group == 1, reward * 7 + 2, reward)
    ours, theirs = (
        ask(public, reward=r[:, None], reward_weight=WEIGHT[:1], group=group)[group == 0] for r in (reward, other)
    )
    assert ours.argsort(stable=True).tolist() == theirs.argsort(stable=True).tolist()
    assert ours.argmax() == 1 and ours.argmin() == 0
    assert bool((ours.sign() == theirs.sign()).all())


@pytest.mark.menu("flowrl.advantages.tree", "flowrl.advantages.steps")
def test_credit_is_0_where_everyone_earned_0_and_ignores_the_order_of_rows(public):
    """Leaves that share a transition get the same credit for it, unless their outcome is copied to every step."""
    asked = inspect.signature(public).parameters
    earned = "advantage" if "advantage" in asked else "state_reward"
    if earned not in asked:
        return
    per_state = torch.cat([draw(3)[LAYOUT.leaf_root][:, None], draw(len(LAYOUT.source))[LAYOUT.edge]], dim=1)
    schedule = {"sigmas": torch.linspace(1, 0, 5).double(), "stds": torch.rand(4).double() + 0.1}
    schedule["slopes"] = -schedule["stds"].flip(0)
    table = {"advantage": draw(LEAVES), "edge": LAYOUT.edge, "group": GROUP}
    table |= {"log_prob_old": draw(len(LAYOUT.source), seed=5)[LAYOUT.edge], "state_reward": per_state}
    credit = ask(public, **table, **schedule)
    assert credit.shape == LAYOUT.edge.shape and bool(credit.any())
    for one, other in zip(*torch.triu_indices(LEAVES, LEAVES, 1).tolist(), strict=True):
        same = LAYOUT.edge[one] == LAYOUT.edge[other]
        copied = public.__name__ == "broadcast" or public.__module__.endswith("steps")
        assert torch.equal(credit[one][same], credit[other][same]) or (copied and earned == "advantage")
    assert not ask(public, **table | schedule | {earned: table[earned] * 0}).any()
    order = torch.randperm(LEAVES, generator=torch.Generator().manual_seed(0))
    mixed = ask(public, **{name: rows[order] for name, rows in table.items()}, **schedule)
    torch.testing.assert_close(mixed, credit[order], atol=1e-9, rtol=0)


@pytest.mark.menu("flowrl.objectives.select")
def test_a_mask_is_0_or_1_and_lies_within_what_was_drawn(public):
    noisy = torch.zeros(6, 8)
    noisy[:, 2:7] = 1
    table = {"advantage": torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0, -2.0]), "noisy": noisy, "iteration": 3}
    table |= {"edge": tree_layout(1, 8, range(7), {0: 2, 4: 3}).edge, "group": torch.zeros(6, dtype=torch.long)}
    table |= {"chunk": torch.tensor([0, 0, 0, 1, 1, 2, 2, -1]), "change": torch.rand(6, 8) + 0.1}
    mask = ask(public, **table, generator=generator(0, "select"))
    assert bool(((mask == 0) | (mask == 1)).all()) and bool(mask.any(1).all())
    assert bool((mask <= noisy).all()) or public.__name__ in ("everything", "preferred")


@pytest.mark.menu("flowrl.objectives.weights")
def test_weights_sum_to_1_over_what_is_trained(public):
    """Ragged masks and shared transitions included; an untrained decision weighs nothing."""
    chunk = torch.tensor([0, 1, 1, 2])
    for seed in range(5):
        mask = (torch.rand(LAYOUT.edge.shape, generator=torch.Generator().manual_seed(seed)) < 0.6).double()
        weight = ask(public, mask=mask, edge=LAYOUT.edge, chunk=chunk)
        assert weight.sum().item() == pytest.approx(1, abs=1e-12)
        assert bool(((weight > 0) == (mask > 0)).all())
    assert not ask(public, mask=mask * 0, edge=LAYOUT.edge, chunk=chunk).any()


@pytest.mark.menu("flowrl.objectives.ratios")
def test_a_ratio_is_exactly_1_for_equal_policies_and_passes_the_gradient_on(public):
    log_prob = draw(5, 2, seed=2).requires_grad_()
    same = {f"{name}_old": log_prob.detach() for name in ("log_prob", "elbo")}
    rows = row_quantities(log_prob=log_prob, elbo=log_prob, **same)
    ratio = ask(public, **rows)
    assert torch.equal(ratio, torch.ones(5, 2).double())
    ratio.sum().backward()
    scaled = "Scales the gradient by std" in public.__doc__
    torch.testing.assert_close(log_prob.grad, rows["std"] if scaled else torch.ones(5, 2).double())


@pytest.mark.menu("flowrl.objectives.clipped")
def test_an_objective_has_the_gradient_minus_advantage_at_ratio_1(public):
    ratio = torch.ones(5, 2, dtype=torch.float64, requires_grad=True)
    rows = row_quantities(ratio=ratio)
    ask(public, **rows).sum().backward()
    torch.testing.assert_close(ratio.grad, -rows["advantage"])


@pytest.mark.menu("flowrl.objectives.clipped")
def test_an_objective_scores_each_decision_by_itself(public):
    ratio = (1 + 0.3 * draw(5, 2, seed=6)).abs()
    rows = row_quantities(ratio=ratio)
    loss = ask(public, **rows)
    one_changed = rows | {"ratio": ratio.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(5.0).double())}
    same = ask(public, **one_changed) == loss
    same[2, 1] = True
    assert loss.shape == (5, 2) and bool(same.all())


@pytest.mark.menu("flowrl.objectives.clipped")
@pytest.mark.parametrize("value", [0.2, 1.0, 3.0])
def test_an_objective_that_is_silent_has_no_gradient_at_advantage_0(public, value):
    """`silent` lets the trainer leave such rows out; the docstring must say so too."""
    declared = getattr(public, "silent", False)
    assert declared == ("Silent at advantage 0" in public.__doc__)
    ratio = torch.full((5, 2), value, dtype=torch.float64, requires_grad=True)
    ask(public, **row_quantities(ratio=ratio, advantage=torch.zeros(5, 2).double())).sum().backward()
    assert declared is not bool(ratio.grad.any())


@pytest.mark.menu("flowrl.objectives.penalties")
def test_a_penalty_is_0_for_equal_policies_and_positive_otherwise(public):
    assert torch.equal(ask(public, **row_quantities()), torch.zeros(5, 2).double())
    suffixes = ("ref", "old", "anchor")
    moved = {f"{name}_{s}": draw(5, 2, 3, seed=9) for name in ("mean", "velocity") for s in suffixes}
    moved |= {"best_velocity": draw(5, 2, 3, seed=9), "log_prob_old": row_quantities()["log_prob"] + 1}
    assert bool((ask(public, **row_quantities(**moved)) > 0).all())
