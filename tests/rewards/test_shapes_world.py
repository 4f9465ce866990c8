"""The little world: its prompts, its clauses, its split and its pictures."""

import itertools

import numpy as np
import pytest

from rewards.shapes_world import (
    COLORS,
    KINDS,
    SHAPES,
    Scene,
    all_scenes,
    canonical,
    glyph_mask,
    include,
    metadata,
    prompt,
    render,
    shape_mask,
    split,
)

RED_CIRCLE, BLUE_SQUARE, ORANGE_CROSS = ("red", "circle"), ("blue", "square"), ("orange", "cross")


def test_the_world_has_3012_prompts_and_no_two_scenes_share_one():
    scenes = all_scenes()
    assert {kind: len(of_kind) for kind, of_kind in scenes.items()} == {
        "one_object": 24,
        "count": 72,
        "two_objects": 24 * 23,
        "position": 24 * 23 * 4,
        "number": (10 + 16) * 6,
    }
    prompts = [prompt(scene) for of_kind in scenes.values() for scene in of_kind]
    assert len(set(prompts)) == len(prompts) == 3012


@pytest.mark.parametrize(
    "scene, words",
    [
        (Scene("one_object", things=(ORANGE_CROSS,)), "an orange cross"),
        (Scene("count", things=(ORANGE_CROSS,) * 3), "three orange crosses"),
        (Scene("two_objects", things=(RED_CIRCLE, ORANGE_CROSS)), "a red circle and an orange cross"),
        (Scene("position", things=(RED_CIRCLE, BLUE_SQUARE), relation="left of"), "a red circle left of a blue square"),
        (Scene("number", color="orange", text="42"), "the number 42 in orange"),
    ],
)
def test_a_prompt_says_its_scene(scene, words):
    assert prompt(scene) == words


def test_a_position_clause_relates_its_object_to_clause_zero():
    scene = Scene("position", things=(RED_CIRCLE, BLUE_SQUARE), relation="left of")
    assert include(scene) == [
        {"class": "square", "count": 1, "color": "blue"},
        {"class": "circle", "count": 1, "color": "red", "position": ["left of", 0]},
    ]


def test_a_count_is_one_clause_and_a_number_keeps_its_text():
    assert include(Scene("count", things=(RED_CIRCLE,) * 4)) == [{"class": "circle", "count": 4, "color": "red"}]
    assert metadata(Scene("number", color="blue", text="7")) == {
        "prompt": "the number 7 in blue",
        "tag": "number",
        "include": [{"class": "number", "text": "7", "color": "blue"}],
    }


def test_all_wordings_of_a_scene_lie_on_one_side_of_the_split():
    def pair(kind, a, b, relation=""):
        return Scene(kind, things=(a, b), relation=relation)

    for a, b in itertools.permutations(itertools.product(COLORS, SHAPES), 2):
        assert canonical(pair("two_objects", a, b)) == canonical(pair("two_objects", b, a))
        for one, other in (("left of", "right of"), ("above", "below")):
            assert canonical(pair("position", a, b, one)) == canonical(pair("position", b, a, other))
            assert canonical(pair("position", a, b, one)) != canonical(pair("position", a, b, other))


def test_canonical_strings_are_as_many_as_there_are_scenes():
    scenes = [scene for of_kind in all_scenes().values() for scene in of_kind]
    assert len({canonical(scene) for scene in scenes}) == 24 + 72 + 276 + 2 * 552 + 156


def test_the_split_holds_out_a_fifth_with_every_kind_on_both_sides():
    held_out = {kind: np.mean([split(s) == "test" for s in of_kind]) for kind, of_kind in all_scenes().items()}
    assert all(0.1 < share < 0.3 for share in held_out.values()), held_out


def test_the_split_never_moves():
    """Shipped weights saw the training side: a scene that changed sides would be held out no more."""
    scenes = [scene for of_kind in all_scenes().values() for scene in of_kind]
    assert sum(split(scene) == "test" for scene in scenes) == 576
    assert split(Scene("one_object", things=(RED_CIRCLE,))) == "test"
    assert split(Scene("one_object", things=(BLUE_SQUARE,))) == "train"


def test_the_same_generator_state_draws_the_same_picture():
    scene = all_scenes()["count"][5]
    first, again, other = (render(scene, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.shape == (32, 32, 3) and first.dtype == np.float32 and first.min() >= 0 and first.max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_border_of_a_picture_stays_dark(kind):
    """Nothing is cut off: the outermost pixels are ground."""
    rng = np.random.default_rng(0)
    scenes = all_scenes()[kind]
    for index in rng.integers(len(scenes), size=60):
        picture = render(scenes[index], rng)
        assert max(picture[[0, -1]].max(), picture[:, [0, -1]].max()) < 0.2, prompt(scenes[index])


@pytest.mark.parametrize(
    "relation, axis, sign", [("left of", 0, -1), ("right of", 0, 1), ("above", 1, -1), ("below", 1, 1)]
)
def test_a_subject_is_drawn_where_its_relation_says(relation, axis, sign):
    scene, rng = Scene("position", things=(RED_CIRCLE, BLUE_SQUARE), relation=relation), np.random.default_rng(0)
    for _ in range(40):
        picture = render(scene, rng)
        centers = [np.argwhere(picture[..., channel] > 0.5)[:, ::-1].mean(0) for channel in (0, 2)]
        offset = centers[0] - centers[1]
        assert sign * offset[axis] > abs(offset[1 - axis])


@pytest.mark.parametrize(
    "shape, area",
    [
        ("circle", np.pi * 36),
        ("square", (2 * 0.92 * 6) ** 2),
        ("triangle", 0.6 * (1.8 * 6) ** 2),
        ("cross", 4 * (2 * 0.36 - 0.36**2) * 36),
    ],
)
def test_a_shape_covers_its_area(shape, area):
    assert shape_mask(shape, 16.2, 15.7, 6.0).sum() == pytest.approx(area, rel=0.03)


def test_a_shape_of_another_world_is_refused():
    with pytest.raises(ValueError, match="'hexagon': not of this world, which has circle, square, triangle, cross"):
        shape_mask("hexagon", 16.0, 16.0, 6.0)


def test_glyphs_are_five_by_seven_dots_and_all_different():
    glyphs = [glyph_mask(str(digit), 2) for digit in range(10)]
    assert all(glyph.shape == (14, 10) for glyph in glyphs)
    assert len({glyph.tobytes() for glyph in glyphs}) == 10
