"""The picture of a tree: every transition once and at its place, nothing said by colour alone, no words on others."""

import base64
import io
import re
from itertools import pairwise
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from flowrl.run import tree_chart
from flowrl.run.tree_chart import Grown, colour, edges, picture, rows
from samplers import kernels, rollout

SVG = "{http://www.w3.org/2000/svg}"


def grown(roots, steps, noisy=(), forks=None, *, apart=False, side=4, advantage=None, trained=True):
    """A tree whose leaf n has the reward and, at every step, the advantage n unless said otherwise."""
    tree = rollout(
        lambda latents, sigma, prompt: torch.zeros_like(latents),
        torch.zeros(roots, 2),
        torch.zeros(roots, dtype=torch.long),
        torch.linspace(1, 0, steps + 1),
        kernels.dance_sde,
        noisy=noisy,
        forks=forks,
        apart=apart,
        generators=[torch.Generator().manual_seed(i) for i in range(roots)],
    )
    leaves = torch.arange(len(tree.final), dtype=torch.float32)
    gain = leaves[:, None].expand(-1, steps) if advantage is None else torch.full((len(leaves), steps), advantage)
    mask = torch.full((len(leaves), steps), trained)
    pictures = torch.linspace(0, 1, len(leaves))[:, None, None, None].expand(-1, 3, side, side)
    return Grown(tree, gain, mask, leaves, pictures)


def svg(*given, **more):
    text = picture(grown(*given, **more), title="A method (key)", prompt="a <red> circle", note="counts")
    root = ElementTree.fromstring(text)
    lines = [line for line in root.iter(f"{SVG}path") if line.find(f"{SVG}title") is not None]
    return SimpleNamespace(text=text, root=root, lines=lines, words=list(root.iter(f"{SVG}text")))


def test_an_edge_ends_in_the_middle_of_its_leaves_and_begins_where_the_one_before_ended():
    """Two forks into two on three steps: four leaves at 0, 1, 2, 3, so that the states of the first level are at
    0.5 and 2.5 and the root is at 1.5."""
    found = edges(grown(1, 3, [0, 1], {0: 2, 1: 2}), [0.0, 1.0, 2.0, 3.0])
    assert [(e.step, e.start, e.end, e.leaves) for e in sorted(found, key=lambda e: (e.step, e.end))] == [
        (0, 1.5, 0.5, 2),
        (0, 1.5, 2.5, 2),
        (1, 0.5, 0, 1),
        (1, 0.5, 1, 1),
        (1, 2.5, 2, 1),
        (1, 2.5, 3, 1),
        *((2, n, n, 1) for n in range(4)),
    ]
    gains = {(e.step, e.end): e.advantage for e in found}
    assert (gains[0, 0.5], gains[0, 2.5], gains[1, 3.0], gains[2, 3.0]) == (0.5, 2.5, 3.0, None)


def test_every_transition_of_branch_grpo_is_drawn_once():
    """218 of them, 202 drawn by noise: the 16 of the last step are not."""
    drawn = svg(1, 20, range(19), {0: 2, 3: 2, 6: 2, 9: 2})
    said = [line.find(f"{SVG}title").text for line in drawn.lines]
    assert len(said) == 218 and sum("advantage" in one for one in said) == 202
    assert sum(one.startswith("step 0, leaves below 8") for one in said) == 2


def test_a_jump_spans_its_steps_and_stands_apart_from_the_path():
    """Steps 0 and 2 draw, each by itself, into two; the second jump ends at step 4 of 6."""
    found = edges(grown(1, 6, {0: 1, 2: 2}, {0: 2, 2: 2}, apart=True), [0.0, 1.0, 2.0, 3.0])
    jumps = [e for e in found if e.step == 2 and e.advantage is not None]
    assert [(e.step_next, e.end) for e in jumps] == [(4, 2.0), (4, 3.0)]
    path = next(e for e in found if e.step == 1 and e.leaves == 2)
    assert path.advantage is None and {e.start for e in jumps} == {path.end} == {2.5}


def test_the_leaves_of_two_noises_stand_apart_and_those_of_straight_rollouts_do_not():
    heights, row = rows(grown(2, 3, [0], {0: 2}).tree)
    assert [(b - a) / row for a, b in pairwise(heights)] == pytest.approx([1, 1.5, 1])
    heights, row = rows(grown(4, 3, [0]).tree)
    assert [(b - a) / row for a, b in pairwise(heights)] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("advantage", "kind"),
    [(0, "even"), (1e-5, "even"), (0.4, "above1"), (0.6, "above2"), (2, "above4"), (-0.4, "below1"), (-2, "below4")],
)
def test_a_colour_is_a_quarter_of_the_largest_advantage(advantage, kind):
    assert colour(advantage, 2.0) == kind


def test_nothing_earned_is_grey_everywhere():
    assert colour(0.0, 0.0) == "even"
    lines = svg(1, 3, [0], {0: 3}, advantage=0.0).lines
    assert {line.get("class") for line in lines} == {"even-line"}


def test_the_sign_of_an_advantage_is_told_without_colour_and_what_is_not_trained_is_pale():
    for advantage, dashed in ((1.0, False), (-1.0, True)):
        drawn = [x for x in svg(1, 3, [0], {0: 3}, advantage=advantage).lines if "advantage" in x[0].text]
        assert len(drawn) == 3 and all(("stroke-dasharray" in line.attrib) == dashed for line in drawn)
        assert not any("opacity" in line.attrib for line in drawn)
    untrained = svg(1, 3, [0], {0: 3}, trained=False).lines
    assert [("opacity" in x.attrib) for x in untrained] == ["not trained" in x[0].text for x in untrained]
    assert sum("opacity" in x.attrib for x in untrained) == 3


def test_a_grey_print_keeps_the_order_of_advantages():
    """The darker the larger on light pages, the lighter on dark ones."""
    for mode, sign in ((0, -1), (1, 1)):
        for kind in ("above", "below"):
            names = ["even", *(f"{kind}{i}" for i in range(1, 5))]
            light = [sign * luminance(tree_chart.COLOURS[name][mode]) for name in names]
            assert light == sorted(light) and min(b - a for a, b in pairwise(light)) > 0.02


def luminance(colour):
    return sum(w * int(colour[i : i + 2], 16) / 255 for w, i in ((0.299, 1), (0.587, 3), (0.114, 5)))


def test_an_edge_is_wider_the_more_leaves_lie_below_and_thinner_where_nothing_is_drawn():
    lines = svg(1, 20, range(19), {0: 2, 3: 2, 6: 2, 9: 2}).lines
    width = {line[0].text.split(",")[1]: float(line.get("stroke-width")) for line in lines if "advan" in line[0].text}
    by_leaves = [width[f" leaves below {n}"] for n in (1, 2, 4, 8)]
    assert by_leaves == sorted(by_leaves) and len(set(by_leaves)) == 4
    assert max(float(x.get("stroke-width")) for x in lines if "no noise" in x[0].text) < by_leaves[0] / 2


@pytest.mark.parametrize("leaves", [2, 9, 16, 27, 96, tree_chart.MOST])
@pytest.mark.parametrize("steps", [3, 25, 50])
def test_no_word_lies_on_another_or_outside(leaves, steps):
    """A letter is at most .62 of its size wide, which no font of the list exceeds on average."""
    drawn = svg(1, steps, [0], {0: leaves})
    boxes = []
    for word in drawn.words:
        size, x, y = (float(word.get(name)) for name in ("font-size", "x", "y"))
        width = 0.62 * size * len(word.text)
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[word.get("text-anchor")]
        boxes.append((left, left + width, y - 0.78 * size, y + 0.22 * size, word.text))
    width, height = (float(drawn.root.get(name)) for name in ("width", "height"))
    assert all(a >= 0 and b <= width and c >= 0 and d <= height for a, b, c, d, _ in boxes)
    for i, (a, b, c, d, word) in enumerate(boxes):
        for e, f, g, h, other in boxes[i + 1 :]:
            assert b <= e or f <= a or d <= g or h <= c, (word, other)


def test_pictures_are_embedded_as_they_are_and_large_ones_shrunk():
    images = list(svg(1, 3, [0], {0: 3}, side=8).root.iter(f"{SVG}image"))
    assert [embedded(image).getpixel((7, 7)) for image in images] == [(0, 0, 0), (128, 128, 128), (255, 255, 255)]
    assert all(embedded(image).size == (8, 8) and "pixelated" in image.get("style") for image in images)
    large = next(svg(1, 3, [0], {0: 3}, side=300).root.iter(f"{SVG}image"))
    assert embedded(large).size == (tree_chart.PIXELS, tree_chart.PIXELS) and large.get("style") is None


def embedded(image):
    head, _, data = image.get("href").partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_picture_is_one_file_that_says_whose_tree_it_is():
    drawn = svg(1, 3, [0], {0: 3})
    said = [word.text for word in drawn.words]
    assert {"A method (key)", '"a <red> circle"', "counts", "reward", "0.000", "1.000", "2.000"} <= set(said)
    assert {"-2.00", "0", "+2.00", "noise", "picture"} <= set(said)
    assert not re.search(r'(href|src)="(?!data:)', drawn.text) and "prefers-color-scheme: dark" in drawn.text


def test_a_failed_score_is_a_dash():
    one = grown(1, 3, [0], {0: 3})
    failed = Grown(one.tree, one.advantage, one.trained, torch.tensor([0.5, torch.nan, -2.0]), one.pictures)
    said = [
        word.text for word in ElementTree.fromstring(picture(failed, title="", prompt="", note="")).iter(f"{SVG}text")
    ]
    assert {"0.500", "-", "-2.000"} <= set(said) and "nan" not in said


def test_a_leaf_that_could_not_be_scored_takes_nothing_from_the_edges_that_it_shares():
    """Two leaves below one step: it has the advantage 4 of the one that has a score."""
    one = grown(1, 3, [0, 1], {1: 2})
    gain = torch.tensor([[4.0], [0.0]]).expand(2, 3)
    found = edges(Grown(one.tree, gain, one.trained, torch.tensor([1.0, torch.nan]), one.pictures), [0.0, 1.0])
    assert [e.advantage for e in sorted(found, key=lambda e: (e.step, e.end))] == [4, 4, 0, None, None]


def test_a_rollout_without_noise_is_grey_and_says_so():
    drawn = svg(3, 4)
    assert len(drawn.lines) == 12 and {line.get("class") for line in drawn.lines} == {"even-line"}
    said = [word.text for word in drawn.words]
    assert any(one.startswith("No step draws noise") for one in said) and "drawn" not in said


def test_candidates_fan_out_around_the_path_that_went_on_and_have_no_picture():
    """Three of a state at two of three steps, two noises: a row for each noise alone."""
    tree = rollout(
        lambda latents, sigma, prompt: torch.zeros_like(latents),
        torch.zeros(2, 2),
        torch.zeros(2, dtype=torch.long),
        torch.linspace(1, 0, 4),
        kernels.dance_sde,
        noisy=[0, 1],
        forks={0: 3, 1: 3},
        candidates=True,
        generators=[torch.Generator().manual_seed(i) for i in range(2)],
    )
    gain = torch.zeros(len(tree.final), 3)
    drawn = Grown(tree, gain, gain > -1, gain[:, 0], torch.zeros(2, 3, 4, 4))
    heights, room = rows(tree)
    found = edges(drawn, heights)
    own = [y for y, done in zip(heights, tree.finished.tolist(), strict=True) if done]
    assert len(own) == 2 and own[1] - own[0] == room
    for step in (0, 1):
        starts, ends = zip(*((e.start, e.end) for e in found if e.step == step), strict=True)
        assert sorted(set(starts)) == own and len(set(ends)) == 6 and set(own) < set(ends)
        assert all(min(abs(end - y) for y in own) < room / 2 for end in ends)
    assert picture(drawn, title="t", prompt="p", note="n").count("<image") == 2
