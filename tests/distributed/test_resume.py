"""A run that was killed continues as if nothing had happened."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from megakernel.config.resume import NOT_FINITE
from megakernel.training.state_files import StateFiles
from tests.distributed.processes import RankFailedError, run_ranks
from tests.distributed.training_run import (
    assert_identical,
    assert_losses_close,
    layout,
    metrics,
    pretrain_and_return_output,
    pretrain_in_this_rank,
    pretrain_killed_at_line,
    scalars,
    train,
    write_config,
)
from tests.tiers import tiered

STEPS = 6
LAYOUTS = ["dp2", "dp2 zero 1", "dp2 zero 2", "dp2 zero 3", "pp2", "bfloat16 dp2 zero 1"]
OPTIONS = (f"training.steps={STEPS}", "checkpoint.every=2", "logging.tensorboard=false")


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["dp2 zero 2"]))
def test_a_run_killed_at_any_step_resumes_bit_identically(ranks, corpus, tmp_path):
    world_size, *overrides = (*layout(ranks), *OPTIONS, "model.dropout={attention: 0.1, residual: 0.1}")
    config = write_config(tmp_path, corpus)
    whole = train(config, world_size, *overrides, "run.name=whole")
    step = random.Random(ranks).randrange(3, STEPS)
    killed = (*overrides, "run.name=killed")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(pretrain_killed_at_line, world_size, f"step {step}/", config, killed)
    assert list((tmp_path / "killed/checkpoints").glob("step_*"))
    continued = train(config, world_size, *overrides, "run.name=killed")
    assert_identical(continued, whole)


def pretrain_as_before(config: Path, overrides: tuple[str, ...]) -> int:
    """Train, and save the trained weights of ZeRO 1 and 2 twice, as earlier versions did."""
    install = StateFiles.install
    StateFiles.install = lambda engine, left_out=(): install(engine)
    return pretrain_in_this_rank(config, overrides)


WEIGHTS = "mp_rank_00_model_states.pt"
SMALL = (
    *("model.num_layers=2", "model.attention_pattern=[main, softmax]", "training.global_batch_size=4"),
    *("training.eval_samples=0", "training.steps=4", "schedule.name=constant"),
)


@pytest.mark.parametrize("ranks", tiered(["dp2 zero 1", "dp2 zero 2", "bfloat16 dp2 zero 1"], ["dp2 zero 2"]))
def test_a_checkpoint_of_an_earlier_version_with_the_weights_twice_resumes_bit_identically(
    ranks, corpus, tmp_path
):
    world_size, *overrides = (*layout(ranks), *OPTIONS, *SMALL)
    config = write_config(tmp_path, corpus)
    whole = train(config, world_size, *overrides, "run.name=whole")
    begun = (*overrides, "run.name=begun", "training.steps=2")
    run_ranks(pretrain_as_before, world_size, config, begun, timeout=240)
    before = torch.load(tmp_path / "begun/checkpoints/step_2" / WEIGHTS, weights_only=False)
    trained = set(before["megakernel"]["parameters"])
    assert trained <= before["module"].keys()
    now = torch.load(tmp_path / "whole/checkpoints/step_4" / WEIGHTS, weights_only=False)
    assert before["module"].keys() - now["module"].keys() == trained
    assert_identical(train(config, world_size, *overrides, "run.name=begun"), whole)


@pytest.mark.second
def test_a_checkpoint_of_an_earlier_version_continues_on_another_layout(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    world_size, *before = layout("dp2 zero 2")
    begun = (*before, *OPTIONS, *SMALL, "training.steps=2")
    run_ranks(pretrain_as_before, world_size, config, begun, timeout=240)
    continued = train(config, *layout("tp2 zero 1"), *OPTIONS, *SMALL)
    assert_losses_close(continued, train(config, 1, *OPTIONS, *SMALL, "run.name=whole"))


@pytest.mark.second
@pytest.mark.parametrize("ranks", ["one process", "one process zero 1"])
def test_a_new_learning_rate_of_mechanisms_holds_from_the_next_step_on(ranks, corpus, tmp_path):
    _, *same = layout(ranks)
    config, options = write_config(tmp_path, corpus), ("schedule.name=constant", "logging.tensorboard=false")
    before = (*same, *options, "training.steps=2", "optimizer.mechanism_lr=1e-3")
    train(config, 1, *before)
    recorded = tmp_path / "run/config.yaml"
    recorded.write_text(NOT_FINITE + recorded.read_text())
    for copy in ("reshaped", "unchanged"):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
    after = (*options, "training.steps=4", "optimizer.mechanism_lr=10")
    losses = scalars(train(config, 1, *same, *after), "train/loss")
    # A reshaped run takes only weights and moments from its checkpoint, so its rates are those of its configuration.
    reshaped = train(config, 1, "parallel.zero_stage=2", *after, "run.name=reshaped")
    assert losses == pytest.approx(scalars(reshaped, "train/loss"), rel=1e-5)
    unchanged = train(config, 1, *before, "training.steps=4", "run.name=unchanged")
    assert losses[-1] != pytest.approx(scalars(unchanged, "train/loss")[-1], rel=1e-4)


@pytest.mark.parametrize(("steps", "status"), [(1, 0), (2, 143)])
def test_a_run_that_is_asked_to_stop_in_its_last_step_is_done(steps, status, corpus, tmp_path):
    config, stop_file = write_config(tmp_path, corpus), tmp_path / "run/STOP"
    stop_file.parent.mkdir()
    stop_file.touch()
    overrides = (f"training.steps={steps}", "logging.tensorboard=false")
    assert run_ranks(pretrain_in_this_rank, 1, config, overrides) == [status]
    assert not stop_file.exists()


CHANGES = (
    *(
        "optimizer.lr=3e-4",
        "optimizer.weight_decay=3",
        "optimizer.clip_grad_norm=0.05",
        "optimizer.beta2=0.9",
    ),
    *("schedule.name=linear", "schedule.min_lr_ratio=0.5", "training.z_loss=0.01"),
    "training.global_batch_size=4",
    "training.seq_len_schedule=[{until_step: 2, seq_len: 128, global_batch_size: 8}]",
)
ALLOWED = (
    *("optimizer.lr", "optimizer.weight_decay", "optimizer.clip_grad_norm", "optimizer.beta2", "schedule"),
    *("training.z_loss", "training.global_batch_size"),
)
CHANGED_LAYOUTS = ["dp2", "dp2 zero 1", "dp2 zero 2", "dp2 zero 3", "pp2", "pp2 dp2 zero 1"]


@pytest.fixture(scope="module")
def changed_in_one_process(tmp_path_factory, corpus):
    """The metrics of a run that one process continued with CHANGES.

    Two began it: a reshaped run takes only weights and moments from its checkpoint.
    """
    config = write_config(tmp_path_factory.mktemp("changed"), corpus)
    train(config, 2, *OPTIONS, "training.steps=2")
    return train(config, 1, *OPTIONS, *CHANGES, allowed=ALLOWED)


@pytest.mark.second
@pytest.mark.parametrize("ranks", CHANGED_LAYOUTS)
def test_changes_on_purpose_hold_from_the_checkpoint_on_and_a_killed_run_keeps_them(
    ranks, changed_in_one_process, corpus, tmp_path
):
    world_size, *overrides = (*layout(ranks), *OPTIONS)
    config = write_config(tmp_path, corpus)
    train(config, world_size, *overrides, "training.steps=2")
    for copy in ("killed", "unchanged"):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
    with pytest.raises(RankFailedError, match=r"--allow-change optimizer\.lr"):
        train(config, world_size, *overrides, *CHANGES)

    [output, *_] = run_ranks(
        pretrain_and_return_output, world_size, config, (*overrides, *CHANGES), ALLOWED, timeout=240
    )
    # The cosine of OPTIONS' steps is at its peak in step 3; the recorded one, of two steps, had ended.
    assert "optimizer.lr was 0.001 and is now 0.0003\n" in output
    assert "jumps: step 2 had 1.000e-03, and step 3 has 2.625e-04 instead of 1.000e-04;" in output
    changed = metrics(tmp_path / "run")
    assert_losses_close(changed, changed_in_one_process)
    assert scalars(changed, "train/tokens") == [128 * samples for samples in (8, 16, 20, 24, 28, 32)]
    unchanged = train(config, world_size, *overrides, "run.name=unchanged")
    assert scalars(unchanged, "train/loss")[-1] != pytest.approx(scalars(changed, "train/loss")[-1], rel=1e-4)

    killed = (*overrides, *CHANGES, "run.name=killed")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(pretrain_killed_at_line, world_size, "step 5/", config, killed, ALLOWED)
    assert_identical(train(config, world_size, *killed), changed)
