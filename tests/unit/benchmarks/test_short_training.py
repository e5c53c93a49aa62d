"""The short trainings cover every preset; no page is written if the loss of one does not fall."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import training_runs
from benchmarks.short_training import CONFIG, CONTROL, Run, TrainingResult, main, runs, train
from megakernel.config import PRESETS, load, to_yaml

STEPS = 200
FALLING = [5.0 - step / 100 for step in range(STEPS)]


def select_run(preset, kind):
    (run,) = (run for run in runs([preset]) if (run.mechanism, run.kind) == (preset, kind))
    return run


@pytest.mark.parametrize("run", runs(PRESETS), ids=str)
def test_every_run_has_a_valid_configuration(run):
    config = load(CONFIG, run.overrides)
    training = config.training
    assert (training.steps, training.dtype, config.model.kind) == (STEPS, "bfloat16", run.kind)
    assert training.global_batch_size * training.seq_len == 2048
    if run.mechanism != CONTROL:
        assert training.seq_len % (config.model.attention.block_size or 1) == 0


def test_every_preset_is_trained_as_a_decoder_if_possible():
    trained = {(run.mechanism, run.kind) for run in runs(PRESETS)}
    assert {mechanism for mechanism, _ in trained} == {*PRESETS, CONTROL}
    assert {("flurka", "causal_lm"), ("linformer", "masked_lm"), ("softmax", "masked_lm")} < trained
    assert not {("flurka", "masked_lm"), ("linformer", "causal_lm")} & trained


def test_mechanisms_have_fewer_landmarks_than_tokens():
    for run in runs(PRESETS):
        config = load(CONFIG, run.overrides)
        attention = config.model.attention
        if attention.mechanism in ("skyformer", "nystromformer"):
            sizes = getattr(attention, attention.mechanism).model_dump()
            assert sizes.get("features", sizes.get("landmarks")) < config.training.seq_len
        elif attention.has_position_parameters:
            assert attention.compression.rank < config.training.seq_len


def training_result(losses=FALLING, held_out=(5.5, 3.0), skipped=0):
    return TrainingResult(
        Run("linear", "causal_lm", []), losses, list(held_out), [1.0] * STEPS, skipped, [0.1] * STEPS
    )


def test_falling_losses_are_accepted():
    assert training_result().failure() is None


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (training_result(FALLING[::-1]), "the training loss did not fall, 3.0550 to 4.9550"),
        (training_result([5.0] * STEPS), "the training loss did not fall"),
        (training_result(held_out=(5.5, 5.6)), "the held-out loss did not fall"),
        (training_result([*FALLING[:-1], None]), "not finite"),
        (training_result(held_out=(5.5, None)), "not finite"),
        (training_result(skipped=2), "not finite (2 steps skipped)"),
    ],
    ids=["rises", "stays", "held-out rises", "not a number", "held-out not a number", "skipped steps"],
)
def test_a_failed_training_is_reported_by_name(outcome, reason):
    failure = outcome.failure()
    assert failure is not None
    assert failure.startswith("linear as causal_lm: ")
    assert reason in failure


@pytest.fixture
def write_finished_run(tmp_path, monkeypatch):
    """A function that writes the files of a finished `megakernel pretrain`, without training."""
    monkeypatch.chdir(tmp_path)

    def no_process(*command):
        raise AssertionError("a finished run is not repeated")

    monkeypatch.setattr(training_runs, "run_megakernel", no_process)
    monkeypatch.setattr(training_runs, "find_checkpoint", lambda folder: SimpleNamespace(step=STEPS))

    def write(run, losses):
        config = load(CONFIG, run.overrides)
        (config.run.folder / "checkpoints").mkdir(parents=True)
        (config.run.folder / "config.yaml").write_text(to_yaml(config))
        step = {"train/grad_norm": 1.0, "train/skipped_steps": 0.0, "throughput/step_time": 0.1}
        lines = [{"step": 0, "eval/loss": losses[0]}]
        lines += [{"step": number, "train/loss": loss, **step} for number, loss in enumerate(losses, start=1)]
        lines[-1]["eval/loss"] = losses[-1]
        (config.run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return write


def test_the_page_is_written_from_finished_runs(write_finished_run, tmp_path):
    for run in runs(["linear"]):
        write_finished_run(run, FALLING)
    assert main(["--only", "linear", "--out", str(tmp_path / "page.md")]) == 0
    assert "| `linear` | causal_lm | 4.955 | 3.055 | 5.000 | **3.010** | yes | 0.100 |" in (
        (tmp_path / "page.md").read_text().splitlines()
    )


def test_no_page_is_written_if_a_loss_rises(write_finished_run, tmp_path, capsys):
    for run in runs(["linear", "hedgehog"]):
        write_finished_run(run, FALLING[::-1] if run.mechanism == "linear" else FALLING)
    assert main(["--only", "linear", "hedgehog", "--out", str(tmp_path / "page.md")]) == 1
    assert not (tmp_path / "page.md").exists()
    assert "linear as causal_lm: the training loss did not fall" in capsys.readouterr().err


def test_a_finished_run_of_another_configuration_is_not_reused(write_finished_run):
    run = select_run("linear", "causal_lm")
    write_finished_run(run, FALLING)
    changed = train(Run(run.mechanism, run.kind, [*run.overrides, "optimizer.lr=1e-3"]))
    assert isinstance(changed, str)
    assert "optimizer.lr" in changed
