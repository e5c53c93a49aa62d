"""A run with a sequence-length schedule gives the same results on any layout, and after a kill in any phase."""

from functools import cache
from pathlib import Path

import pytest

from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.config import load
from megakernel.evaluation.run import evaluate_run
from tests.distributed.processes import RankFailedError, run_ranks
from tests.distributed.training_run import (
    assert_identical,
    assert_losses_close,
    layout,
    pretrain_killed_at_line,
    scalars,
    train,
    write_config,
)

SCHEDULE = (
    "training.seq_len_schedule=[{until_step: 3, seq_len: 64, global_batch_size: 16, micro_batch_size: 4, "
    "rope_base: 1000, rope_scaling: {kind: none}}]"
)
OPTIONS = (
    SCHEDULE,
    "training.steps=5",
    "training.seq_len=256",
    "training.global_batch_size=8",
    "training.micro_batch_size=1",
    # Sharp attention from the start, so that the loss depends on the rotary frequencies.
    "model.init_std=0.1",
    # The length of neither phase: pipeline stages have to change the shapes that they send, and change back.
    "training.eval_seq_len=128",
    "training.eval_every=2",
    "model.rope_scaling={kind: yarn, factor: 4, original_seq_len: 64}",
    # A decay would depend on the length of the run.
    "schedule.name=constant",
    "checkpoint.every=1",
    "logging.tensorboard=false",
)
"""The number of micro-batches per step changes too, from 4 to 8; 3 * 4 is not a multiple of 8."""

LAYOUTS = [
    *("cp2", "pp2", "tp2 sequence parallel", "dp2 zero 1", "dp2 zero 2"),
    *("cp2 zero 3", "cp2 pp2 zero 1"),
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    """The configuration, and the metrics of one process."""
    config = write_config(tmp_path_factory.mktemp("one"), corpus)
    return config, train(config, 1, *OPTIONS)


@pytest.mark.second
def test_samples_and_tokens_are_counted_in_every_phase(one_process):
    config, lines = one_process
    assert scalars(lines, "train/seq_len") == [64] * 3 + [256] * 2
    first, second = 16 * 64, 8 * 256
    tokens = [first, 2 * first, 3 * first, *(3 * first + n * second for n in (1, 2))]
    assert scalars(lines, "train/tokens") == tokens
    run = load(config, OPTIONS).run.folder
    progress = find_checkpoint(run).progress
    assert (progress.consumed_samples, progress.consumed_tokens) == (3 * 16 + 2 * 8, tokens[-1])


@pytest.mark.second
def test_a_step_gives_the_same_update_with_any_micro_batch_size(one_process, tmp_path):
    """Needed because a step that took the wrong micro-batches would take the same ones on all layouts."""
    config, expected = one_process
    whole = SCHEDULE.replace("micro_batch_size: 4", "micro_batch_size: 16")
    actual = train(config, 1, *OPTIONS, whole, "training.micro_batch_size=8", f"run.root={tmp_path}")
    assert scalars(actual, "train/loss") == pytest.approx(scalars(expected, "train/loss"), rel=1e-5)


@pytest.fixture(scope="module")
def on_layout(tmp_path_factory, corpus):
    """Name of a layout -> the configuration, world size, overrides and metrics of a run on it."""

    @cache
    def trained(ranks):
        config = write_config(tmp_path_factory.mktemp("whole"), corpus)
        world_size, *overrides = (*layout(ranks), *OPTIONS)
        return config, world_size, overrides, train(config, world_size, *overrides)

    return trained


@pytest.mark.second
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_growing_sequences_have_the_losses_of_one_process_on_any_layout(ranks, one_process, on_layout):
    assert_losses_close(on_layout(ranks)[-1], one_process[-1])


@pytest.mark.second
@pytest.mark.parametrize("ranks", ["dp2 zero 1", "pp2"])
@pytest.mark.parametrize("step", [2, 4])
def test_a_run_killed_in_any_phase_resumes_bit_identically(ranks, step, on_layout, tmp_path):
    config, world_size, overrides, whole = on_layout(ranks)
    overrides = (*overrides, f"run.root={tmp_path}")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(pretrain_killed_at_line, world_size, f"step {step}/", config, overrides)
    continued = train(config, world_size, *overrides)
    assert_identical(continued, whole)


@pytest.mark.second
def test_a_finished_run_can_continue_with_longer_sequences(one_process, corpus, tmp_path):
    config, _ = one_process
    # A run that was to end with its short sequences took them from the whole corpus.
    whole = train(config, 1, *OPTIONS, "data.unread_first=false", f"run.root={tmp_path / 'whole'}")
    short_run = tmp_path / "short"
    short = (
        "training.steps=3",
        "training.seq_len=64",
        "training.global_batch_size=16",
        "training.micro_batch_size=4",
        "model.rope_base=1000",
        "model.init_std=0.1",
        "schedule.name=constant",
        "training.eval_samples=0",
        f"run.root={short_run}",
    )
    train(config, 1, *short)
    lines = train(config, 1, *OPTIONS, f"run.root={short_run}")
    assert scalars(lines, "train/loss")[:3] == scalars(whole, "train/loss")[:3]
    assert len(scalars(lines, "train/loss")) == 5


@pytest.mark.second
@pytest.mark.parametrize("steps", [3, 4])
def test_a_checkpoint_is_evaluated_with_the_rotary_frequencies_of_its_phase(steps, one_process, tmp_path):
    config, _ = one_process
    lines = train(config, 1, *OPTIONS, f"training.steps={steps}", f"run.root={tmp_path}")
    (loss,) = run_ranks(evaluation_loss, 1, tmp_path / "run")
    # Sums in another order: over buckets of positions.
    assert loss == pytest.approx(scalars(lines, "eval/loss")[-1], rel=1e-5)


def evaluation_loss(run: Path) -> float:
    return evaluate_run(run).loss
