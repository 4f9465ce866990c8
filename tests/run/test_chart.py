"""The chart: round ticks, every line named once and legibly, nothing outside of the picture."""

import re
from xml.etree import ElementTree

import pytest

from flowrl.run.chart import HEIGHT, ROW, WIDTH, Line, chart, number, ticks

SVG = "{http://www.w3.org/2000/svg}"
WORDS = {"title": "Held-out", "note": "one seed", "x_label": "rows", "y_label": "score"}


def drawn(lines):
    return ElementTree.fromstring(chart(lines, **WORDS))


def crowd(count):
    """Lines that all end within a hair of each other."""
    return [Line(f"recipe_{i:02d}", [(0, 0.5), (1e5, 0.8 + 1e-4 * i)]) for i in range(count)]


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 600_000, 6, [0, 1e5, 2e5, 3e5, 4e5, 5e5, 6e5]),
        (0.58, 0.87, 8, [0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9]),
        (-0.3, 0.4, 4, [-0.4, -0.2, 0, 0.2, 0.4]),
        (0, 1, 10, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
    ],
)
def test_ticks_are_round_and_hold_the_values(low, high, most, expected):
    assert ticks(low, high, most) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0, 0), (0.123, 0.124), (-7, -7), (0, 3e9), (1e-7, 2e-7)])
def test_ticks_of_any_range_hold_it_and_are_few(low, high):
    found = ticks(low, high, 6)
    assert 2 <= len(found) <= 7 and found[0] <= low + 1e-12 and found[-1] >= high - 1e-12


def test_numbers_are_short():
    assert [number(x) for x in (0, 0.75, 999, 1500, 600_000, 2_500_000)] == ["0", "0.75", "999", "1.5k", "600k", "2.5M"]


def test_every_line_is_named_with_its_last_value_and_the_band_surrounds_it():
    root = drawn([Line("a<b", [(0, 0.5), (10, 0.75)], [(0.5, 0.5), (0.7, 0.8)]), Line("c", [(0, 0.5), (9, 0.625)])])
    said = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a<b", "0.750", "c", "0.625", *WORDS.values()} <= set(said)
    bands = [path for path in root.iter(f"{SVG}path") if path.get("d").endswith("Z") and "opacity" in path.attrib]
    assert len(bands) == 1


@pytest.mark.parametrize("count", [1, 2, 13, 22, 40])
def test_names_keep_their_distance_and_stay_in_the_picture(count):
    """What ends at the same score is pulled apart, and pushed up again at the lower edge; a crowd makes it higher."""
    root = drawn([*crowd(count), Line("lowest", [(0, 0.5), (1e5, 0.4)])])
    rows = [float(t.get("y")) for t in root.iter(f"{SVG}text") if (t.text or "").startswith(("recipe_", "low"))]
    assert len(rows) == count + 1 and all(0 < y < float(root.get("height")) for y in rows)
    assert (float(root.get("height")) == HEIGHT) == (count < 40)
    assert all(b - a >= ROW - 1e-6 for a, b in zip(sorted(rows), sorted(rows)[1:], strict=False))


def test_nothing_is_drawn_outside_and_a_higher_score_stands_higher():
    text = chart(crowd(3), **WORDS)
    marks = [(float(u), float(v)) for u, v in re.findall(r"translate\(([\d.]+) ([\d.]+)\)", text)]
    assert all(0 <= u <= WIDTH and 0 <= v <= HEIGHT for u, v in marks)
    first, last = marks[:2]
    assert last[0] > first[0] and last[1] < first[1]


def test_a_single_flat_point_is_a_picture_and_dark_pages_have_their_own_colours():
    text = chart([Line("one", [(0, 0.5)])], **WORDS)
    assert ElementTree.fromstring(text) is not None and "nan" not in text
    assert "prefers-color-scheme: dark" in text and text.isascii()
