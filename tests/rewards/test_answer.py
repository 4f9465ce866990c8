"""What a reward may answer, read without guessing."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from rewards.answer import RewardError, read_components, read_values

WHO = "reward 'x'"


@pytest.mark.parametrize(
    "answer",
    [
        [0, 1, 1],
        (0.0, 1.0, 1.0),
        [False, True, True],
        [np.float16(0), np.int64(1), np.bool_(True)],
        [Fraction(0), 1, 1.0],
        [torch.tensor(0.0), torch.tensor([1.0], requires_grad=True), np.array([[1.0]])],
        [[0], [1], (1,)],
        np.array([0, 1, 1], dtype=np.float16),
        np.array([[0], [1], [1]], dtype=np.uint8),
        np.array([0, 1.0, True], dtype=object),
        np.array([False, True, True]),
        torch.tensor([0, 1, 1]),
        torch.tensor([False, True, True]),
        torch.tensor([0, 1, 1], dtype=torch.bfloat16),
        torch.tensor([[0.0], [1.0], [1.0]], requires_grad=True),
        torch.tensor([[[0.0]], [[1.0]], [[1.0]]]),
    ],
    ids=repr,
)
def test_awkward_types_of_the_right_length_give_the_same_scores(answer):
    """C06"""
    scores, _ = read_values(WHO, answer, 3)
    assert scores.tolist() == [0.0, 1.0, 1.0] and scores.dtype == torch.float32 and not scores.requires_grad


@pytest.mark.parametrize(
    "answer, message",
    [
        ([1.0], "reward 'x' returned 1 value for 8 images"),
        ([], "reward 'x' returned 0 values for 8 images"),
        ([0.5] * 9, "reward 'x' returned 9 values for 8 images"),
        (torch.ones(1), "reward 'x' returned 1 value for 8 images"),
        (torch.ones(1, 1), "reward 'x' returned 1 value for 8 images"),
        (np.ones(7), "reward 'x' returned 7 values for 8 images"),
        (3.0, r"reward 'x' returned a single number \(3.0\) for 8 images; expected 8 values"),
        (np.float32(3), r"reward 'x' returned a single number \(3.0\) for 8 images"),
        (torch.tensor(3.0), r"reward 'x' returned shape \(\) for 8 images; expected \(8,\) or \(8, 1\)"),
        (torch.ones(8, 2), r"reward 'x' returned shape \(8, 2\) for 8 images; expected \(8,\) or \(8, 1\)"),
        (np.ones((1, 8)), r"returned shape \(1, 8\)"),
        (torch.ones(8, 0), r"returned shape \(8, 0\)"),
        ([[1.0, 2.0]] * 8, "returned a list of 2 values for image 0; expected one number for each image"),
        ([torch.ones(2)] * 8, r"returned a Tensor of shape \(2,\) for image 0"),
    ],
)
def test_the_wrong_number_of_values_is_refused_and_never_broadcast(answer, message):
    """C05, C06"""
    with pytest.raises(ValueError, match=message):
        read_values(WHO, answer, 8)


def test_a_single_number_is_refused_even_for_a_single_image():
    """C05"""
    with pytest.raises(RewardError, match="expected 1 values"):
        read_values(WHO, 3.0, 1)


@pytest.mark.parametrize(
    "answer, message",
    [
        (None, "returned None for 2 images; expected a list, array or tensor of 2 numbers"),
        ("good", "returned a str for 2 images"),
        (object(), "returned an object for 2 images"),
        ((x for x in (1, 2)), "returned a generator for 2 images"),
        ({1, 2}, "returned a set for 2 images"),
        ([1.0, "0.5"], "returned a str for image 1; expected one number for each image"),
        ([1.0, {}], "returned a dict for image 1"),
        (torch.ones(2, dtype=torch.complex64), "returned a complex for image 0"),
        (np.array(["a", "b"]), "returned a str for image 0"),
    ],
)
def test_a_wrong_type_is_refused(answer, message):
    """C06"""
    with pytest.raises(RewardError, match=message):
        read_values(WHO, answer, 2)


def test_none_nan_and_infinity_are_not_finite_and_kept_as_given():
    """C04: 1e39 is finite, but not as the fp32 that training uses."""
    scores, given = read_values(WHO, [0.5, None, float("nan"), float("-inf"), 1e39], 5)
    assert scores.isfinite().tolist() == [True, False, False, False, False] and given[1] is None


def test_components_come_in_the_order_of_the_weight():
    assert read_components(WHO, {"soft": 1, "strict": 2}, ["strict", "soft"]) == [2, 1]


def test_one_component_may_have_a_plain_weight():
    assert read_components(WHO, {"strict": 2}, None) == [2]


@pytest.mark.parametrize(
    "answer, components, message",
    [
        (
            {"strict": 1, "soft": 2},
            None,
            r"components \(strict, soft\), but its weight is one number; give a weight for",
        ),
        ({}, None, r"components \(none\)"),
        (
            [1.0],
            ["strict", "soft"],
            "a weight for each of strict, soft, but returned a list; .*make its weight one number",
        ),
        (
            {"strict": 1},
            ["strict", "soft"],
            "weight for component 'soft', which it did not return. It returned: strict.",
        ),
        ({"strict": 1}, ["strikt"], "component 'strikt', .* Did you mean 'strict'. It returned: strict."),
        ({"strict": 1, "soft": 2}, ["strict"], "returned component 'soft', which has no weight .* Weights: strict."),
    ],
)
def test_components_and_weights_must_match_by_name(answer, components, message):
    """C12"""
    with pytest.raises(RewardError, match=message):
        read_components(WHO, answer, components)
