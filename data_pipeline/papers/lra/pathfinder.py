"""Pathfinder32: images of two long dashed contours among shorter ones. Are the two discs on the same contour?

The constants are those of the published images (`curv_contour_length_14` of google-research/long-range-arena,
`lra_benchmarks/data/pathfinder.py`), made by drewlinsley/pathfinder: 32 x 32 pixels with a border of 1, dashes of 2 x
0.5 pixels with a margin of 1 at both ends, two contours of 14 dashes whose first tips are 7 apart, up to 5 distractors
of 4 dashes, discs of radius 1.5, drawn at twice the resolution. A contour bends in the middle of each gap, by an angle
whose density is proportional to the square of its cosine. A contour that hits something loses its last few dashes and
is redrawn from there; there are as many distractors as fit. Dashes have contrast 1.5 and discs 1; the brightest
possible pixel is 255.

There, contours are only a margin apart, the same as consecutive dashes of one contour. Here two dark pixels separate
contours and at most one separates consecutive dashes, so that every image can be solved by following the dashes.
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
from data_pipeline.papers.generated import Count, GeneratedTask, PositiveCount

SIZE = 32
"""Pixels of a side."""

_SCALE = 2
"""Dots per pixel side at which images are drawn."""

_BORDER, _DASH, _MARGIN, _RADIUS = 1, 2.0, 1.0, 1.5
_DASH_GRAY, _DISC_GRAY = 255, 170
_CLEARANCE = 2
"""Dark pixels between contours."""

_ANGLE_TRIES, _PLACE_TRIES, _SHORTENINGS = 8, 100, 60
"""Attempts before giving up: angles for a dash, places for a distractor, and shortenings of a pair."""

# A set of pixels is one integer with a bit per pixel; rows are padded at both ends for sets that grow past the image.
_EDGE, _STRIDE = 6, SIZE + 12

Cell = tuple[int, int]
Point = tuple[float, float]
"""y and x, in pixels."""


class Pathfinder(GeneratedTask):
    """Images of two contours; every other image has both discs on the same one."""

    NAME: ClassVar[str] = "lra:pathfinder"
    CLASSES: ClassVar[tuple[int, ...]] = (0, 1)

    train: PositiveCount = 160_000
    validation: Count = 20_000
    test: Count = 20_000

    contour: int = Field(default=14, ge=2, le=16)
    """Dashes of each of the two contours."""

    distractors: int = Field(default=5, ge=0, le=1_000)
    """Maximum number of short contours."""

    distractor: int = Field(default=4, ge=1, le=1_000)
    """Dashes of each short contour."""

    seed_distance: int = Field(default=7, ge=5, le=10)
    """Pixels between the first tips of the two contours."""

    def example(self, rng: random.Random, index: int) -> Document:
        """An image, one character per pixel for its gray value, row by row; class 1 if the discs are connected."""
        pair = self._pair(rng)
        others = self._distractors(rng, _dilated(pair[0].pixels | pair[1].pixels, _CLEARANCE))
        label = index % 2
        start = rng.randrange(2)
        end = start if label else 1 - start
        cells = [cell for contour in (*pair, *others) for cell in contour.cells]
        gray = _image(cells, (pair[start].tips[0], pair[end].tips[1]))
        return Document(("".join(map(chr, gray)),), label)

    def _pair(self, rng: random.Random) -> "tuple[_Contour, _Contour]":
        """The two contours, grown in turn; a stuck one loses a few dashes, and after many failures both start over."""
        middle = SIZE / 2
        while True:
            tip = (middle + rng.uniform(-2, 2), middle + rng.uniform(-2, 2))
            opposite = _along(tip, rng.uniform(0, math.tau), self.seed_distance)
            pair = _Contour(tip, rng, marked=True), _Contour(opposite, rng, marked=True)
            stuck = 0
            while stuck < _SHORTENINGS:
                shorter, longer = sorted(pair, key=lambda contour: len(contour.dashes))
                if len(shorter.dashes) == self.contour:
                    return pair
                last = len(shorter.dashes) + 1 == self.contour
                if not shorter.extend(rng, _dilated(longer.pixels, _CLEARANCE), last):
                    stuck += 1
                    shorter.shorten(rng.randint(1, 4))

    def _distractors(self, rng: random.Random, taken: int) -> "list[_Contour]":
        """As many distractors as fit within the attempts; taken: pixels that they must not touch."""
        contours: list[_Contour] = []
        for _ in range(self.distractors):
            for _ in range(_PLACE_TRIES):
                tip = (rng.uniform(_BORDER, SIZE - _BORDER), rng.uniform(_BORDER, SIZE - _BORDER))
                contour = _Contour(tip, rng, marked=False)
                if all(contour.extend(rng, taken) for _ in range(self.distractor)):
                    contours.append(contour)
                    taken |= _dilated(contour.pixels, _CLEARANCE)
                    break
        return contours


class _Dash(NamedTuple):
    """A dash, and where its contour continues."""

    cells: list[Cell]
    """Dots that it covers, _SCALE per pixel side."""

    pixels: int
    angle: float
    pivot: Point
    """Middle of the gap after it."""


class _Contour:
    """A contour: a row of dashes that grows at its end."""

    def __init__(self, tip: Point, rng: random.Random, *, marked: bool):
        """tip: its first end. marked: whether its ends may carry discs."""
        angle = rng.uniform(0, math.tau)
        self._start = _Dash([], _disc(_pixel(tip)) if marked else 0, angle, _along(tip, angle, -_MARGIN))
        self._first = _pixel(tip)
        self._end_disc = 0
        self.dashes: list[_Dash] = []

    @property
    def pixels(self) -> int:
        """The set of pixels of its dashes and of the discs at both ends."""
        return reduce(or_, (dash.pixels for dash in self.dashes), self._start.pixels | self._end_disc)

    @property
    def cells(self) -> list[Cell]:
        """Dots covered by its dashes."""
        return [cell for dash in self.dashes for cell in dash.cells]

    @property
    def tips(self) -> tuple[Cell, Cell]:
        """The pixels at both ends."""
        y, x = self.dashes[-1].cells[-1]
        return self._first, (y // _SCALE, x // _SCALE)

    def extend(self, rng: random.Random, taken: int, last: bool = False) -> bool:
        """Add a dash clear of `taken` and of the contour's own dashes; False if none of a few angles allows it.

        last: its end may carry a disc, which must be clear of `taken` and of the first disc.
        """
        before = self.dashes[-1] if self.dashes else self._start
        previous_pixels = reduce(or_, (dash.pixels for dash in self.dashes[:-1]), 0)
        blocked = taken | _dilated(previous_pixels, 1) | _OUTSIDE
        for _ in range(_ANGLE_TRIES if self.dashes else 1):
            angle = before.angle + (_bend(rng) if self.dashes else 0.0)
            cells = [_cell(_along(before.pivot, angle, distance)) for distance in _DOTS]
            pixels = _mask((y // _SCALE, x // _SCALE) for y, x in cells)
            end = _disc((cells[-1][0] // _SCALE, cells[-1][1] // _SCALE)) if last else 0
            if not (pixels & blocked or end & taken or _dilated(end, _CLEARANCE) & self._start.pixels):
                pivot = _along(before.pivot, angle, _DASH + 2 * _MARGIN)
                self.dashes.append(_Dash(cells, pixels, angle, pivot))
                self._end_disc = end
                return True
        return False

    def shorten(self, dashes: int) -> None:
        """Remove the last dashes."""
        del self.dashes[-dashes:]
        self._end_disc = 0


_DOTS = [
    _MARGIN + _DASH * step / 8 + (1e-6 if step == 8 else -1e-6 if step == 0 else 0.0) for step in range(9)
]
"""Distances from a pivot at which a dash is drawn; slightly longer, so that rounding does not widen a gap."""


def _bend(rng: random.Random) -> float:
    """An angle in (-pi/2, pi/2), with a density proportional to the square of its cosine."""
    while True:
        angle = rng.uniform(-math.pi / 2, math.pi / 2)
        if rng.random() < math.cos(angle) ** 2:
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


def _dilated(mask: int, by: int) -> int:
    """The pixels dilated by `by` along both axes."""
    for _ in range(by):
        mask |= mask << 1 | mask >> 1
        mask |= mask << _STRIDE | mask >> _STRIDE
    return mask


def _disc(pixel: Cell) -> int:
    """The pixels that a disc centered on this pixel touches."""
    return _dilated(_mask([pixel]), 1)


_OUTSIDE = ~_mask((y, x) for y in range(_BORDER, SIZE - _BORDER) for x in range(_BORDER, SIZE - _BORDER))


def _image(cells: list[Cell], discs: tuple[Cell, Cell]) -> list[int]:
    """Gray values 0 to 255, row by row: the covered share of a pixel's dots, times the contrast."""
    dashes = Counter((y // _SCALE, x // _SCALE) for y, x in set(cells))
    disc_dots = Counter(
        (y + dy // _SCALE, x + dx // _SCALE)
        for y, x in discs
        for dy in range(-_SCALE, 2 * _SCALE)
        for dx in range(-_SCALE, 2 * _SCALE)
        if math.hypot((dy + 0.5) / _SCALE - 0.5, (dx + 0.5) / _SCALE - 0.5) <= _RADIUS
    )
    dots = _SCALE**2
    pixels = ((y, x) for y in range(SIZE) for x in range(SIZE))
    return [max(_DASH_GRAY * dashes[at], _DISC_GRAY * min(disc_dots[at], dots)) // dots for at in pixels]
