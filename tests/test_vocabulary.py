"""Every public function of the pure packages speaks the vocabulary; every one says what it does."""

import inspect

import pytest

from flowrl import vocabulary

PURE = ("flowrl.advantages", "flowrl.objectives", "flowrl.memory", "flowrl.visual.points")


@pytest.mark.menu(*PURE)
def test_a_function_asks_only_for_quantities_of_the_vocabulary(public):
    """Before the `*` stand names of the vocabulary, some with a snapshot's suffix; after it numbers."""
    for name, parameter in inspect.signature(public).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
            vocabulary.split(name)


@pytest.mark.menu(*PURE, "flowrl.allocation", "flowrl.groups", "flowrl.randomness", "samplers", "flowrl.recipes")
def test_a_public_function_says_what_it_does(public):
    assert public.__doc__ and public.__doc__.strip()[0] != "\n" and len(public.__doc__.split()) > 3


@pytest.mark.menu("flowrl.recipes.visual")
def test_the_first_line_of_a_recipe_names_its_paper(public):
    first = public.__doc__.strip().splitlines()[0]
    assert "arXiv:" in first or "https://" in first


@pytest.mark.parametrize(
    "name, expected",
    [
        ("mean", ("mean", "")),
        ("mean_ref", ("mean", "ref")),
        ("log_prob_old", ("log_prob", "old")),
        ("velocity_anchor_slow", ("velocity", "anchor_slow")),
        ("next_latents", ("next_latents", "")),
        ("reward_weight", ("reward_weight", "")),
    ],
)
def test_a_suffix_names_a_snapshot(name, expected):
    assert vocabulary.split(name) == expected


@pytest.mark.parametrize("name", ["timestep", "reward_ref", "std_ref", "latents_old", "means", "lob_prob", ""])
def test_a_name_that_is_no_quantity_is_refused(name):
    """Only what a policy computes can belong to a snapshot; all policies share the std."""
    with pytest.raises(ValueError, match="is not a quantity"):
        vocabulary.split(name)


def test_every_quantity_says_its_shape_and_meaning():
    assert all(q.shape and q.meaning for q in vocabulary.VOCABULARY.values())
