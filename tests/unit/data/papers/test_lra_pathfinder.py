"""Pathfinder images, solved from their pixels."""

from collections import Counter

import numpy as np
import pytest

from data_pipeline.document import Document
from data_pipeline.papers.generated import generate_examples
from data_pipeline.papers.lra.pathfinder import Pathfinder

SIDE = 32
DISC = 160
"""A gray level below that of the center of a disc."""


def pixels(document: Document) -> np.ndarray:
    return np.frombuffer(document.texts[0].encode("latin-1"), dtype=np.uint8).reshape(SIDE, SIDE)


def groups(lit: np.ndarray, max_step: int) -> list[set[tuple[int, int]]]:
    """Connected groups of lit pixels, where steps of at most `max_step` along each axis connect."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(lit))}
    found = []
    while left:
        border = [left.pop()]
        group = set(border)
        while border:
            y, x = border.pop()
            near = {
                pixel for pixel in left if abs(pixel[0] - y) <= max_step and abs(pixel[1] - x) <= max_step
            }
            left -= near
            group |= near
            border += near
        found.append(group)
    return found


def discs(gray: np.ndarray) -> list[tuple[int, int]]:
    """Centers of the two discs: bright with four bright neighbors, unlike any pixel of a dash."""
    bright = np.pad(gray > DISC, 1)
    cross = bright[1:-1, 1:-1] & bright[:-2, 1:-1] & bright[2:, 1:-1] & bright[1:-1, :-2] & bright[1:-1, 2:]
    return [next(iter(group)) for group in groups(cross, max_step=1)]


def connected(gray: np.ndarray) -> bool:
    """Whether a walk over dashes, across at most one dark pixel at a time, leads from one disc to the other."""
    one, other = discs(gray)
    return any(one in group and other in group for group in groups(gray > 0, max_step=2))


@pytest.fixture(scope="module")
def images() -> list[Document]:
    return generate_examples(Pathfinder(), 0, ("train", range(120)))


@pytest.mark.second
def test_following_the_dashes_solves_every_image(images: list[Document]):
    assert [int(connected(pixels(document))) for document in images] == [
        document.label for document in images
    ]


def test_half_of_the_images_are_connected(images: list[Document]):
    assert Counter(document.label for document in images) == {0: 60, 1: 60}


def test_an_image_has_two_contours_and_shorter_distractors(images: list[Document]):
    others = []
    for document in images:
        sizes = sorted((len(group) for group in groups(pixels(document) > 0, max_step=2)), reverse=True)
        # 14 dashes of at least 2 pixels and one or two discs: no distractor of 4 dashes is that large.
        assert sizes[1] >= 28
        assert all(size <= 20 for size in sizes[2:])
        others.append(len(sizes) - 2)
    assert max(others) <= 5
    assert np.mean(others) > 1.5, "distractors are drawn if there is room"


def test_gray_levels_are_those_of_dots_and_there_are_two_discs(images: list[Document]):
    for document in images:
        gray = pixels(document)
        assert set(np.unique(gray)) <= {0, 42, 63, 85, 127, 170, 191, 255}
        assert discs(gray).__len__() == 2


def test_the_number_of_lit_pixels_does_not_reveal_the_label(images: list[Document]):
    lit = {label: [(pixels(d) > 0).sum() for d in images if d.label == label] for label in (0, 1)}
    deviation = np.std(lit[0] + lit[1])
    assert abs(np.mean(lit[0]) - np.mean(lit[1])) < deviation
