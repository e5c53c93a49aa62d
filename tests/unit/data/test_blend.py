"""Blends of fake corpora: which corpus each sample comes from."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from data_pipeline.blend import BLEND_PERIOD, Blend


@dataclass
class Numbers:
    """A corpus whose samples are its name and their index."""

    name: int
    per_epoch: int = 10

    def build(self, samples: int) -> None: ...

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.name, index


def blend(weights: list[float], **options: Any) -> Blend[tuple[int, int]]:
    return Blend([Numbers(number) for number in range(len(weights))], weights, **options)


RARE = [0.99, *[2e-6] * 5_000]
WEIGHTS = {
    "two": [3.0, 1.0],
    "thirds": [1 / 3, 1 / 3, 1 / 3],
    "one rare": [1.0, 1.0, 1.0, 1e-9],
    "two heavy, many light": [0.45, 0.45, *[0.01] * 10],
    "equal and light": [*[0.24] * 4, *np.random.default_rng(0).random(20) / 500],
    "any": list(np.random.default_rng(1).random(40)),
    "nine orders of magnitude": list(np.exp(3 * np.random.default_rng(2).standard_normal(60))),
}
# Near the start, around a block's edge, and where only bisection leads.
STARTS = (0, 4_000, 123_456_789_123)


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_corpus_has_its_share_to_one_sample_after_any_number_of_samples(name: str):
    weights = WEIGHTS[name]
    shares, samples = np.array(weights) / sum(weights), blend(weights)
    for start in STARTS:
        counts = samples.counts(start).copy()
        for index in range(start, start + 4_200):
            corpus, sample = samples[index]
            assert sample == counts[corpus], "each corpus is read in its own order, without gaps"
            counts[corpus] += 1
            # 1e-3: the float64 product of a share and an index of 2^37.
            assert np.abs(counts - shares * (index + 1)).max() <= 1 + 1e-3
        assert (samples.counts(start + 4_200) == counts).all()


def test_five_thousand_corpora_of_tiny_weights_are_all_read_by_their_weights():
    samples, shares = blend(RARE), np.array(RARE) / sum(RARE)
    for number in (1, 65_536, 500_000, 1_000_000, 3 * 10**9 + 1):
        assert np.abs(samples.counts(number) - shares * number).max() <= 1
    assert (samples.counts(1_100_000) > 0).all()
    read = np.zeros(len(RARE), dtype=int)
    for index in range(100_000):
        read[samples.locate(index)[0]] += 1
    assert (read == samples.counts(100_000)).all()


def test_any_sample_is_found_without_those_before_it():
    near, far = blend(RARE), 10**13
    assert blend(RARE)[far] == blend(RARE)[far]
    in_order = [near[index] for index in range(9_000)]
    assert [blend(RARE)[index] for index in (8_999, 0, 4_096)] == [in_order[i] for i in (8_999, 0, 4_096)]
    assert near[far] == blend(RARE)[far], "what was read before does not matter"


def test_the_memory_of_a_blend_does_not_grow_with_its_length():
    import tracemalloc

    samples = blend(RARE)
    samples[0]
    tracemalloc.start()
    for index in range(0, 2**40, 2**37):
        samples[index]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6, "176 counts of 5,001 corpora are 7 MB"


def test_a_periodic_blend_keeps_the_order_of_earlier_versions():
    samples = blend([3.0, 2.0], periodic=True)
    assert [samples[index] for index in range(8)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 3), (1, 2), (0, 4)
    ]  # fmt: skip
    counts = samples.counts(BLEND_PERIOD)
    assert counts.tolist() == [39322, 26214]
    for index in range(20):
        corpus, sample = samples[index]
        assert samples[BLEND_PERIOD + index] == (corpus, sample + counts[corpus])


def test_a_single_corpus_is_read_in_its_own_order():
    for periodic in (False, True):
        samples = blend([2.5], periodic=periodic)
        assert samples[10**14] == (0, 10**14)
        assert samples.counts(7).tolist() == [7]
    assert blend([2.5]).passes(25).tolist() == [2.5]
