"""One prompt's tree as the text of an SVG: data in, text out.

Steps go from the noise on the left to the pictures on the right. A drawn edge has the colour of its advantage, and is
dashed where that is below 0, so that grey prints tell it too; it is the wider the more leaves lie below it.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil
from statistics import mean

from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.run.chart import Number, number, page, text
from rewards.media import png_bytes
from samplers import RolloutTree

MOST = 128  # leaves that can be told apart
WIDTH, LEFT, RIGHT, TOP, FOOT = 860, 76, 724, 98, 136
LEVELS = 4  # of a colour
ABOVE = (("#e9a063", "#9a6b47"), ("#d87a26", "#c57e42"), ("#b35306", "#ef9a52"), ("#853b00", "#ffc999"))
BELOW = (("#86b2e6", "#527cae"), ("#4d8ad2", "#5594dc"), ("#2462b5", "#74b2f6"), ("#123f7c", "#a9d2ff"))
COLOURS = {f"above{i}": pair for i, pair in enumerate(ABOVE, 1)} | {
    f"below{i}": pair for i, pair in enumerate(BELOW, 1)
}
COLOURS |= {"even": ("#b3b9c0", "#626a73")}
SCALE = [f"below{i}" for i in range(LEVELS, 0, -1)] + ["even"] + [f"above{i}" for i in range(1, LEVELS + 1)]
SIDE = 44  # of a picture as it is drawn, at most, with its margin
PIXELS = 96  # of a stored picture at most, each way


@dataclass(frozen=True)
class Grown:
    """What came of one prompt."""

    tree: RolloutTree
    advantage: Float[Tensor, "N T"]  # of the edge that leaf n took at step t
    trained: Bool[Tensor, "N T"]
    reward: Float[Tensor, " N"]  # nan where it could not be scored
    pictures: Float[Tensor, "M 3 H W"]  # of the leaves that are finished


@dataclass(frozen=True)
class Edge:
    """A transition as it is drawn; heights are pixels."""

    step: int
    step_next: int
    start: Number
    end: Number
    leaves: int  # finished ones below it
    advantage: Number | None  # mean over those below it that could be scored; None where the edge is determined
    trained: bool

    @property
    def drawn(self) -> bool:
        return self.advantage is not None


def picture(grown: Grown, *, title: str, prompt: str, note: str) -> str:
    """The SVG of a tree with at most MOST leaves."""
    heights, row = rows(grown.tree)
    found, steps = edges(grown, heights), len(grown.tree.sigmas) - 1
    largest = max((abs(e.advantage) for e in found if e.drawn), default=0.0)
    bottom, side = max(heights) + row / 2, min(row, SIDE)

    def across(step):
        return LEFT + (RIGHT - LEFT) * step / steps

    body = [*page(WIDTH, round(bottom) + FOOT, f"{title}: {prompt}", COLOURS)]
    body += [text(LEFT, 28, title, "ink", size=16, weight=600), text(LEFT, 50, f'"{_short(prompt)}"', "ink")]
    body += [text(LEFT, 70, _short(note), "faint"), text(RIGHT + 18 + side, TOP - 6, "reward", "faint", size=11)]
    body += _axis(found, steps, across, bottom)
    order = sorted(found, key=lambda e: abs(e.advantage) if e.drawn else -1)  # what stands out lies on top
    finished = grown.tree.finished.nonzero()[:, 0].tolist()
    body += [_line(edge, across, largest, len(finished)) for edge in order]
    for n, shown in zip(finished, grown.pictures, strict=True):
        body += _leaf(shown, float(grown.reward[n]), heights[n], side)
    return "\n".join([*body, *_legend(found, largest, bottom + 100), "</svg>", ""])


def rows(tree: RolloutTree) -> tuple[list[Number], Number]:
    """(height of each leaf, room for one); the leaves of two noises or two groups stand apart.

    A candidate that was not gone on from has no row of its own: those of a step fan out around the path that went on.
    """
    done = tree.finished
    families = list(zip(tree.root[done].tolist(), tree.group[done].tolist(), strict=True))
    some = 1 < len(set(families)) < len(families)
    places = [0.5]
    for before, after in pairwise(families):
        places.append(places[-1] + (1.5 if some and before != after else 1))
    row = min(max(720 / places[-1], 14), SIDE if bool(done.all()) else 2 * SIDE)
    heights = iter(TOP + place * row for place in places)
    own = [next(heights) if ended else None for ended in done.tolist()]
    path = {root: y for root, y in zip(tree.root.tolist(), own, strict=True) if y is not None}
    behind, seen = _left_behind(tree), Counter()
    left = Counter(key for _, key in behind)
    for n, key in behind:
        seen[key] += 1
        share = seen[key] / (left[key] + 1) - 0.5  # above and below, none of them on the path
        own[n] = path[key[0]] + (share + 0.1 * (1 if share >= 0 else -1)) * 0.7 * row
    return own, row


def _left_behind(tree) -> list[tuple[int, tuple[int, int]]]:
    """(leaf, (root, last edge's step)) of every candidate that was not gone on from."""
    steps = tree.step[tree.edge.max(1).values].tolist()
    ended = (~tree.finished).nonzero()[:, 0].tolist()
    return [(n, (int(tree.root[n]), steps[n])) for n in ended]


def edges(grown: Grown, heights: Sequence[Number]) -> list[Edge]:
    """The transitions on the paths of the leaves, each once; one ends in the middle of the leaves below it."""
    tree, below, before = grown.tree, {}, {}
    roots, of_leaf = tree.root.tolist(), [[e for e in path if e >= 0] for path in tree.edge.tolist()]
    for n, path in enumerate(of_leaf):
        for last, edge in zip([None, *path], path, strict=False):
            below.setdefault(edge, []).append(n)
            before[edge] = last
    done = tree.finished.tolist()
    finished = {edge: [n for n in leaves if done[n]] for edge, leaves in below.items()}
    whole = list(zip(heights, roots, done, strict=True))
    root = {r: mean(y for y, own, ended in whole if own == r and ended) for r in set(roots)}
    end = {edge: mean(heights[n] for n in finished[edge] or leaves) for edge, leaves in below.items()}
    found = []
    for edge, leaves in below.items():
        step, start = int(tree.step[edge]), root[roots[leaves[0]]] if before[edge] is None else end[before[edge]]
        told = [n for n in leaves if not grown.reward[n].isnan()] or leaves
        gain = float(grown.advantage[told, step].mean()) if tree.noisy[edge] else None
        trained = bool(grown.trained[leaves, step].any())
        found.append(Edge(step, int(tree.step_next[edge]), start, end[edge], len(finished[edge]), gain, trained))
    return found


def colour(advantage: Number, largest: Number) -> str:
    """The class of an advantage: even at 0, below1..4 or above1..4 by quarters of the largest."""
    level = ceil(LEVELS * abs(advantage) / largest - 1e-3) if largest else 0
    return f"{'above' if advantage > 0 else 'below'}{min(level, LEVELS)}" if level else "even"


def _line(edge, across, largest, leaves):
    kind = colour(edge.advantage, largest) if edge.drawn else "even"
    width = (2.2 + 5 * (max(edge.leaves - 1, 0) / max(leaves - 1, 1)) ** 0.5) * (1 if edge.drawn else 0.4)
    told = f"step {edge.step}, leaves below {edge.leaves}, "
    told += f"advantage {edge.advantage:+.3f}{'' if edge.trained else ', not trained'}" if edge.drawn else "no noise"
    x, end = across(edge.step), across(edge.step_next)
    middle = (x + end) / 2
    path = (
        f"M{x:.1f},{edge.start:.1f}C{middle:.1f},{edge.start:.1f},{middle:.1f},{edge.end:.1f},{end:.1f},{edge.end:.1f}"
    )
    return _stroke(path, kind, width, pale=edge.drawn and not edge.trained, told=told)


def _stroke(path, kind, width, *, pale=False, told=""):
    more = ' stroke-dasharray="5 2.5"' if kind.startswith("below") else ""
    more += ' opacity="0.35"' if pale else ""
    end = f"><title>{escape(told)}</title></path>" if told else "/>"
    return f'<path class="{kind}-line" fill="none" stroke-width="{width:.1f}"{more} d="{path}"{end}'


def _leaf(shown, reward, y, room):
    side = room - 3
    data = b64encode(png_bytes(shown, PIXELS)).decode()
    sharp = ' style="image-rendering:pixelated"' if max(shown.shape[1:]) < PIXELS else ""
    place = f'x="{RIGHT + 12}" y="{y - side / 2:.1f}" width="{side:.1f}" height="{side:.1f}"'
    yield f'<image {place}{sharp} href="data:image/png;base64,{data}"/>'
    yield f'<rect class="faint-line" fill="none" stroke-width="0.5" {place}/>'
    size = min(13, side)
    yield text(RIGHT + 18 + room, y + size / 3, "-" if reward != reward else f"{reward:.3f}", "ink", size=size)


def _axis(found, steps, across, bottom) -> Iterator[str]:
    """The steps, which of them draw noise, and which are trained."""
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if steps / n <= 25)
    for step in range(0, steps + 1, every):
        yield f'<path class="grid-line" d="M{across(step):.1f},{TOP}V{bottom:.1f}"/>'
    drawn = [edge for edge in found if edge.drawn]
    for y, word, marked in ((12, "drawn", drawn), (26, "trained", [e for e in drawn if e.trained])) if drawn else ():
        yield text(LEFT - 10, bottom + y + 4, word, "faint", anchor="end", size=11)
        for step in sorted({edge.step for edge in marked}):
            bar = f"M{across(step) + 1:.1f},{bottom + y:.1f}H{across(step + 1) - 1:.1f}"
            yield f'<path class="faint-line" stroke-width="6" d="{bar}"/>'
    for step in range(0, steps, every):
        yield text(across(step + 0.5), bottom + 48, number(step), "faint", anchor="middle", size=11)
    yield text(LEFT - 10, bottom + 48, "step", "faint", anchor="end", size=11)
    yield text(LEFT, bottom + 68, "noise", "faint", size=11)
    yield text(RIGHT, bottom + 68, "picture", "faint", anchor="end", size=11)


def _legend(found, largest, y) -> Iterator[str]:
    if not any(edge.drawn for edge in found):
        yield text(LEFT, y, "No step draws noise: what is trained is the finished picture, noised again.", "faint")
        return
    yield text(LEFT, y, "advantage", "faint")
    for i, kind in enumerate(SCALE):
        yield _stroke(f"M{LEFT + 80 + 26 * i},{y - 4:.1f}h24", kind, 6)
    ends = ((0, f"{-largest:+.2f}"), (2 * LEVELS, f"{largest:+.2f}")) if largest else ()
    for i, said in (*ends, (LEVELS, "0")):
        yield text(LEFT + 92 + 26 * i, y + 16, said, "faint", anchor="middle", size=11)
    yield _stroke(f"M{LEFT + 360},{y - 4:.1f}h24", "even", 1)
    yield text(LEFT + 392, y, "no noise drawn", "faint")
    yield _stroke(f"M{LEFT + 360},{y + 14:.1f}h24", "even", 6, pale=True)
    yield text(LEFT + 392, y + 18, "drawn, not trained", "faint")
    yield text(LEFT + 540, y, "wider: more leaves below", "faint")


def _short(words):
    return words if len(words) <= 100 else f"{words[:97]}..."
