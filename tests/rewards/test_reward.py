"""What can be said about a reward before it is called."""

from functools import partial

import pytest

from rewards.reward import Reward, check, check_weights, column_names


def plain(images, prompts, **metadata):
    return [0.0] * len(prompts)


def test_the_columns_are_the_name_or_the_name_with_each_component_of_the_weight():
    assert column_names(Reward("ocr", plain)) == ("ocr",)
    assert column_names(Reward("shapes", plain, {"strict": 1, "soft": 0})) == ("shapes_strict", "shapes_soft")


@pytest.mark.parametrize(
    "function, columns",
    [
        (plain, []),
        (plain, ["include", "tag"]),
        (lambda images: 0, []),
        (lambda prompts, group: 0, []),
        (lambda images, include: 0, ["include"]),
        (lambda images, tag=None: 0, []),
        (lambda *, tag: 0, ["tag"]),
        (partial(lambda images, size: 0, size=3), ["tag"]),
    ],
)
def test_a_function_whose_parameters_are_there_can_be_called(function, columns):
    check(Reward("x", function), columns)


@pytest.mark.parametrize(
    "function, columns, message",
    [
        (
            lambda image: 0,
            ["tag"],
            "reward 'x': parameter 'image' is not available. Did you mean 'images'"
            ". Available: images, videos, prompts, group, latents, sigma, tag.",
        ),
        (lambda images, includes: 0, ["include"], "parameter 'includes' is not available. Did you mean 'include'"),
        (lambda images, /: 0, [], "parameter 'images' is positional only"),
        (
            lambda *args, **kwargs: 0,
            ["tag"],
            "no parameter is one of images, videos, prompts, group, latents, sigma, tag",
        ),
        (dict.fromkeys, [], "reward 'x'"),
        (partial(plain, tag=3), ["tag"], "'tag' is both one of its numbers and a metadata column"),
        (plain, ["prompts"], "metadata column 'prompts' has the name of what every reward gets"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_training(function, columns, message):
    """C06"""
    with pytest.raises(ValueError, match=message) as refused:
        check(Reward("x", function), columns)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"on_error": "masks"}, "reward 'x': on_error is 'masks'. Did you mean 'mask'. Accepted: raise, mask."),
        ({"weight": float("nan")}, "reward 'x': weight nan; expected a finite number"),
        ({"weight": {"a": float("inf")}}, "reward 'x': weight inf; expected a finite number"),
        ({"weight": True}, "reward 'x': weight True; expected a finite number"),
        ({"weight": {}}, "reward 'x': weight is empty"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_when_it_is_made(wrong, message):
    """C12"""
    with pytest.raises(ValueError, match=message):
        Reward(**({"name": "x", "function": plain} | wrong))


def test_weights_are_listed_by_column_and_may_be_negative():
    """C12"""
    rewards = [Reward("a", plain, -2), Reward("b", plain, {"c": 0.5, "d": 0})]
    assert check_weights(rewards).tolist() == [-2, 0.5, 0]


@pytest.mark.parametrize(
    "rewards, message",
    [
        ([Reward("a", plain, 0.0), Reward("b", plain, {"c": 0})], r"all weights are zero \(a, b_c\)"),
        ([], r"all weights are zero \(no rewards\)"),
        ([Reward("a", plain), Reward("a", plain)], r"column 'a' appears twice; .* \(a, a\)"),
        ([Reward("a", plain, {"b": 1}), Reward("a_b", plain)], r"column 'a_b' appears twice"),
    ],
)
def test_weights_without_effect_and_double_names_are_refused(rewards, message):
    """C12"""
    with pytest.raises(ValueError, match=message):
        check_weights(rewards)
