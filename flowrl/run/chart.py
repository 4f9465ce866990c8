"""Lines with bands as the text of an SVG: data in, text out.  Legible on white and on dark pages alike."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

Number = int | float
WIDTH, HEIGHT = 860, 500
LEFT, RIGHT, TOP, BELOW = 72, 620, 64, 60  # of the plot, BELOW from the lower end; names stand to its right
ROW = 17  # between two names
LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#4a3aa7", "#e34948", "#eda100", "#008300", "#e87ba4")
DARK = ("#3987e5", "#d95926", "#199e70", "#9085e9", "#e66767", "#c98500", "#4caf50", "#d55181")
MARKS = ("M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-4,-4h8v8h-8z", "M0,-5l5,9h-10z", "M0,-5l5,5l-5,5l-5,-5z")
INK = {"page": ("#ffffff", "#16191d"), "ink": ("#1f2328", "#e6e8ea"), "faint": ("#656d76", "#9aa4af")}
INK |= {"grid": ("#e3e6ea", "#2d333b")}


@dataclass(frozen=True)
class Line:
    """One series; `band` holds the lowest and highest value at each point, or nothing."""

    name: str
    points: Sequence[tuple[Number, Number]]
    band: Sequence[tuple[Number, Number]] = ()


def chart(lines: Sequence[Line], *, title: str, note: str, x_label: str, y_label: str) -> str:
    """The SVG; every line is named at its end with its last value, so that colour alone decides nothing."""
    values = [y for line in lines for y in (*(y for _, y in line.points), *(y for pair in line.band for y in pair))]
    xs, ys = ticks(0.0, max(x for line in lines for x, _ in line.points), 7), ticks(min(values), max(values), 8)
    height = max(HEIGHT, TOP + ROW * len(lines))  # all names find room
    bottom = height - BELOW

    def place(x, y):
        across, up = (x - xs[0]) / (xs[-1] - xs[0]), (y - ys[0]) / (ys[-1] - ys[0])
        return LEFT + across * (RIGHT - LEFT), bottom - up * (bottom - TOP)

    series = {f"s{i}": pair for i, pair in enumerate(zip(LIGHT, DARK, strict=True))}
    body = [*page(WIDTH, height, title, series)]
    body += [text(LEFT, 28, title, "ink", size=16, weight=600), text(LEFT, 48, note, "faint")]
    body += _axes(xs, ys, place, bottom, x_label, y_label)
    body += [part for i, line in enumerate(lines) for part in _band(i, line, place)]
    body += [part for i, line in enumerate(lines) for part in _line(i, line, place)]
    return "\n".join([*body, *_names(lines, place, height - 8), "</svg>", ""])


def ticks(low: Number, high: Number, most: int) -> list[float]:
    """At most `most` + 1 round numbers at even distances that hold low and high between them."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(span / most))
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if _steps(low, high, m * power) <= most)
    first, count = floor(low / step + 1e-9), max(_steps(low, high, step), 1)
    return [round((first + i) * step, 12) for i in range(count + 1)]


def _steps(low, high, step):
    return ceil(high / step - 1e-9) - floor(low / step + 1e-9)


def number(x: Number) -> str:
    """Thousands and millions shortened: 600k, 1.5M; others as they are."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:g}{unit}"
    return f"{x:g}"


def page(width: Number, height: Number, title: str, colours: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """The beginning of an SVG: its size, its colours and the empty page.

    colours: class -> (on light pages, on dark ones); CLASS fills and CLASS-line strokes
    """

    def rules(mode):
        pairs = {name: both[mode] for name, both in (INK | colours).items()}
        return "".join(f".{name}{{fill:{c}}}.{name}-line{{stroke:{c}}}" for name, c in pairs.items())

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, -apple-system, Segoe UI, DejaVu Sans, '
        'sans-serif" font-size="13">'
    )
    yield f"<style>{rules(0)}\n@media (prefers-color-scheme: dark){{{rules(1)}}}</style>"
    yield f'<rect class="page" width="{width}" height="{height}" rx="8"/>'


def text(
    x: Number,
    y: Number,
    said: str,
    ink: str,
    *,
    anchor: str = "start",
    size: Number = 13,
    weight: int = 400,
    turn: str = "",
) -> str:
    """Words at a place; y is that of their base line."""
    more = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text class="{ink}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" '
        f'font-weight="{weight}"{more}>{escape(said)}</text>'
    )


def _axes(xs, ys, place, bottom, x_label, y_label):
    for y in ys:
        _, v = place(xs[0], y)
        yield f'<path class="grid-line" d="M{LEFT},{v:.1f}H{RIGHT}"/>'
        yield text(LEFT - 8, v + 4, number(y), "faint", anchor="end")
    for x in xs:
        u, _ = place(x, ys[0])
        yield f'<path class="faint-line" d="M{u:.1f},{bottom}v5"/>'
        yield text(u, bottom + 20, number(x), "faint", anchor="middle")
    yield f'<path class="faint-line" d="M{LEFT},{bottom}H{RIGHT}"/>'
    yield text((LEFT + RIGHT) / 2, bottom + 44, x_label, "ink", anchor="middle")
    yield text(20, (TOP + bottom) / 2, y_label, "ink", anchor="middle", turn="-90")


def _path(points):
    return "M" + "L".join(f"{u:.1f},{v:.1f}" for u, v in points)


def _band(i, line, place):
    if line.band:
        low, high = ([place(x, b[k]) for (x, _), b in zip(line.points, line.band, strict=True)] for k in (0, 1))
        yield f'<path class="s{i % len(LIGHT)}" opacity="0.13" d="{_path([*high, *reversed(low)])}Z"/>'


def _line(i, line, place):
    colour, placed = i % len(LIGHT), [place(*point) for point in line.points]
    yield f'<path class="s{colour}-line" fill="none" stroke-width="2" stroke-linejoin="round" d="{_path(placed)}"/>'
    yield from (_mark(i, *point) for point in placed)


def _mark(i, u, v):
    shape, colour = MARKS[i // len(LIGHT) % len(MARKS)], i % len(LIGHT)
    return f'<path class="s{colour} page-line" stroke-width="1" transform="translate({u:.1f} {v:.1f})" d="{shape}"/>'


def _names(lines, place, lowest):
    """The legend: every name beside the end of its line, moved apart where two would overlap."""
    ends = sorted((place(*line.points[-1]), i, line) for i, line in enumerate(lines))
    ends.sort(key=lambda end: end[0][1])
    rows = []
    for (_, v), *_ in ends:
        rows.append(max(v, rows[-1] + ROW) if rows else max(v, TOP))
    for k in reversed(range(len(rows))):  # what was pushed below the picture comes up again
        rows[k] = min(rows[k], lowest - ROW * (len(rows) - 1 - k))
    for row, ((u, v), i, line) in zip(rows, ends, strict=True):
        yield f'<path class="faint-line" opacity="0.5" fill="none" d="M{u + 6:.1f},{v:.1f}L{RIGHT + 14},{row:.1f}"/>'
        yield _mark(i, RIGHT + 22, row)
        yield text(RIGHT + 32, row + 4, line.name, "ink")
        yield text(WIDTH - 20, row + 4, f"{line.points[-1][1]:.3f}", "faint", anchor="end")
