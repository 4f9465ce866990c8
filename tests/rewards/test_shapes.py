"""The verifier: right on the truth, deaf to other prompts, and not to be fooled."""

import re
import time

import numpy as np
import pytest
import torch

from rewards import shapes
from rewards.shapes_world import COLORS, KINDS, SHAPES, Scene, all_scenes, include, prompt, render, shape_mask

RED_CIRCLE, BLUE_SQUARE = ("red", "circle"), ("blue", "square")
ONE_RED_CIRCLE = [{"class": "circle", "count": 1, "color": "red"}]


def pictures_of(scenes, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([render(scene, rng) for scene in scenes])).permute(0, 3, 1, 2)


def paint(*parts, ground=0.08):
    """One picture [1, 3, 32, 32] of (mask, colour name) parts."""
    picture = np.full((32, 32, 3), ground, np.float32)
    for mask, color in parts:
        picture[np.asarray(mask) > 0.5] = COLORS[color]
    return torch.from_numpy(picture).permute(2, 0, 1)[None]


def strict(picture, clauses):
    return shapes.load()(picture, [clauses])["strict"].item()


def soft(picture, clauses):
    return shapes.load()(picture, [clauses])["soft"].item()


@pytest.fixture(scope="module")
def truth():
    """2000 scenes, 400 of each kind, their pictures and the verdict on them."""
    rng, scenes = np.random.default_rng(1), []
    for of_kind in all_scenes().values():
        scenes += [of_kind[i] for i in rng.integers(len(of_kind), size=400)]
    pictures = pictures_of(scenes)
    return scenes, pictures, shapes.load()(pictures, [include(scene) for scene in scenes])


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_of_every_kind_passes(truth, kind):
    scenes, _, marks = truth
    rows = torch.tensor([scene.kind == kind for scene in scenes])
    assert rows.sum() == 400 and marks["strict"][rows].mean() >= 0.97


def test_pictures_of_other_prompts_fail(truth):
    scenes, pictures, _ = truth
    order = np.random.default_rng(2).permutation(len(scenes))
    marks = shapes.load()(pictures, [include(scenes[i]) for i in order])
    other = torch.tensor([prompt(scenes[i]) != prompt(scene) for i, scene in zip(order, scenes, strict=True)])
    assert other.sum() >= 1950
    assert (marks["strict"][other] == 0).float().mean() >= 0.99 and marks["soft"][other].mean() < 0.25


def test_the_truth_passes_under_noise_and_blur(truth):
    """What an autoencoder does to a picture must not change the verdict."""
    scenes, pictures, _ = truth
    blurred = torch.nn.functional.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    worn = (
        0.75 * pictures
        + 0.25 * blurred
        + 0.02 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    )
    marks = shapes.load()(worn.clamp(0, 1), [include(scene) for scene in scenes])
    assert marks["strict"].mean() >= 0.95


def test_soft_is_at_least_085_where_strict_is_one_and_stays_between_0_and_1(truth):
    _, _, marks = truth
    assert marks["soft"][marks["strict"] == 1].min() >= 0.85
    assert marks["soft"].min() >= 0 and marks["soft"].max() <= 1


def test_the_verdict_does_not_depend_on_the_batch(truth):
    scenes, pictures, marks = truth
    rows = list(range(0, 2000, 97))
    alone = [shapes.load()(pictures[i : i + 1], [include(scenes[i])]) for i in rows]
    assert torch.cat([mark["strict"] for mark in alone]).equal(marks["strict"][rows])
    assert torch.allclose(torch.cat([mark["soft"] for mark in alone]), marks["soft"][rows], atol=1e-5)


@pytest.mark.parametrize(
    "clauses",
    [
        [{"class": "circle", "count": 1, "color": "orange"}],
        [{"class": "square", "count": 1, "color": "red"}],
        [{"class": "circle", "count": 2, "color": "red"}],
        [*ONE_RED_CIRCLE, {"class": "square", "count": 1, "color": "blue"}],
        [{"class": "number", "text": "0", "color": "red"}],
    ],
)
def test_a_red_circle_is_nothing_but_a_red_circle(clauses):
    picture = paint((shape_mask("circle", 16.0, 16.0, 6.0), "red"))
    assert strict(picture, ONE_RED_CIRCLE) == 1 and strict(picture, clauses) == 0


def test_something_more_in_the_picture_fails():
    circle, more = shape_mask("circle", 9.0, 9.0, 6.0), shape_mask("cross", 23.0, 23.0, 6.0)
    assert strict(paint((circle, "red")), ONE_RED_CIRCLE) == 1
    assert strict(paint((circle, "red"), (more, "blue")), ONE_RED_CIRCLE) == 0


@pytest.mark.parametrize(
    "relation, place",
    [("left of", (8.0, 16.0)), ("right of", (24.0, 16.0)), ("above", (16.0, 8.0)), ("below", (16.0, 24.0))],
)
def test_only_the_true_relation_passes(relation, place):
    opposite = (32 - place[0], 32 - place[1])
    picture = paint((shape_mask("circle", *place, 5.5), "red"), (shape_mask("square", *opposite, 5.5), "blue"))
    for claimed in ("left of", "right of", "above", "below"):
        clauses = include(Scene("position", things=(RED_CIRCLE, BLUE_SQUARE), relation=claimed))
        assert strict(picture, clauses) == (claimed == relation)


def test_swapped_colours_fail_but_earn_credit():
    picture = paint((shape_mask("circle", 8.0, 8.0, 5.5), "blue"), (shape_mask("square", 24.0, 24.0, 5.5), "red"))
    wanted = include(Scene("two_objects", things=(RED_CIRCLE, BLUE_SQUARE)))
    assert strict(picture, wanted) == 0 and 0.4 < soft(picture, wanted) < 0.7


def test_digits_are_read_in_order():
    for text, claimed, passes in (("42", "42", 1), ("42", "24", 0), ("42", "4", 0), ("7", "7", 1), ("7", "77", 0)):
        picture = pictures_of([Scene("number", color="blue", text=text)])
        assert strict(picture, [{"class": "number", "text": claimed, "color": "blue"}]) == passes, (text, claimed)


def test_soft_grows_with_every_right_part():
    wanted = include(Scene("count", things=(RED_CIRCLE,) * 3))
    places = [(7.0, 7.0), (24.0, 7.0), (15.0, 24.0)]
    marks = [
        soft(paint(*[(shape_mask("circle", *place, 5.0), "red") for place in places[:n]]), wanted) for n in range(4)
    ]
    assert marks == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=0.01)


def cheats():
    """Pictures that cheat: texture, blobs and shapes that are not of this world."""
    y, x = np.mgrid[:32, :32]
    dx, dy = x - 16, y - 16
    return {
        "black": x < 0,
        "full": x >= 0,
        "half": x < 16,
        "checkers": (x // 2 + y // 2) % 2 == 0,
        "stripes": x % 4 < 2,
        "disc of 26 pixels": dx**2 + dy**2 <= 169,
        "square of 5 pixels": np.maximum(abs(dx), abs(dy)) <= 2,
        "ring": (dx**2 + dy**2 <= 49) & (dx**2 + dy**2 >= 16),
        "diamond": abs(dx) + abs(dy) <= 7,
        "ellipse": dx**2 / 49 + dy**2 / 25 <= 1,
        "rectangle": (abs(dx) <= 7) & (abs(dy) <= 4),
        "triangle upside down": (abs(dy) <= 6) & (abs(dx) <= 0.6 * (6 - dy)),
        "x": (abs(abs(dx) - abs(dy)) <= 1) & (abs(dx) <= 6),
        "T": ((abs(dx) < 2) & (abs(dy) <= 6)) | ((abs(dy + 4) < 2) & (abs(dx) <= 6)),
    }


@pytest.mark.parametrize("name", cheats())
def test_blobs_and_strange_shapes_pass_for_nothing(name):
    picture = paint((cheats()[name], "red"))
    for shape in SHAPES:
        assert strict(picture, [{"class": shape, "count": 1, "color": "red"}]) == 0


@pytest.mark.parametrize("cell", [1, 2, 4, 8])
def test_noise_earns_nothing(truth, cell):
    scenes, _, _ = truth
    rng = torch.Generator().manual_seed(cell)
    noise = torch.rand(400, 3, 32 // cell, 32 // cell, generator=rng).repeat_interleave(cell, 2)
    marks = shapes.load()(noise.repeat_interleave(cell, 3), [include(scene) for scene in scenes[::5]])
    assert marks["strict"].sum() == 0 and marks["soft"].mean() < 0.15


def test_a_glowing_ground_and_specks_fail():
    circle = (shape_mask("circle", 16.0, 16.0, 6.0), "red")
    specks = np.zeros((32, 32))
    specks[1::4, 1::4] = specks[1::4, 2::4] = 1
    assert strict(paint(circle, ground=0.12), ONE_RED_CIRCLE) == 1
    assert strict(paint(circle, ground=0.38), ONE_RED_CIRCLE) == 0
    assert strict(paint((specks, "blue"), circle), ONE_RED_CIRCLE) == 0


def test_grey_and_white_have_no_colour():
    picture = paint((shape_mask("circle", 16.0, 16.0, 6.0), "red"))
    grey = picture.amax(1, keepdim=True).expand(-1, 3, -1, -1)
    for color in COLORS:
        assert strict(grey, [{"class": "circle", "count": 1, "color": color}]) == 0


def test_a_broken_picture_scores_nan_and_only_that_one():
    pictures = paint((shape_mask("circle", 16.0, 16.0, 6.0), "red")).repeat(3, 1, 1, 1)
    pictures[1, 0, 5, 5] = torch.nan
    marks = shapes.load()(pictures, [ONE_RED_CIRCLE] * 3)
    assert marks["strict"].isnan().tolist() == marks["soft"].isnan().tolist() == [False, True, False]
    assert marks["strict"].dtype == marks["soft"].dtype == torch.float32


def test_no_pictures_score_nothing():
    assert shapes.load()(torch.zeros(0, 3, 32, 32), [])["strict"].shape == (0,)


@pytest.mark.parametrize(
    "images, message",
    [
        (torch.zeros(1, 3, 64, 64), "[1, 3, 64, 64] given, float [N, 3, 32, 32] accepted"),
        (torch.zeros(1, 32, 32, 3), "[1, 32, 32, 3] given"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "torch.uint8 [1, 3, 32, 32] given"),
        (torch.zeros(2, 3, 32, 32), "1 clause lists given for 2 images"),
    ],
)
def test_images_of_another_size_are_refused_in_one_line(images, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        shapes.load()(images, [ONE_RED_CIRCLE])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "clauses, message",
    [
        ([], "at least one clause accepted"),
        (None, "None given, a list of at least one clause accepted"),
        ([{"class": "dog", "count": 1, "color": "red"}], "class 'dog' given"),
        ([{"class": "circle", "count": 1, "color": "pink"}], "color 'pink' given"),
        ([{"class": "circle", "count": 9, "color": "red"}], "count 9 given"),
        ([{"class": "circle", "color": "red"}], "count None given"),
        ([{"class": "number", "text": "123", "color": "red"}], "a text of one or two digits accepted"),
        ([{"class": "number", "text": 42, "color": "red"}], "a text of one or two digits accepted"),
        ([*ONE_RED_CIRCLE, ONE_RED_CIRCLE[0] | {"position": ["near", 0]}], "in the second clause accepted"),
        ([*ONE_RED_CIRCLE, ONE_RED_CIRCLE[0] | {"position": "left of"}], "in the second clause accepted"),
        ([ONE_RED_CIRCLE[0] | {"position": ["left of", 0]}, *ONE_RED_CIRCLE], "in the second clause accepted"),
    ],
)
def test_clauses_of_another_world_are_refused_in_one_line(clauses, message):
    with pytest.raises(ValueError, match=message) as refusal:
        shapes.load()(torch.zeros(1, 3, 32, 32), [clauses])
    assert "\n" not in str(refusal.value)


def test_a_picture_costs_less_than_five_milliseconds(truth):
    """About 0.4 ms on one idle core; the margin is for a busy one."""
    scenes, pictures, _ = truth
    score, clauses = shapes.load(), [include(scene) for scene in scenes[::10]]
    began = time.process_time()
    score(pictures[::10], clauses)
    assert (time.process_time() - began) / len(clauses) < 0.005
