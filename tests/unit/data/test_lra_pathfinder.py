"""Pictures of Pathfinder, solved from their pixels alone."""

from collections import Counter

import numpy as np
import pytest

from data_pipeline.document import Document
from data_pipeline.generated import generate_examples
from data_pipeline.lra.pathfinder import Pathfinder

SIDE = 32
DISC = 160
"""Darker than the middle of a disc."""


def picture(document: Document) -> np.ndarray:
    return np.frombuffer(document.texts[0].encode("latin-1"), dtype=np.uint8).reshape(SIDE, SIDE)


def groups(lit: np.ndarray, reach: int) -> list[set[tuple[int, int]]]:
    """Lit pixels, those together that steps of at most `reach` along each axis connect."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(lit))}
    found = []
    while left:
        border = [left.pop()]
        group = set(border)
        while border:
            y, x = border.pop()
            near = {pixel for pixel in left if abs(pixel[0] - y) <= reach and abs(pixel[1] - x) <= reach}
            left -= near
            group |= near
            border += near
        found.append(group)
    return found


def discs(gray: np.ndarray) -> list[tuple[int, int]]:
    """Middles of the two discs: bright with all four neighbours, which no dash is."""
    bright = np.pad(gray > DISC, 1)
    cross = bright[1:-1, 1:-1] & bright[:-2, 1:-1] & bright[2:, 1:-1] & bright[1:-1, :-2] & bright[1:-1, 2:]
    return [next(iter(group)) for group in groups(cross, reach=1)]


def connected(gray: np.ndarray) -> bool:
    """Whether a walk over dashes, across at most one dark pixel at a time, leads from one disc to the other."""
    one, other = discs(gray)
    return any(one in group and other in group for group in groups(gray > 0, reach=2))


@pytest.fixture(scope="module")
def pictures() -> list[Document]:
    return generate_examples(Pathfinder(), 0, ("train", range(120)))


def test_following_the_dashes_solves_every_picture(pictures: list[Document]):
    assert [int(connected(picture(document))) for document in pictures] == [
        document.label for document in pictures
    ]


def test_half_of_the_pictures_are_connected(pictures: list[Document]):
    assert Counter(document.label for document in pictures) == {0: 60, 1: 60}


def test_a_picture_holds_two_contours_and_shorter_ones(pictures: list[Document]):
    others = []
    for document in pictures:
        sizes = sorted((len(group) for group in groups(picture(document) > 0, reach=2)), reverse=True)
        # 14 dashes of at least 2 pixels, and one disc or two: no distractor of 4 dashes is as large.
        assert sizes[1] >= 28
        assert all(size <= 20 for size in sizes[2:])
        others.append(len(sizes) - 2)
    assert max(others) <= 5
    assert np.mean(others) > 1.5, "where there is room, there are distractors"


def test_the_border_holds_no_dash_and_values_are_those_of_dots(pictures: list[Document]):
    for document in pictures:
        gray = picture(document)
        assert set(np.unique(gray)) <= {0, 42, 63, 85, 127, 170, 191, 255}
        assert discs(gray).__len__() == 2


def test_labels_are_not_told_by_how_much_is_lit(pictures: list[Document]):
    lit = {label: [(picture(d) > 0).sum() for d in pictures if d.label == label] for label in (0, 1)}
    deviation = np.std(lit[0] + lit[1])
    assert abs(np.mean(lit[0]) - np.mean(lit[1])) < deviation
