"""Where streams of several lengths and mixtures read: no token twice before a corpus has been read once."""

import random
from itertools import groupby

import pytest

from data_pipeline.blend import blend_order
from data_pipeline.reading import EpochPart, Place, Reading, Source, Stream, places

TOKENS = {"a": 1000, "b": 260}


def stream(unit: int, weights: dict[str, float], samples: int | None, planned: int | None) -> Stream:
    sources = [Source(name, TOKENS[name] // unit) for name in weights]
    return Stream(unit, sources, blend_order(list(weights.values())), samples, planned)


def passes_read(read: list[tuple[Stream, list[Place], int]]) -> dict[str, dict[int, list[int]]]:
    """Corpus -> pass -> the tokens that streams read of it, in no order; read: with the samples of each stream."""
    found: dict[str, dict[int, list[int]]] = {}
    for one, of_stream, samples in read:
        for source, place, count in zip(one.sources, of_stream, one.order.counts(samples)):
            for index in range(place.start, place.start + int(count)):
                part, at = place.reading.locate(index)
                # Any order within the part will do here: every place of it is a sample of its own.
                first = (part.first + at) * one.unit
                tokens = found.setdefault(source.content, {}).setdefault(part.epoch, [])
                tokens.extend(range(first, first + one.unit))
    return found


def random_run(seed: int) -> list[Stream]:
    """Streams whose lengths grow and whose mixtures change, each planned as it is read."""
    rng = random.Random(seed)
    shapes = []
    for unit in sorted(rng.sample([2, 3, 5, 8, 20], k=rng.randint(1, 4))):
        for _ in range(rng.randint(1, 3)):
            weights = rng.choice([{"a": 1.0}, {"b": 1.0}, {"a": 3.0, "b": 1.0}, {"b": 0.3, "a": 0.7}])
            shapes.append((unit, weights, rng.randint(1, 150)))
    streams = []
    for index, (unit, weights, samples) in enumerate(shapes):
        rest = [count for other, _, count in shapes[index:] if other == unit]
        last = index == len(shapes) - 1
        open_ended = unit == shapes[-1][0]
        streams.append(stream(unit, weights, None if last else samples, None if open_ended else sum(rest)))
    return streams


@pytest.mark.parametrize("seed", range(60))
def test_no_token_comes_twice_in_a_pass_and_passes_follow_each_other(seed: int):
    streams = random_run(seed)
    found = places(streams, unread_first=True)
    read = [(one, of_stream, one.samples or 40) for one, of_stream in zip(streams, found)]
    longest = streams[-1].unit
    for content, passes in passes_read(read).items():
        for epoch, tokens in passes.items():
            assert len(tokens) == len(set(tokens))
            assert max(tokens) < TOKENS[content]
            if (
                epoch + 1 in passes
            ):  # what is left would fill no sample, besides a sample's rest at each new length
                assert TOKENS[content] - len(tokens) < 5 * longest
        assert sorted(passes) == list(range(len(passes)))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_does_not_depend_on_the_length_of_the_run(seed: int):
    streams = random_run(seed)
    before = streams[:-1]
    assert (
        places(streams, True)[: len(before)]
        == places([*before, streams[-1], streams[-1]], True)[: len(before)]
    )


def test_a_single_stream_reads_whole_passes_in_their_own_order():
    (((reading, start),),) = places([stream(10, {"a": 1.0}, None, None)], unread_first=True)
    assert start == 0
    assert [reading.locate(index) for index in (0, 99, 100, 250)] == [
        (EpochPart(0, 0, 100), 0),
        (EpochPart(0, 0, 100), 99),
        (EpochPart(1, 0, 100), 0),
        (EpochPart(2, 0, 100), 50),
    ]


def test_another_mixture_of_the_same_length_reads_on_where_the_one_before_stopped():
    first, second = stream(10, {"a": 1.0}, 30, None), stream(10, {"b": 1.0, "a": 1.0}, None, None)
    (one,), (of_b, of_a) = places([first, second], unread_first=True)
    assert (one.start, of_b.start, of_a.start) == (0, 0, 30)
    assert one.reading == of_a.reading


def test_a_length_that_others_follow_draws_from_the_text_that_it_will_fill():
    short, long = stream(5, {"a": 1.0}, 30, 30), stream(20, {"a": 1.0}, None, None)
    ((of_short,), (of_long,)) = places([short, long], unread_first=True)
    assert of_short.reading.parts == (EpochPart(0, 0, 30),)
    assert of_long.reading.parts == (EpochPart(0, 8, 50),)  # 150 tokens are read, 160 are 8 samples of 20


def test_a_length_that_had_no_end_draws_from_the_whole_pass_and_the_next_begins_behind_as_much():
    short, long = stream(5, {"a": 1.0}, 30, None), stream(20, {"a": 1.0}, None, None)
    ((of_short,), (of_long,)) = places([short, long], unread_first=True)
    assert of_short.reading.parts == (EpochPart(0, 0, 200),)
    assert of_long.reading.parts == (EpochPart(0, 8, 50),)


def test_more_samples_than_planned_come_from_the_passes_behind():
    short, long = stream(5, {"a": 1.0}, 30, 30), stream(20, {"a": 1.0}, None, None)
    ((of_short,), _) = places([short, long], unread_first=True)
    assert of_short.reading.locate(29) == (EpochPart(0, 0, 30), 29)
    assert of_short.reading.locate(31) == (EpochPart(1, 0, 200), 1)


def test_without_unread_first_every_length_begins_at_the_start():
    streams = [stream(5, {"a": 1.0}, 30, 30), stream(20, {"a": 1.0}, None, None)]
    assert [of_stream[0].reading.parts for of_stream in places(streams, unread_first=False)] == [
        (EpochPart(0, 0, 200),),
        (EpochPart(0, 0, 50),),
    ]


@pytest.mark.parametrize("samples", [1, 30, 31, 130, 131, 400])
def test_the_parts_of_the_first_samples_are_those_that_they_are_in(samples: int):
    reading = Reading(100, (EpochPart(2, 70, 100),), 3)
    expected = [part for part, _ in groupby(reading.locate(index)[0] for index in range(samples))]
    assert list(reading.parts_of(samples)) == expected
