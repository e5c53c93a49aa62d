"""Batches of a run whose sequence length grows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches
from data_pipeline.order import ConsumptionOrder, Share
from megakernel.config.errors import UserError
from megakernel.config.tree import Config
from tests.unit.data.test_loader import global_batch, open_batches, rows

Configure = Callable[..., Config]
SCHEDULE = [
    {"until_step": 3, "seq_len": 16, "global_batch_size": 16, "micro_batch_size": 4},
    {"until_step": 5, "seq_len": 16, "global_batch_size": 4},
]


@pytest.fixture
def growing(corpus: Path, configure: Configure) -> Config:
    """Steps 0-2 of 16 sequences and 3-4 of 4 sequences of 16 tokens, then 8 sequences of 32 tokens."""
    return configure(corpus, seq_len_schedule=SCHEDULE)


def indices(config: Config, step: int) -> list[int]:
    order = ConsumptionOrder(config.training.phase_of(step), Share())
    return [index for micro_batch in order.indices(step) for index in micro_batch]


def test_each_length_has_its_own_stream_shared_by_its_phases(growing: Config):
    assert [index for step in range(5) for index in indices(growing, step)] == list(range(3 * 16 + 2 * 4))
    assert [index for step in range(5, 10) for index in indices(growing, step)] == list(range(5 * 8))


def test_without_unread_first_a_phase_reads_the_same_as_a_run_of_only_its_length(
    corpus: Path, configure: Configure
):
    growing = configure(corpus, seq_len_schedule=SCHEDULE, data={"unread_first": False})
    short = configure(corpus, seq_len=16, global_batch_size=16, micro_batch_size=4)
    long = configure(corpus)
    for step in range(3):
        assert global_batch(growing, step) == global_batch(short, step)
    for step in range(5, 10):
        assert global_batch(growing, step) == global_batch(long, step - 5)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("start", [0, 2, 3, 4, 5, 7, 9])
def test_a_restart_in_any_phase_continues_the_stream(growing: Config, start: int, workers: int):
    data = growing.data.model_copy(update={"num_workers": workers})
    batches = open_batches(growing.model_copy(update={"data": data}))
    read = [rows(of_step) for of_step in batches.from_step(start)]
    assert read == [rows(next(batches.from_step(step))) for step in range(start, 10)]


@pytest.mark.parametrize(("data_size", "micro"), [(2, 1), (4, 1)])
def test_global_batches_are_the_same_for_every_layout(
    growing: Config, corpus: Path, configure: Configure, data_size: int, micro: int
):
    schedule = [{**entry, "micro_batch_size": micro} for entry in SCHEDULE]
    other = configure(corpus, seq_len_schedule=schedule, micro_batch_size=micro)
    for step in (0, 2, 3, 4, 5, 9):
        assert global_batch(other, step, data_size) == global_batch(growing, step)


def test_raising_the_steps_of_a_run_keeps_the_order(growing: Config, corpus: Path, configure: Configure):
    longer = configure(corpus, seq_len_schedule=SCHEDULE, steps=40)
    for step in range(10):
        assert global_batch(longer, step) == global_batch(growing, step)


def test_skip_samples_applies_within_each_length(corpus: Path, configure: Configure):
    # Samples from 56 on are the longer sequences: the third range covers only these, the second both lengths.
    skipped = [(10, 12), (54, 58), (59, 61)]
    config = configure(corpus, seq_len_schedule=SCHEDULE, skip_samples=skipped)
    first = [index for step in range(5) for index in indices(config, step)]
    assert first == [i for i in range(60) if i not in (10, 11, 54, 55)]
    assert indices(config, 5) == [2, 5, 6, 7, 8, 9, 10, 11]


def test_too_little_text_for_the_last_length_is_refused_before_the_first_step(
    corpus: Path, configure: Configure
):
    config = configure(corpus, seq_len=10**6, seq_len_schedule=SCHEDULE, eval_seq_len=16)
    with pytest.raises(
        UserError, match=r"one sample takes training\.seq_len \+ 1 = 1000001; prepare more text"
    ):
        TrainingBatches(config, Corpora(config.data), Share())
    short = configure(corpus, seq_len=10**6, seq_len_schedule=[{"until_step": 3, "seq_len": 10**5}], steps=3)
    with pytest.raises(UserError, match=r"takes training\.seq_len_schedule\.0\.seq_len \+ 1 = 100001; "):
        TrainingBatches(short, Corpora(short.data), Share())
