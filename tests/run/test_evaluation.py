"""Evaluation on fixed prompts and fixed noise."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from flowrl.run.evaluation import Settings, evaluate, sample
from flowrl.visual.policy import Example
from flowrl.visual.ranks import Ranks
from rewards.media import quantise
from rewards.statistics import STATISTICS
from rewards.table import RewardTable

EXAMPLES = [Example(str(i % 4), metadata={"tag": "even" if i % 2 == 0 else "odd"}) for i in range(7)]


def settings(samples=1, seed=0, batch_size=64, steps=4):
    return Settings(steps=steps, guidance=1.0, samples=samples, seed=seed, batch_size=batch_size)


def redness(images, examples, group):
    value = images[:, 0].mean((1, 2))[:, None]
    return RewardTable(value, torch.ones(1), group, torch.ones(len(value), dtype=torch.bool), ("red",))


def numbered(images, examples, group):
    """The number of the example, told by its group: seen only if each counts once and in order."""
    value = group[:, None].float()
    return RewardTable(value, torch.ones(1), group, group != 5, ("number",))


def test_the_same_seed_draws_the_same_pictures_and_another_seed_others(toy):
    policy = toy()
    one, two, other = (sample(policy, EXAMPLES, settings(seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_a_picture_depends_on_its_own_place_alone(toy):
    """Neither on the batch nor on who draws it: the share of a process is a slice of the whole."""
    policy = toy(dtype=torch.float64)
    whole = sample(policy, EXAMPLES, settings(samples=2))
    assert torch.allclose(sample(policy, EXAMPLES, settings(samples=2, batch_size=3)), whole, atol=1e-6)
    assert torch.allclose(sample(policy, EXAMPLES[3:], settings(samples=2), first=3), whole[6:], atol=1e-6)


def test_samples_of_a_prompt_lie_next_to_each_other_and_differ(toy):
    pictures = sample(toy(), EXAMPLES[:2], settings(samples=3))
    assert len(pictures) == 6 and len(pictures.flatten(1).unique(dim=0)) == 6
    assert torch.allclose(pictures[0], sample(toy(), EXAMPLES[:1], settings())[0])


def test_means_are_over_the_main_prompts_and_over_each_tag(toy):
    """An invalid score is left out of its means and counted."""
    log, _ = evaluate(toy(), EXAMPLES, numbered, settings(), Ranks(), main=6, pictures=7)
    assert {name: x for name, x in log.items() if not name.startswith("eval/image/")} == {
        "eval/number": (0 + 1 + 2 + 3 + 4) / 5,
        "eval/number/even": (0 + 2 + 4 + 6) / 4,
        "eval/number/odd": (1 + 3) / 2,
        "eval/invalid": 1,
        "eval/total": (0 + 1 + 2 + 3 + 4) / 5,
        "eval/stderr": pytest.approx((2.5 / 5) ** 0.5),
    }


def test_the_total_weighs_the_rewards_and_its_error_is_over_prompts_not_pictures(toy):
    """Two pictures of a prompt are one observation; one prompt alone has no standard error."""

    def two(images, examples, group):
        value = torch.stack([group.float(), torch.ones(len(group))], 1)
        return RewardTable(value, torch.tensor([2.0, -0.5]), group, group >= 0, ("a", "b"))

    log, _ = evaluate(toy(), EXAMPLES[:4], two, settings(samples=2), Ranks(), main=3, pictures=1)
    assert log["eval/total"] == pytest.approx((0 + 2 + 4) / 3 - 0.5)
    assert log["eval/stderr"] == pytest.approx(2 / 3**0.5)
    assert "eval/stderr" not in evaluate(toy(), EXAMPLES[:1], two, settings(), Ranks(), main=1, pictures=1)[0]


@pytest.mark.parametrize("count", [2, 3])
def test_every_prompt_counts_once_on_any_number_of_processes(toy, count):
    """C72: seven prompts on two or three processes, here threads that wait for each other; rows come back in order."""
    meeting, table = Barrier(count, timeout=60), {}

    def evaluate_as(index):
        def gather(rows):
            meeting.wait()
            table[index] = rows
            meeting.wait()
            return torch.cat([table[i] for i in range(count)])

        share = Ranks(index, count, gather)
        return evaluate(policies[index], EXAMPLES, redness, settings(samples=2), share, main=5, pictures=6)

    policies = [toy(dtype=torch.float64) for _ in range(count)]
    alone, shown = evaluate(
        toy(dtype=torch.float64), EXAMPLES, redness, settings(samples=2), Ranks(), main=5, pictures=6
    )
    with ThreadPoolExecutor(count) as pool:
        together = list(pool.map(evaluate_as, range(count)))
    for log, pictures in together:
        assert log == pytest.approx(alone, abs=1e-6) and torch.allclose(pictures, shown, atol=1e-6)


def test_diversity_is_the_distance_between_two_pictures_of_a_prompt(toy):
    """Root mean square over pixels, the mean over pairs; the toy's third channel is constant."""
    log, first = evaluate(toy(), EXAMPLES[:3], redness, settings(samples=2), Ranks(), main=2, pictures=2)
    pictures = sample(toy(), EXAMPLES[:3], settings(samples=2)).unflatten(0, (3, 2))
    expected = (pictures[:, 0] - pictures[:, 1]).square().mean((1, 2, 3)).sqrt()[:2].mean()
    assert log["eval/diversity"] == pytest.approx(float(expected)) and log["eval/diversity"] > 0.01
    assert torch.equal(first, pictures[:2, 0])


def test_statistics_are_the_mean_over_the_main_pictures(toy):
    """Of what a PNG holds, 8 bits."""
    log, _ = evaluate(toy(), EXAMPLES, redness, settings(samples=2), Ranks(), main=5, pictures=1)
    pictures = quantise(sample(toy(), EXAMPLES, settings(samples=2)))[:10]
    for name, statistic in STATISTICS.items():
        assert log[f"eval/image/{name}"] == pytest.approx(float(statistic(pictures).mean())), name
    assert log["eval/image/saturation"] > 0.01


def test_evaluation_runs_without_noise_and_without_a_gradient(toy):
    policy = toy()
    sample(policy, EXAMPLES, settings(steps=5))
    assert (policy.forwards, policy.backwards) == (35, 0)
