"""flowrl/memory/trackers.py: what an update learns from those before it."""

import math

import pytest
import torch

from flowrl.advantages import outcome
from flowrl.groups import group_sparsity
from flowrl.memory import trackers
from flowrl.part import part

ONE = torch.ones(1)


def column(*values):
    return torch.tensor(values)[:, None]


def test_a_prompt_with_enough_history_is_compared_with_its_last_rewards():
    memory, expected = {}, []
    for update in range(5):
        reward = torch.arange(4.0) + 10 * update
        given, memory = trackers.per_prompt(reward[:, None], ONE, torch.tensor([7, 7, 3, 7]), memory, size=6, needed=6)
        expected += reward[[0, 1, 3]].tolist()
    last = torch.tensor(expected[-6:])
    assert given["history_mean"][0] == last.mean() and given["history_std"][1] == last.std(unbiased=False)
    batch = torch.arange(4.0) + 40
    assert given["history_mean"][2] == batch.mean() and given["history_std"][2] == batch.std(unbiased=False)
    assert memory["history/prompt"].tolist() == [3, 7] and memory["history/reward"].shape == (2, 6)


def test_a_history_of_equal_rewards_has_their_very_mean_and_no_std():
    """C01: sixteen times .1 do not sum to 1.6."""
    given, _ = trackers.per_prompt(torch.full((16, 1), 0.1), ONE, torch.zeros(16, dtype=torch.long), {})
    assert torch.equal(given["history_mean"], torch.full((16,), 0.1)) and not given["history_std"].any()


@pytest.mark.parametrize(
    "tracker", [f for f in vars(trackers).values() if hasattr(f, "gives")], ids=lambda f: f.__name__
)
def test_the_memory_of_a_tracker_can_be_saved_between_any_two_updates(tracker):
    """Plain tensors that nobody writes to, and going on from a copy is going on.  It gives what it says it gives."""
    prompt = torch.tensor([4, 4, 9, 9])
    known = {"reward_weight": ONE, "group": prompt, "divergence": torch.tensor(1e-4)}
    asked = part(tracker, **({"tau": (0.75,)} if tracker is trackers.self_paced else {}))
    _, first = asked(reward=column(0.1, 0.2, 0.3, 0.4), prompt=prompt, memory={}, **known)
    kept = {name: x.clone() for name, x in first.items()}
    again, copy = (
        asked(reward=column(0.9, 0.8, 0.7, 0.6), prompt=prompt - 1, memory=m, **known) for m in (first, kept)
    )
    assert again[0].keys() == set(tracker.gives)
    for one, other in ((again[0], copy[0]), (again[1], copy[1]), (first, kept)):
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[n], other[n], rtol=0, atol=0, equal_nan=True) for n in one)


def test_the_expected_reward_goes_to_a_constant_reward_without_forgetting():
    memory, prompt = {}, torch.tensor([2, 2])
    for update in range(2000):
        given, memory = trackers.beta_counts(column(0.7, 0.7), ONE, prompt, memory, kept=1.0)
        if update == 0:
            assert given["expected"].tolist() == [0.5, 0.5]
        assert bool(((given["expected"] > 0) & (given["expected"] < 1)).all())
    assert trackers.expected_reward(prompt, memory).tolist() == pytest.approx([0.7] * 2, abs=1e-3)
    assert trackers.expected_reward(torch.tensor([99]), memory).tolist() == [0.5]


def test_counts_forget_and_take_the_mean_of_a_prompts_rollouts():
    """good = .9 + mean r, bad = .9 + 1 - mean r after one update."""
    prompt = torch.tensor([5, 1, 5])
    _, memory = trackers.beta_counts(column(1.0, 0.25, 0.0), ONE, prompt, {})
    torch.testing.assert_close(memory["beta/counts"], torch.tensor([[1.15, 1.65], [1.4, 1.4]]))
    assert memory["beta/prompt"].tolist() == [1, 5]
    _, memory = trackers.beta_counts(column(1.0), ONE, torch.tensor([3]), memory)
    assert memory["beta/prompt"].tolist() == [1, 3, 5]
    torch.testing.assert_close(memory["beta/counts"][0], torch.tensor([1.15, 1.65]))


@pytest.mark.parametrize(("reward", "limit"), [(0.0, 0.0), (1.0, 1.0)])
def test_a_prompt_that_always_fails_or_succeeds_is_never_quite_certain(reward, limit):
    """0 < v < 1, after a hundred updates that forget and also with weights whose sum rounds to more than 1."""
    weight = torch.tensor([0.27, 0.66, 0.07])
    assert weight.sum() > 1
    memory, prompt = {}, torch.tensor([2])
    for _ in range(100):
        _, memory = trackers.beta_counts(torch.full((1, 3), reward), weight, prompt, memory)
        assert 0 < trackers.expected_reward(prompt, memory).item() < 1
    assert trackers.expected_reward(prompt, memory).item() == pytest.approx(limit, abs=1e-4)


@pytest.mark.parametrize("value", [-0.1, 1.2])
def test_counts_of_rewards_outside_of_0_and_1_are_refused(value):
    with pytest.raises(ValueError, match="it counts between 0 and 1"):
        trackers.beta_counts(column(0.5, value), ONE, torch.tensor([0, 0]), {})


def test_proficiency_starts_with_the_first_update_and_follows_slowly():
    first, second = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 5.0])
    given, memory = trackers.proficiency(first[:, None], ONE, {})
    assert (given["proficiency_mean"], given["proficiency_std"]) == (2, 1)
    given, _ = trackers.proficiency(second[:, None], ONE, memory)
    assert given["proficiency_mean"].item() == pytest.approx(0.8 * 2 + 0.2 * 5)
    assert given["proficiency_std"].item() == pytest.approx(math.sqrt(0.8))
    given, _ = trackers.proficiency(second[:, None], ONE, memory, kept=0.0)
    assert (given["proficiency_mean"], given["proficiency_std"]) == (5, 0)


def draw(rows, rewards, seed=0):
    return torch.rand(rows, rewards, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GROUP = torch.arange(3).repeat_interleave(4)


def paced(reward, group=GROUP, memory=None, **numbers):
    return trackers.self_paced(reward, torch.ones(reward.shape[1]), group, memory or {}, **numbers)


def test_hoyer_sparsity_is_0_for_constants_and_1_for_one_hot():
    reward = torch.tensor([[0.3, 0.0, 0.0, 0.2], [0.3, 0.7, 0.0, 0.0], [0.3, 0.0, 0.0, 0.0], [0.3, 0.0, 0.0, 0.2]])
    ours = group_sparsity(reward, torch.zeros(4, dtype=torch.long))
    expected = [0, 1, 0, (2 - math.sqrt(2)) / 1]
    torch.testing.assert_close(ours, torch.tensor(expected).expand(4, 4), atol=1e-6, rtol=0)
    assert not group_sparsity(torch.tensor([[0.4]]), torch.zeros(1, dtype=torch.long)).any()


def test_one_reward_is_left_as_it_is():
    """Self-Paced with K = 1 is its host."""
    reward = draw(12, 1)
    given, memory = paced(reward, memory={"kept": ONE}, tau=(0.75,))
    torch.testing.assert_close(given["reward"], reward)
    assert given["reward_weight"].tolist() == [1] and memory.keys() == {"kept"}


def test_rewards_of_one_utility_share_equally():
    """Equal columns but for the last, whose sparsity has no successor."""
    reward = draw(12, 1).expand(12, 2) * 0 + 0.4
    share = paced(reward)[0]["stage_share"]
    torch.testing.assert_close(share, torch.full((12, 2), 0.5).double())


def test_shares_sum_to_1_and_are_those_of_the_formula():
    reward, tau, beta = draw(12, 3), (0.6, 0.8, 0.8), 0.5
    given, _ = paced(reward, tau=(0.6, 0.8), beta=beta)
    for value in range(3):
        mine = reward[value == GROUP]
        sparse = [(2 - float(r.sum() / r.norm())) / 1 for r in mine.T] + [0]
        utility = torch.stack(
            [(mine[:, j].mean() - tau[j]).sigmoid() + beta * (sparse[j] - sparse[j + 1]) for j in range(3)]
        )
        share = given["stage_share"][value == GROUP]
        torch.testing.assert_close(share, utility.softmax(0).expand(4, 3))
        torch.testing.assert_close(given["reward"][value == GROUP][:, 0], (mine * share).sum(1))
    torch.testing.assert_close(given["stage_share"].sum(1), torch.ones(12).double())


def test_a_better_first_stage_gains_share_by_its_competence_alone():
    """The same spread at a higher level; sparsity off."""
    reward = draw(12, 2) * 0.3
    share = [paced(reward + torch.tensor([up, 0.0]), beta=0.0)[0]["stage_share"][:, 0] for up in (0, 0.5)]
    assert bool((share[1] > share[0]).all())


def test_a_sparse_next_stage_takes_share_from_the_one_before():
    reward = torch.full((4, 2), 0.25).double()
    sparse = reward.clone()
    sparse[:, 1] = torch.tensor([1.0, 0, 0, 0])
    even, tilted = (paced(r, GROUP[:4], beta=0.5)[0]["stage_share"][0] for r in (reward, sparse))
    assert tilted[1] > even[1] and tilted[0] < even[0]


def test_more_values_of_tau_than_rewards_are_refused():
    with pytest.raises(ValueError, match="self_paced: 2 values of tau for 1 rewards"):
        paced(draw(12, 1))


def test_equal_rewards_stay_equal_when_mixed():
    """C01."""
    reward = torch.tensor([[0.1, 0.7, 0.3]]).expand(5, 3)
    given, _ = paced(reward, torch.zeros(5, dtype=torch.long))
    assert not outcome.grpo(given["reward"], given["reward_weight"], torch.zeros(5, dtype=torch.long)).any()


def test_the_best_of_a_group_is_imitated_only_if_it_is_better_than_usual():
    reward, group = column(0.0, 1.0, 5.0, 5.0, 8.0, 9.0), torch.tensor([0, 0, 1, 1, 2, 2])
    given, memory = trackers.best_path(reward, ONE, group, {})
    torch.testing.assert_close(given["best_advantage"], torch.tensor([1, 1, -math.inf, -math.inf, 1, 1]))
    assert memory["best_path/mean"].item() == pytest.approx(28 / 6)
    given, memory = trackers.best_path(reward, ONE, group, memory)
    assert given["best_advantage"].tolist() == pytest.approx([-math.inf] * 4 + [1] * 2)
    assert memory["best_path/mean"].item() == pytest.approx(28 / 6)


def test_a_coefficient_rises_above_the_target_and_falls_below_it_within_its_bounds():
    memory, seen = {}, []
    for divergence in [1.0] * 20 + [0.0] * 20:
        given, memory = trackers.adaptive_coefficient(torch.tensor(divergence), memory)
        seen.append(given["coefficient"].item())
    assert seen[:2] == pytest.approx([1.5e-7, 2.25e-7]) and max(seen) == pytest.approx(1e-5)
    assert seen[19] == pytest.approx(1e-5) and seen[20] == pytest.approx(1e-5 / 1.5) and seen[-1] == pytest.approx(1e-7)


def test_a_reward_outside_of_0_to_1_is_refused_by_those_that_count_on_it():
    reward, weight, group = torch.tensor([[0.5], [1.5]]), torch.ones(1), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"self_paced: rewards from 0\.5 to 1\.5; it mixes what lies between 0 and 1"):
        trackers.self_paced(reward, weight, group, {}, tau=(0.75,))
    with pytest.raises(ValueError, match=r"beta_counts: weighted rewards from 0\.5 to 1\.5"):
        trackers.beta_counts(reward, weight, group, {})
