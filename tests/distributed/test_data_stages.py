"""Runs whose mixture of corpora changes: on layouts, after kills, and added when the run resumes."""

from pathlib import Path

import pytest

from tests.unit.data.conftest import documents, prepared, write_jsonl

from .processes import RankFailedError, run_ranks
from .training_run import (
    assert_identical,
    assert_losses_close,
    layout,
    pretrain_and_return_output,
    pretrain_killed_at_line,
    scalars,
    train,
    write_config,
)

PLAIN = (
    "logging.tensorboard=false",
    "schedule.name=constant",
    "checkpoint.every=1",
    "training.eval_samples=2",
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> list[Path]:
    """Three corpora; the validation split of the first is evaluated."""
    folder = tmp_path_factory.mktemp("corpora")
    for number in range(3):
        source = write_jsonl(folder / f"{number}.jsonl", documents(300, seed=number))
        prepared(folder / str(number), [str(source)])
    return [folder / str(number) for number in range(3)]


def stages(corpora: list[Path]) -> str:
    """A mixture from step 2 on, which read the first corpus, and another behind its sequences of 64 tokens."""
    first, second, third = corpora
    mixture = f"{{{first}: 1, {second}: 3}}"
    return f"data.stages=[{{from_step: 2, train: {mixture}}}, {{from_step: 4, train: [{second}, {third}]}}]"


LENGTHS = "training.seq_len_schedule=[{until_step: 3, seq_len: 64}]"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpora):
    """The configuration, and the metrics of one process over 6 steps."""
    config = write_config(tmp_path_factory.mktemp("one"), corpora[0])
    return config, train(config, 1, *PLAIN, LENGTHS, stages(corpora), "training.steps=6")


@pytest.mark.second
@pytest.mark.parametrize("ranks", ["dp2 zero 1", "cp2", "pp2"])
def test_stages_have_the_losses_of_one_process_on_any_layout(ranks, one_process, corpora, tmp_path):
    world_size, *overrides = layout(ranks)
    config = write_config(tmp_path, corpora[0])
    lines = train(config, world_size, *PLAIN, *overrides, LENGTHS, stages(corpora), "training.steps=6")
    assert_losses_close(lines, one_process[1])


@pytest.mark.second
@pytest.mark.parametrize(("ranks", "step"), [(1, 2), (1, 5), (2, 3)])
def test_a_run_killed_in_any_stage_resumes_bit_identically(ranks, step, one_process, corpora, tmp_path):
    config = write_config(tmp_path, corpora[0])
    options = (*PLAIN, LENGTHS, stages(corpora), "training.steps=6")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(pretrain_killed_at_line, ranks, f"step {step}/", config, options)
    continued = train(config, ranks, *options)
    if ranks == 1:
        assert_identical(continued, one_process[1])
    else:
        assert_losses_close(continued, one_process[1])


@pytest.mark.second
def test_a_stage_that_is_added_at_resume_reads_as_if_it_had_been_planned(corpora, tmp_path):
    config = write_config(tmp_path, corpora[0])
    stage = f"data.stages=[{{from_step: 3, train: {{{corpora[0]}: 1, {corpora[1]}: 1}}}}]"
    planned = train(config, 1, *PLAIN, stage, "training.steps=5", "run.name=planned")
    train(config, 1, *PLAIN, "training.steps=3")
    added = train(config, 1, *PLAIN, stage, "training.steps=5")
    assert scalars(added, "train/loss") == scalars(planned, "train/loss")
    other = train(config, 1, *PLAIN, "training.steps=5", "run.name=without")
    assert scalars(other, "train/loss")[3:] != scalars(planned, "train/loss")[3:]
    assert scalars(other, "train/loss")[:3] == scalars(planned, "train/loss")[:3]


def test_the_start_and_every_stage_say_what_is_read(corpora, tmp_path):
    config = write_config(tmp_path, corpora[0])
    later = f"data.stages=[{{from_step: 1, train: {corpora[1]}}}, {{from_step: 9, train: {corpora[2]}}}]"
    [output] = run_ranks(pretrain_and_return_output, 1, config, (*PLAIN, later, "training.steps=2"))
    lines = output.splitlines()
    expected = [
        "data.stages.1 begins after 9 steps, and training.steps=2 ends before it",
        f"data of {corpora[0]}: 50 % of what is read, 0.06 passes over it in the run",
        f"data of {corpora[1]}: 50 % of what is read, 0.06 passes over it in the run",
        f"from step 1: text of data.train: {corpora[0]}",
        f"from step 2: text of data.stages.0.train: {corpora[1]}",
    ]
    assert [line for line in lines if line in expected] == expected
    assert not any(str(corpora[2]) in line for line in lines)
