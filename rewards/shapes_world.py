"""A little world of coloured shapes and numbers: its scenes, their prompts and metadata, and their 32x32 pictures.

A `Scene` is what one prompt asks for.  `prompt` and `include` say it in words and in GenEval-style clauses,
`render` draws it, `split` tells whether it is held out.  Five kinds of scene (`KINDS`), six colours, four shapes.

Clauses of `include`: {"class": shape, "count": n, "color": name}; in a position scene the second clause carries
"position": [relation, 0], the relation of *this* clause's object to the object of clause 0, as in GenEval
("A left of B" -> [B, A with ["left of", 0]]); a number is {"class": "number", "text": digits, "color": name}.
"""

import itertools
import zlib
from dataclasses import dataclass

import numpy as np

SIZE = 32  # pixels, both ways
COLORS = {
    "red": (0.86, 0.16, 0.16),
    "green": (0.16, 0.68, 0.24),
    "blue": (0.20, 0.32, 0.92),
    "yellow": (0.95, 0.84, 0.16),
    "purple": (0.62, 0.20, 0.76),
    "orange": (0.96, 0.52, 0.10),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
COUNTS = {2: "two", 3: "three", 4: "four"}
RELATIONS = ("left of", "right of", "above", "below")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
KINDS = ("one_object", "count", "two_objects", "position", "number")

RADIUS = {1: (5.0, 7.5), 2: (4.8, 6.3), 3: (4.4, 5.3), 4: (4.2, 4.9)}  # pixels, by number of objects
GAP = 1.8  # pixels between the bounding boxes of two objects
DIGIT_SCALE = {1: 3, 2: 2}  # pixels per dot of a 5x7 glyph, by number of digits
DIGIT_GAP = 3  # pixels between two digits
DIGIT_JITTER = 1  # pixels by which a number may be off the middle
PAIRED_DIGITS = "1247"  # two-digit numbers use these, the easiest to tell apart
SUBPIXELS = 3  # samples per pixel and axis
TEST_SHARE = 5  # one scene in five is held out

GLYPHS = {  # 5x7 dots, row by row
    "0": "01110 10001 10001 10001 10001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}

Thing = tuple[str, str]  # (colour, shape)


@dataclass(frozen=True)
class Scene:
    """What a prompt asks for, in the prompt's order."""

    kind: str
    color: str = ""  # of the number; "" for other kinds
    text: str = ""  # digits of the number; "" for other kinds
    things: tuple[Thing, ...] = ()  # objects; `count` repeats one thing
    relation: str = ""  # of things[0] to things[1]; "" unless kind is "position"


def all_scenes() -> dict[str, list[Scene]]:
    """Every scene of every kind; the two orders of a pair are two scenes with two prompts."""
    things = list(itertools.product(COLORS, SHAPES))
    texts = [*GLYPHS, *map("".join, itertools.product(PAIRED_DIGITS, repeat=2))]
    pairs = list(itertools.permutations(things, 2))
    return {
        "one_object": [Scene("one_object", things=(thing,)) for thing in things],
        "count": [Scene("count", things=(thing,) * n) for thing in things for n in COUNTS],
        "two_objects": [Scene("two_objects", things=pair) for pair in pairs],
        "position": [Scene("position", things=pair, relation=r) for pair in pairs for r in RELATIONS],
        "number": [Scene("number", color=color, text=text) for color in COLORS for text in texts],
    }


def canonical(scene: Scene) -> str:
    """One string for all wordings of one scene: pairs unordered, "B right of A" written as "A left of B"."""
    things, relation = scene.things, scene.relation
    if relation in ("right of", "below"):
        things, relation = things[::-1], OPPOSITE[relation]
    if scene.kind == "two_objects":
        things = tuple(sorted(things))
    words = [" ".join(thing) for thing in things]
    return "|".join([scene.kind, scene.color, scene.text, relation, *words])


def split(scene: Scene) -> str:
    """ "test" for one scene in five, else "train": a function of the canonical scene alone."""
    return "test" if zlib.crc32(canonical(scene).encode()) % TEST_SHARE == 0 else "train"


def prompt(scene: Scene) -> str:
    """The scene in words."""
    if scene.kind == "number":
        return f"the number {scene.text} in {scene.color}"
    if scene.kind == "count":
        color, shape = scene.things[0]
        return f"{COUNTS[len(scene.things)]} {color} {PLURALS[shape]}"
    joint = f" {scene.relation or 'and'} "
    return joint.join(f"{'an' if color[0] in 'aeiou' else 'a'} {color} {shape}" for color, shape in scene.things)


def include(scene: Scene) -> list[dict]:
    """The scene as GenEval-style clauses."""
    if scene.kind == "number":
        return [{"class": "number", "text": scene.text, "color": scene.color}]
    if scene.kind == "count":
        return [_clause(scene.things[0], count=len(scene.things))]
    if scene.kind == "position":
        subject, landmark = scene.things
        return [_clause(landmark), _clause(subject) | {"position": [scene.relation, 0]}]
    return [_clause(thing) for thing in scene.things]


def metadata(scene: Scene) -> dict:
    """One line of train.jsonl or test.jsonl."""
    return {"prompt": prompt(scene), "tag": scene.kind, "include": include(scene)}


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Draw a scene: float32 [32, 32, 3] in [0, 1], bright on an almost black ground; `rng` places and tints."""
    picture = np.full((SIZE, SIZE, 3), rng.uniform(0.02, 0.14), np.float32)
    if scene.kind == "number":
        return _paint(picture, _number_mask(scene.text, rng), scene.color, rng)
    centers, radii = _layout(scene, rng)
    for (color, shape), (x, y), radius in zip(scene.things, centers, radii, strict=True):
        picture = _paint(picture, shape_mask(shape, x, y, radius), color, rng)
    return picture


def shape_mask(shape: str, x: float, y: float, radius: float) -> np.ndarray:
    """Coverage in [0, 1] of each pixel, [32, 32]; the centre (x, y) and the radius are in pixels, y points down."""
    ticks = (np.arange(SIZE * SUBPIXELS) + 0.5) / SUBPIXELS
    dx, dy = ticks[None, :] - x, ticks[:, None] - y
    if shape == "circle":
        inside = dx**2 + dy**2 <= radius**2
    elif shape == "square":
        inside = np.maximum(abs(dx), abs(dy)) <= 0.92 * radius
    elif shape == "triangle":
        below_tip = dy + 0.9 * radius
        inside = (abs(dy) <= 0.9 * radius) & (abs(dx) <= 0.6 * below_tip)
    elif shape == "cross":
        inside = (np.minimum(abs(dx), abs(dy)) <= 0.36 * radius) & (np.maximum(abs(dx), abs(dy)) <= radius)
    else:
        raise ValueError(f"shape {shape!r}: not of this world, which has {', '.join(SHAPES)}")
    return inside.reshape(SIZE, SUBPIXELS, SIZE, SUBPIXELS).mean((1, 3)).astype(np.float32)


def glyph_mask(digit: str, scale: int) -> np.ndarray:
    """The dots of a digit, 0 or 1, [7 * scale, 5 * scale]."""
    dots = np.array([[float(dot) for dot in row] for row in GLYPHS[digit].split()], np.float32)
    return dots.repeat(scale, 0).repeat(scale, 1)


def _clause(thing: Thing, count: int = 1) -> dict:
    color, shape = thing
    return {"class": shape, "count": count, "color": color}


def _paint(picture: np.ndarray, mask: np.ndarray, color: str, rng: np.random.Generator) -> np.ndarray:
    tint = np.clip(np.array(COLORS[color]) + rng.uniform(-0.04, 0.04, 3), 0, 1).astype(np.float32)
    return picture + mask[..., None] * (tint - picture)


def _number_mask(text: str, rng: np.random.Generator) -> np.ndarray:
    """The digits side by side, near the middle of the picture."""
    scale = DIGIT_SCALE[len(text)]
    glyphs = [glyph_mask(digit, scale) for digit in text]
    pitch = 5 * scale + DIGIT_GAP
    left = (SIZE - pitch * len(text) + DIGIT_GAP) // 2 + rng.integers(-DIGIT_JITTER, DIGIT_JITTER + 1)
    top = (SIZE - 7 * scale) // 2 + rng.integers(-DIGIT_JITTER, DIGIT_JITTER + 1)
    mask = np.zeros((SIZE, SIZE), np.float32)
    for i, glyph in enumerate(glyphs):
        mask[top : top + 7 * scale, left + i * pitch : left + i * pitch + 5 * scale] = glyph
    return mask


def _layout(scene: Scene, rng: np.random.Generator, tries: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Centres [n, 2] as (x, y) and radii [n]: the first of many random layouts that overlaps nothing."""
    n = len(scene.things)
    while True:
        radii = rng.uniform(*RADIUS[n], (tries, n))
        centers = rng.uniform(radii[..., None] + 1, SIZE - 1 - radii[..., None], (tries, n, 2))
        fits = np.ones(tries, bool)
        for i, j in itertools.combinations(range(n), 2):
            apart = abs(centers[:, i] - centers[:, j]).max(-1)
            fits &= apart > radii[:, i] + radii[:, j] + GAP
        if scene.relation:
            fits &= _margin(scene.relation, centers[:, 0] - centers[:, 1])
        if fits.any():
            return centers[fits.argmax()], radii[fits.argmax()]


def _margin(relation: str, offset: np.ndarray) -> np.ndarray:
    """Whether the subject lies clearly (not diagonally) where the relation says; offset [..., 2] from the landmark."""
    axis = 0 if relation in ("left of", "right of") else 1
    sign = -1 if relation in ("left of", "above") else 1
    return sign * offset[..., axis] > 1.2 * abs(offset[..., 1 - axis])
