"""Does a 32x32 picture show the shapes or the number its prompt asks for?  Read from the pixels, without a network.

Every bright connected region is a component.  Its colour is the majority of its pixels' chromaticities; its shape
or digit is the best overlap with templates, of bounding boxes stretched to a square.  `strict` asks for exactly
the components of the clauses on a dark ground; `soft` gives partial credit, and 0.85 or more where strict is 1.
Clauses are described in `rewards.shapes_world`.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from rewards.shapes_world import COLORS, COUNTS, DIGIT_SCALE, GLYPHS, RELATIONS, SHAPES, SIZE, glyph_mask, shape_mask

BRIGHT = 0.42  # a pixel whose largest channel exceeds this belongs to an object
GROUND = 0.08  # light of the ground, about
FULL = 0.8  # share of a component's peak light at which a pixel counts as covered
GLOW = 0.30  # the ground must stay below this, except next to an object
MAX_GLOW = 12  # pixels of brighter ground that strict still accepts
MIN_AREA = 9  # pixels; smaller components are specks, which count as glow
MAX_CHROMA = 0.10  # squared distance of max-normalised RGB at which a pixel still has a colour
MIN_PURITY = 0.65  # share of a component's pixels that must agree on its colour
MIN_OVERLAP = {"shape": 0.86, "digit": 0.72}
MAX_COMPONENTS = 12  # the largest ones; a picture with more can satisfy no prompt
FIELD = 16  # templates are FIELD x FIELD
TEMPLATE_RADII = (4.2, 4.6, 5.0, 5.4, 5.8, 6.2, 6.6, 7.0, 7.4)
TEMPLATE_PLACES = (16.0, 16.5)
CLASSES = {"shape": SHAPES, "digit": tuple(GLYPHS)}


@dataclass(frozen=True)
class Wanted:
    """What a clause list asks for."""

    things: tuple[tuple[int, int], ...] = ()  # (colour index, shape index), one per object; subject first
    relation: str = ""  # of things[0] to things[1]
    text: str = ""  # digits of a number
    color: int = -1  # colour index of a number


@dataclass(frozen=True)
class Seen:
    """One component of a picture; extents and places in pixels, x to the right and y down."""

    x: float
    y: float
    width: float
    height: float
    color: list[float]  # share of the pixels nearest to each colour; the rest has no colour
    shape: list[float]  # overlap with the best template of each shape, 0..1, sizes compared too
    digit: list[float]  # the same for each digit


def load(device="cpu"):
    """Return score(images, include) -> {"strict": [N], "soft": [N]}, float32 on the CPU; it looks on `device`.

    Images are [N, 3, 32, 32] in [0, 1]; include holds one clause list per image.  A picture with a NaN or an
    infinity scores NaN: it could not be read.  ValueError for another size and for clauses of another world.
    """

    def score(images: Tensor, include: list) -> dict[str, Float[Tensor, " N"]]:
        wanted = _validated(images, include)
        seen, clean = _look(images.to(device=device, dtype=torch.float32))
        marks = [_mark(*row) for row in zip(wanted, seen, clean, strict=True)]
        table = torch.tensor(marks, dtype=torch.float32).reshape(-1, 2)
        table[~images.isfinite().flatten(1).all(1).cpu()] = torch.nan
        strict, soft = table.unbind(1)
        return {"strict": strict, "soft": soft}

    return score


def _validated(images: Tensor, include) -> list[Wanted]:
    if images.ndim != 4 or images.shape[1:] != (3, SIZE, SIZE) or not images.is_floating_point():
        raise ValueError(f"images: {images.dtype} {list(images.shape)} given, float [N, 3, {SIZE}, {SIZE}] accepted")
    if len(include) != len(images):
        raise ValueError(f"include: {len(include)} clause lists given for {len(images)} images, one each accepted")
    return [_wanted(clauses) for clauses in include]


def _wanted(clauses) -> Wanted:
    """Parse GenEval-style clauses; ValueError if they are not of this world."""
    if not isinstance(clauses, list) or not clauses or not all(isinstance(clause, dict) for clause in clauses):
        raise ValueError(f"include: {clauses!r} given, a list of at least one clause accepted")
    classes = [_word(clause, "class", (*SHAPES, "number")) for clause in clauses]
    colors = [_word(clause, "color", tuple(COLORS)) for clause in clauses]
    if "number" in classes:
        text = clauses[0].get("text")
        if len(clauses) > 1 or not isinstance(text, str) or len(text) not in DIGIT_SCALE or set(text) - set(GLYPHS):
            raise ValueError(f"include: {clauses} given, one number clause with a text of one or two digits accepted")
        return Wanted(text=text, color=list(COLORS).index(colors[0]))
    things = []
    for clause, shape, color in zip(clauses, classes, colors, strict=True):
        count = clause.get("count")
        if count not in (1, *COUNTS):
            raise ValueError(f"include: count {count!r} given in {clause}, 1 to {max(COUNTS)} accepted")
        things += [(list(COLORS).index(color), SHAPES.index(shape))] * count
    places = [clause["position"] for clause in clauses if "position" in clause]
    if not places:
        return Wanted(things=tuple(things))
    known = places[0] in [[relation, 0] for relation in RELATIONS]
    if not known or len(things) != 2 or "position" in clauses[0]:
        raise ValueError(
            f"include: {clauses} given, two objects with position [{' | '.join(RELATIONS)}, 0] "
            "in the second clause accepted"
        )
    return Wanted(things=tuple(things[::-1]), relation=places[0][0])


def _word(clause: dict, key: str, accepted: tuple[str, ...]) -> str:
    if clause.get(key) not in accepted:
        raise ValueError(f"include: {key} {clause.get(key)!r} given in {clause}, {', '.join(accepted)} accepted")
    return clause[key]


def _look(images: Float[Tensor, "N 3 H W"]) -> tuple[list[list[Seen]], list[bool]]:
    """The components of every picture, and whether the rest of the picture is dark enough."""
    n = len(images)
    light = images.amax(1)
    label = _components(light > BRIGHT)
    area = torch.zeros(n, SIZE * SIZE + 1, device=images.device)
    area.scatter_add_(1, label.flatten(1), torch.ones_like(light).flatten(1))
    area[:, 0] = 0
    order = area.topk(MAX_COMPONENTS + 1, dim=1)
    picture, rank = (order.values >= MIN_AREA).nonzero(as_tuple=True)
    masks = label[picture] == order.indices[picture, rank][:, None, None]
    large = (area.gather(1, label.flatten(1)) >= MIN_AREA).view_as(label)
    glow = ((light > GLOW) & (_spread(large.float()) == 0)).sum((1, 2))
    crowded = torch.bincount(picture, minlength=n) > MAX_COMPONENTS
    clean = ((glow <= MAX_GLOW) & ~crowded).tolist()
    seen = [[] for _ in range(n)]
    if not len(masks):
        return seen, clean
    boxes, fields = _stretch(_coverage(light[picture], masks))
    colors = torch.where(masks, _colors(images)[picture], -1)
    shares = torch.stack([(colors == c).sum((1, 2)) for c in range(len(COLORS))], 1) / masks.sum((1, 2))[:, None]
    tables = [boxes, shares, _overlap(boxes, fields, "shape"), _overlap(boxes, fields, "digit")]
    for i, box, *evidence in zip(picture.tolist(), *[table.tolist() for table in tables], strict=True):
        seen[i].append(Seen(*box, *evidence))
    return seen, clean


def _components(bright: Tensor) -> Tensor:
    """Label 8-connected regions of [N, 32, 32]: 0 outside, else the largest pixel number of the region, from 1."""
    numbers = torch.arange(1, SIZE * SIZE + 1, device=bright.device, dtype=torch.float32).view(1, SIZE, SIZE)
    label = numbers * bright
    while True:
        wider = label
        for _ in range(4):  # comparing costs more than spreading
            wider = _spread(wider) * bright
        if torch.equal(wider, label):
            return label.long()
        label = wider


def _spread(values: Tensor) -> Tensor:
    """The largest value among each pixel and its eight neighbours, [N, 32, 32]; values are not negative."""
    for axis in (1, 2):
        length = values.shape[axis]
        wide = pad(values, (1, 1) if axis == 2 else (0, 0, 1, 1))
        before, at, after = (wide.narrow(axis, start, length) for start in range(3))
        values = torch.maximum(torch.maximum(before, at), after)
    return values


def _coverage(light: Tensor, masks: Tensor) -> Tensor:
    """How much of each pixel a component covers, 0..1 [C, 32, 32]: its halved edge pixels count half."""
    full = FULL * (light * masks).amax((1, 2), keepdim=True)
    return ((light - GROUND) / (full - GROUND)).clamp(0, 1) * _spread(masks.float())


def _stretch(coverage: Tensor) -> tuple[Float[Tensor, "C 4"], Float[Tensor, "C F"]]:
    """Boxes as (centre x, centre y, width, height), finer than a pixel, and the coverage sampled over its box."""
    ticks = torch.arange(SIZE, device=coverage.device) + 0.5
    columns, rows = coverage.amax(1), coverage.amax(2)
    width, height = columns.sum(1), rows.sum(1)
    x, y = (columns @ ticks) / width, (rows @ ticks) / height
    zero, scale = torch.zeros_like(x), 1 / SIZE  # affine_grid spans the picture from -1 to 1
    theta = torch.stack([width * scale, zero, 2 * x * scale - 1, zero, height * scale, 2 * y * scale - 1], 1)
    grid = affine_grid(theta.view(-1, 2, 3), [len(coverage), 1, FIELD, FIELD], align_corners=False)
    fields = grid_sample(coverage[:, None], grid, align_corners=False)
    return torch.stack([x, y, width, height], 1), fields.flatten(1)


def _overlap(boxes: Float[Tensor, "C 4"], fields: Float[Tensor, "C F"], kind: str) -> Float[Tensor, "C K"]:
    """Tanimoto overlap (intersection over union, graded) with the best template of each class, stretched alike,
    times how well their sides agree."""
    template_boxes, templates = (table.to(fields.device) for table in _templates(kind))
    both = fields @ templates.T
    overlap = both / (fields.square().sum(1, keepdim=True) + templates.square().sum(1) - both)
    for side in (2, 3):
        length, wanted = boxes[:, side, None], template_boxes[:, side]
        overlap = overlap * torch.minimum(length, wanted) / torch.maximum(length, wanted)
    return overlap.view(len(fields), len(CLASSES[kind]), -1).amax(2)


def _colors(images: Tensor) -> Tensor:
    """Index of the colour nearest to each pixel's chromaticity, [N, 32, 32]; -1 where none is near enough."""
    names = torch.tensor(list(COLORS.values()), device=images.device)
    names = names / names.amax(1, keepdim=True)
    chroma = images / images.amax(1, keepdim=True).clamp(min=BRIGHT)
    distance = torch.stack([(chroma - name[:, None, None]).square().sum(1) for name in names])
    nearest = distance.min(0)
    return torch.where(nearest.values < MAX_CHROMA, nearest.indices, -1)


@cache
def _templates(kind: str) -> tuple[Float[Tensor, "KT 4"], Float[Tensor, "KT F"]]:
    """Boxes and fields, class by class: shapes at several sizes and subpixel places, digits at both scales."""
    if kind == "shape":
        choices = product(SHAPES, TEMPLATE_RADII, TEMPLATE_PLACES, TEMPLATE_PLACES)
        pictures = [shape_mask(shape, x, y, radius) for shape, radius, x, y in choices]
    else:
        glyphs = [glyph_mask(digit, scale) for digit in GLYPHS for scale in DIGIT_SCALE.values()]
        pictures = [np.pad(glyph, [(0, SIZE - side) for side in glyph.shape]) for glyph in glyphs]
    return _stretch((torch.from_numpy(np.stack(pictures)) / FULL).clamp(max=1))


def _mark(wanted: Wanted, seen: list[Seen], clean: bool) -> tuple[float, float]:
    """(strict, soft) of one picture."""
    if not seen:
        return 0.0, 0.0
    return (_mark_number if wanted.text else _mark_things)(wanted, seen, clean)


def _mark_number(wanted: Wanted, seen: list[Seen], clean: bool) -> tuple[float, float]:
    seen = sorted(seen, key=lambda part: part.x)
    length = max(len(seen), len(wanted.text))
    pairs = zip(seen, wanted.text, strict=False)  # what has no partner earns nothing
    hits = sum(_closeness(part.digit, int(digit), "digit") for part, digit in pairs) / length
    colored = sum(part.color[wanted.color] for part in seen) / len(seen)
    level = max(part.y for part in seen) - min(part.y for part in seen) <= 4
    exact = clean and level and [_best(part.digit, "digit") for part in seen] == [int(digit) for digit in wanted.text]
    exact = exact and all(_color(part) == wanted.color for part in seen)
    return float(exact), 0.75 * hits + 0.25 * min(1.0, colored / MIN_PURITY)


def _mark_things(wanted: Wanted, seen: list[Seen], clean: bool) -> tuple[float, float]:
    found = [(_color(part), _best(part.shape, "shape")) for part in seen]
    exact = clean and sorted(found, key=str) == sorted(wanted.things, key=str)
    credits, pairs = _match(wanted.things, seen)
    soft = sum(credits) / max(len(seen), len(wanted.things))
    if wanted.relation:
        margin = -float(SIZE)
        if len(pairs) == 2:
            margin = _margin(wanted.relation, pairs[0], pairs[1])
        exact = exact and margin > 0
        soft = 0.7 * soft + 0.3 * soft * min(1.0, max(0.0, 0.5 + margin / 4))
    return float(exact), soft


def _match(things: tuple[tuple[int, int], ...], seen: list[Seen]) -> tuple[list[float], dict[int, Seen]]:
    """Pair every wanted thing with one component, best credit first: credits, and the component of each thing."""
    table = sorted(
        ((_credit(part, *thing), i, j) for i, thing in enumerate(things) for j, part in enumerate(seen)),
        key=lambda entry: -entry[0],
    )
    credits, pairs, taken = [], {}, set()
    for credit, i, j in table:
        if i not in pairs and j not in taken:
            credits.append(credit)
            pairs[i] = seen[j]
            taken.add(j)
    return credits, pairs


def _credit(part: Seen, color: int, shape: int) -> float:
    """Half for the colour, half for the shape, each graded."""
    return 0.5 * min(1.0, part.color[color] / MIN_PURITY) + 0.5 * _closeness(part.shape, shape, "shape")


def _closeness(overlaps: list[float], wanted: int, kind: str) -> float:
    """1 if the wanted class fits well and best, falling to 0 as another fits better by 0.1 or none fits at all."""
    fit = min(1.0, max(0.0, (max(overlaps) - 0.4) / (MIN_OVERLAP[kind] - 0.4)))
    return fit * max(0.0, 1 - (max(overlaps) - overlaps[wanted]) / 0.1)


def _margin(relation: str, subject: Seen, landmark: Seen) -> float:
    """Pixels by which the subject lies on the named side rather than on another; negative if it does not."""
    dx, dy = subject.x - landmark.x, subject.y - landmark.y
    along, across = (dx, dy) if relation in ("left of", "right of") else (dy, dx)
    sign = -1 if relation in ("left of", "above") else 1
    return sign * along - abs(across)


def _color(part: Seen) -> int | None:
    best = max(part.color)
    return part.color.index(best) if best >= MIN_PURITY else None


def _best(overlaps: list[float], kind: str) -> int | None:
    """Index of the class, or None where no template fits."""
    return overlaps.index(max(overlaps)) if max(overlaps) >= MIN_OVERLAP[kind] else None
