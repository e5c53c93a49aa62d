"""Pathfinder32: pictures of two dashed contours among shorter ones. Do the two discs stand on the same contour?

The constants are those of the published pictures (`curv_contour_length_14` of google-research/long-range-arena,
`lra_benchmarks/data/pathfinder.py`), made by drewlinsley/pathfinder: 32 x 32 pixels with a border of 1, dashes of 2 x
0.5 pixels with a margin of 1 at both ends, two contours of 14 dashes whose first tips are 7 apart, up to 5 distractors
of 4 dashes, discs of radius 1.5, drawn at twice the resolution. A contour bends in the middle of each gap, by an angle
whose probability falls as the square of its cosine. A contour that runs into something is taken back a few dashes, and
drawn again from there; distractors are as many as find room. Dashes have contrast 1.5 beside the discs' 1, and the
brightest possible pixel is 255.

There, contours keep their margin of each other, which is as far as dashes of one contour are apart. Here two dark
pixels lie between contours and at most one between dashes of one, so that every picture can be solved by following its
dashes.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import ClassVar, NamedTuple

from pydantic import Field

from data_pipeline.document import Document
from data_pipeline.generated import Count, GeneratedTask, Some

SIZE = 32
"""Pixels of a side."""

_SCALE = 2
"""Drawn dots along a pixel's side."""

_BORDER, _DASH, _MARGIN, _RADIUS = 1, 2.0, 1.0, 1.5
_BRIGHTEST, _DISC = 255, 170
_APART = 2
"""Dark pixels between contours."""

_BENDS, _PLACES, _STUCK = 8, 100, 60
"""Angles tried for a dash, places for a distractor, and shortenings of a pair, before it is given up."""

# A set of pixels is one integer, a bit for each; rows have room at both ends for what grows beyond the picture.
_EDGE, _STRIDE = 6, SIZE + 12

Cell = tuple[int, int]
Point = tuple[float, float]
"""y and x, in pixels."""


class Pathfinder(GeneratedTask):
    """Pictures of two contours; every other one has its discs on the same."""

    NAME: ClassVar[str] = "lra:pathfinder"
    CLASSES: ClassVar[tuple[int, ...]] = (0, 1)

    train: Some = 160_000
    validation: Count = 20_000
    test: Count = 20_000

    contour: int = Field(default=14, ge=2, le=16)
    """Dashes of each of the two contours."""

    distractors: int = Field(default=5, ge=0, le=1_000)
    """Other contours, where they find room."""

    distractor: int = Field(default=4, ge=1, le=1_000)
    """Dashes of each."""

    seed_distance: int = Field(default=7, ge=5, le=10)
    """Pixels between the first tips of the two contours."""

    def example(self, draw: random.Random, index: int) -> Document:
        """A picture, one character for the gray value of each pixel, row by row; 1 where the discs are connected."""
        pair = self._pair(draw)
        others = self._distractors(draw, _grown(pair[0].pixels | pair[1].pixels, _APART))
        label = index % 2
        start = draw.randrange(2)
        end = start if label else 1 - start
        cells = [cell for contour in (*pair, *others) for cell in contour.cells]
        gray = _picture(cells, (pair[start].tips[0], pair[end].tips[1]))
        return Document(("".join(map(chr, gray)),), label)

    def _pair(self, draw: random.Random) -> "tuple[_Contour, _Contour]":
        """The two contours, dash by dash in turn; one that is stuck loses a few dashes, both begin anew after many."""
        middle = SIZE / 2
        while True:
            tip = (middle + draw.uniform(-2, 2), middle + draw.uniform(-2, 2))
            opposite = _along(tip, draw.uniform(0, math.tau), self.seed_distance)
            pair = _Contour(tip, draw, marked=True), _Contour(opposite, draw, marked=True)
            stuck = 0
            while stuck < _STUCK:
                shorter, longer = sorted(pair, key=lambda contour: len(contour.dashes))
                if len(shorter.dashes) == self.contour:
                    return pair
                last = len(shorter.dashes) + 1 == self.contour
                if not shorter.extend(draw, _grown(longer.pixels, _APART), last):
                    stuck += 1
                    shorter.shorten(draw.randint(1, 4))

    def _distractors(self, draw: random.Random, taken: int) -> "list[_Contour]":
        """As many as find room in a few places; taken: pixels that they must not touch."""
        found: list[_Contour] = []
        for _ in range(self.distractors):
            for _ in range(_PLACES):
                tip = (draw.uniform(_BORDER, SIZE - _BORDER), draw.uniform(_BORDER, SIZE - _BORDER))
                contour = _Contour(tip, draw, marked=False)
                if all(contour.extend(draw, taken) for _ in range(self.distractor)):
                    found.append(contour)
                    taken |= _grown(contour.pixels, _APART)
                    break
        return found


class _Dash(NamedTuple):
    """A dash, and how its contour goes on behind it."""

    cells: list[Cell]
    """Dots that it covers, _SCALE of them along a pixel."""

    pixels: int
    angle: float
    pivot: Point
    """Middle of the gap behind it."""


class _Contour:
    """A row of dashes that grows at its end."""

    def __init__(self, tip: Point, draw: random.Random, *, marked: bool):
        """tip: its first end. marked: whether discs may stand on its ends."""
        angle = draw.uniform(0, math.tau)
        self._start = _Dash([], _disc(_pixel(tip)) if marked else 0, angle, _along(tip, angle, -_MARGIN))
        self._first = _pixel(tip)
        self._end_disc = 0
        self.dashes: list[_Dash] = []

    @property
    def pixels(self) -> int:
        """Its dashes and the discs of both ends."""
        return reduce(or_, (dash.pixels for dash in self.dashes), self._start.pixels | self._end_disc)

    @property
    def cells(self) -> list[Cell]:
        """Dots that its dashes cover."""
        return [cell for dash in self.dashes for cell in dash.cells]

    @property
    def tips(self) -> tuple[Cell, Cell]:
        """Pixels of both ends."""
        y, x = self.dashes[-1].cells[-1]
        return self._first, (y // _SCALE, x // _SCALE)

    def extend(self, draw: random.Random, taken: int, last: bool = False) -> bool:
        """Add a dash clear of `taken` and of its own dashes; False where none of a few angles is.

        last: a disc may stand on its end, which has to be clear of `taken` and of the first disc.
        """
        before = self.dashes[-1] if self.dashes else self._start
        own = reduce(or_, (dash.pixels for dash in self.dashes[:-1]), 0)
        refused = taken | _grown(own, 1) | _OUTSIDE
        for _ in range(_BENDS if self.dashes else 1):
            angle = before.angle + (_bend(draw) if self.dashes else 0.0)
            cells = [_cell(_along(before.pivot, angle, distance)) for distance in _DOTS]
            pixels = _mask((y // _SCALE, x // _SCALE) for y, x in cells)
            end = _disc((cells[-1][0] // _SCALE, cells[-1][1] // _SCALE)) if last else 0
            if not (pixels & refused or end & taken or _grown(end, _APART) & self._start.pixels):
                pivot = _along(before.pivot, angle, _DASH + 2 * _MARGIN)
                self.dashes.append(_Dash(cells, pixels, angle, pivot))
                self._end_disc = end
                return True
        return False

    def shorten(self, dashes: int) -> None:
        """Take the last dashes away."""
        del self.dashes[-dashes:]
        self._end_disc = 0


_DOTS = [
    _MARGIN + _DASH * step / 8 + (1e-6 if step == 8 else -1e-6 if step == 0 else 0.0) for step in range(9)
]
"""Distances from a pivot at which a dash is drawn; a trifle longer, so that rounding widens no gap."""


def _bend(draw: random.Random) -> float:
    """An angle in (-pi/2, pi/2), with a density that goes as the square of its cosine."""
    while True:
        angle = draw.uniform(-math.pi / 2, math.pi / 2)
        if draw.random() < math.cos(angle) ** 2:
            return angle


def _along(point: Point, angle: float, distance: float) -> Point:
    return point[0] + distance * math.sin(angle), point[1] + distance * math.cos(angle)


def _cell(point: Point) -> Cell:
    return math.floor(point[0] * _SCALE), math.floor(point[1] * _SCALE)


def _pixel(point: Point) -> Cell:
    return math.floor(point[0]), math.floor(point[1])


def _mask(pixels: Iterable[Cell]) -> int:
    mask = 0
    for y, x in pixels:
        mask |= 1 << (y + _EDGE) * _STRIDE + x + _EDGE
    return mask


def _grown(mask: int, by: int) -> int:
    """The pixels and all that lie at most `by` from one of them, along both axes."""
    for _ in range(by):
        mask |= mask << 1 | mask >> 1
        mask |= mask << _STRIDE | mask >> _STRIDE
    return mask


def _disc(pixel: Cell) -> int:
    """The pixels that a disc on the middle of this one reaches."""
    return _grown(_mask([pixel]), 1)


_OUTSIDE = ~_mask((y, x) for y in range(_BORDER, SIZE - _BORDER) for x in range(_BORDER, SIZE - _BORDER))


def _picture(cells: list[Cell], discs: tuple[Cell, Cell]) -> list[int]:
    """Gray values 0 to 255, row by row: the share of a pixel's dots that are covered, times the contrast."""
    dashes = Counter((y // _SCALE, x // _SCALE) for y, x in set(cells))
    marked = Counter(
        (y + at // _SCALE, x + aside // _SCALE)
        for y, x in discs
        for at in range(-_SCALE, 2 * _SCALE)
        for aside in range(-_SCALE, 2 * _SCALE)
        if math.hypot((at + 0.5) / _SCALE - 0.5, (aside + 0.5) / _SCALE - 0.5) <= _RADIUS
    )
    dots = _SCALE**2
    places = ((y, x) for y in range(SIZE) for x in range(SIZE))
    return [
        max(_BRIGHTEST * dashes[place] // dots, _DISC * min(marked[place], dots) // dots) for place in places
    ]
