"""flowrl/visual/score.py: what rewards are shown of latents."""

import pytest
import torch

import rewards
from flowrl import plan
from flowrl.part import part
from flowrl.recipes import find
from flowrl.run.scoring import check_states, make_score
from flowrl.visual.score import show
from rewards import RewardError
from samplers import estimates, schedules


def noisy_reward(latents, sigma, prompts):
    """The mean of the latents, less where noise is left; in [0, 1]."""
    return (latents.sigmoid().mean(1) * (1 - sigma / 2)).tolist()


def redness(images):
    return images[:, 0].mean((1, 2)).tolist()


def scorer(*functions):
    return make_score([rewards.Reward(f.__name__, f) for f in functions], [])


def refuse(latents):
    pytest.fail("decoded")


def test_latents_alone_are_not_decoded_and_come_with_their_level(loop):
    latents, level, group = torch.randn(4, 2), torch.tensor([0.0, 0.5, 1.0, 0.5]), torch.zeros(4, dtype=torch.long)
    found = show(scorer(noisy_reward), refuse, latents, loop.examples, group, level)
    torch.testing.assert_close(found.total(), latents.sigmoid().mean(1) * (1 - level / 2))
    finished = show(scorer(noisy_reward), refuse, latents, loop.examples, group)
    torch.testing.assert_close(finished.total(), latents.sigmoid().mean(1))


def test_rewards_on_pictures_and_on_latents_score_the_same_rows(toy, loop):
    latents, group = torch.randn(4, 2), torch.zeros(4, dtype=torch.long)
    found = show(scorer(noisy_reward, redness), toy().decode, latents, loop.examples, group)
    assert found.names == ("noisy_reward", "redness")
    torch.testing.assert_close(found.value[:, 1], latents[:, 0].sigmoid(), atol=1 / 255, rtol=0)


def test_a_reward_on_latents_is_not_asked_about_pictures_alone(toy, loop):
    with pytest.raises(ValueError, match="'noisy_reward' asks for latents; there are only images"):
        scorer(noisy_reward)(toy().decode(torch.randn(4, 2)), loop.examples, torch.zeros(4, dtype=torch.long))


def test_a_step_reward_on_noisy_latents_is_refused_where_rewards_score_pictures_only():
    recipe = find("drm_stepwise")().but(estimate=part(estimates.as_drawn)).check()
    check_states(scorer(noisy_reward), recipe)
    check_states(scorer(redness), find("drm_stepwise")())
    with pytest.raises(ValueError, match=r"reward 'redness' scores pictures alone.*recipe\.estimate: clean_estimate"):
        check_states(scorer(noisy_reward, redness), recipe)


def test_drm_learns_from_a_reward_on_noisy_latents_without_a_picture(toy, loop):
    recipe = find("drm_stepwise")().but(estimate=part(estimates.as_drawn))
    policy, levels = toy(recipe), []
    policy.decode = refuse

    def seen(latents, sigma, prompts):
        levels.extend(sigma.tolist())
        return noisy_reward(latents, sigma, prompts)

    score, learner, found = scorer(seen), loop.learner(policy, rate=5e-3), []
    for iteration in range(12):
        log = loop.update(policy, recipe, learner, iteration=iteration, score=score)
        found.append(log["reward/seen"])
    steps = recipe.rollout.steps
    assert sorted(set(round(x * steps) for x in levels)) == list(range(steps + 1))
    assert log["rollout_calls"] == plan.count(recipe, schedules.linear(steps), prompts=4).rollout_calls == 4 * 4 * steps
    assert sum(found[-3:]) > sum(found[:3]) + 0.15, found


def test_an_answer_of_the_wrong_length_names_the_reward(loop):
    def short(latents):
        return [0.5]

    with pytest.raises(RewardError, match="'short' returned 1 value for 4 images"):
        show(scorer(short), refuse, torch.randn(4, 2), loop.examples, torch.zeros(4, dtype=torch.long))
