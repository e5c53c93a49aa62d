"""The report of an up-training."""

import json
from dataclasses import replace
from math import log, nan

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megakernel.config import Config, Model, Uptrain
from megakernel.config.uptrain import TransferStage
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import OneProcess
from megakernel.uptraining.costs import DecodingCost, TrainingCost
from megakernel.uptraining.identity import Identity
from megakernel.uptraining.report import Measured, Report, recovered, send, write_events
from megakernel.uptraining.summary import recipe
from tests.tracked import trackio_history
from tests.unit.generation.small_models import build


def test_recovered_is_the_fraction_of_the_perplexity_gap():
    assert recovered(log(20), log(12), log(10)) == pytest.approx(0.8)
    assert recovered(log(20), log(9), log(10)) == pytest.approx(1.1)
    assert recovered(log(10.05), log(9), log(10)) is None  # the swap cost only half a percent


def test_a_model_that_has_diverged_is_reported_too(tmp_path):
    stage = Measured("distillation", 5000.0, 5000.0, tokens=4096)
    heads = {"transfer/error/layer_1/head_0": None}
    diverged = replace(report_of(), swapped=Measured("swapped", 800.0, 800.0), stages=[stage], heads=heads)
    diverged.write(tmp_path)
    page = (tmp_path / "uptrain_report.md").read_text()
    assert "| swapped | 0 | 800.0000 | inf | 800.0000 |  |" in page
    assert "| distillation | 4,096 | 5000.0000 | inf | 5000.0000 | none: worse than the swap |" in page
    assert "| 1 | 0 |  |" in page
    assert "Infinity" not in (tmp_path / "uptrain_report.json").read_text()
    assert recovered(800.0, 2.5, 2.5) == 1.0


@pytest.mark.parametrize(
    ("swapped", "now", "text"),
    [
        (20, 12, "80.0%"),
        (20, 9, "all, and more"),
        (10.2, 15, "none: worse than the swap"),
        (10.05, 9, "the swap lost nothing"),
        (20, nan, "unknown: a loss is not a number"),
        (nan, 9, "unknown: a loss is not a number"),
    ],
)
def test_a_recovered_fraction_outside_0_to_1_is_described_in_words(swapped, now, text):
    stage = Measured("distillation", log(now), log(now), tokens=4096)
    report = replace(report_of(), swapped=Measured("swapped", log(swapped), log(21)), stages=[stage])
    (line,) = (line for line in report.markdown().splitlines() if line.startswith("| distillation |"))
    assert line.endswith(f" {text} |")


NAMES = ("dense", "swapped_untrained", "distillation")
"""Names of the report's rows in TensorBoard."""


def report_of(**more):
    return Report(
        config="runs/x",
        window=64,
        parity=None,
        parity_reason="it is a run",
        identity=Identity(64, 2.5, 2.4),
        dense=Measured("dense", log(10), log(9)),
        swapped=Measured("swapped, untrained", log(20), log(21)),
        stages=[Measured("distillation", log(12), log(13), tokens=4096, folder="runs/x/1-main")],
        ablations=[],
        heads={"transfer/error/layer_1/head_0": 0.25, "transfer/far_mass/layer_1/head_0": 0.5},
        **more,
    )


def test_report_files_hold_the_measurements(tmp_path):
    report = report_of()
    report.write(tmp_path)
    lines = (tmp_path / "uptrain_report.md").read_text().splitlines()
    assert "| distillation | 4,096 | 2.4849 | 12.000 | 2.5649 | 80.0% |" in lines
    assert "| 1 | 0 | 0.25 | 0.5 |" in lines
    assert lines[4].endswith("transformers, share of the largest: not measured: it is a run.")
    found = json.loads((tmp_path / "uptrain_report.json").read_text())
    assert found["recovered"] == {"distillation": pytest.approx(0.8)}
    assert found["identity"] == {"tokens": 64, "student": 2.5, "dense": 2.4}
    assert found["stages"][0]["folder"] == "runs/x/1-main"
    assert "recovered_of_trained_on" not in found


def test_training_cost_is_read_from_the_metrics_of_the_run(tmp_path):
    rates = {"throughput/tokens_per_sec": 200, "throughput/tokens_per_sec_per_device": 100}
    entries = [
        {"step": 0, "eval/loss": 3.0},
        {"step": 2, "throughput/step_time": 1.5, "throughput/tflops": 2, "memory/peak_gib": 3} | rates,
        {"step": 4, "throughput/step_time": 0.5, "throughput/tflops": 6, "memory/peak_gib": 2} | rates,
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert TrainingCost.of(tmp_path) == TrainingCost(4.0, 2 * (3 * 2e12 + 1 * 6e12), 3 * 2**30)


@pytest.fixture(scope="module")
def decoding():
    """Decoding cost of a dense and of a kernel model after 64 tokens."""
    found = {}
    for attention in ("softmax", "performer"):
        model = Model(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, attention=attention)
        built = LanguageModel(ModelSettings(model, 64, OneProcess()))
        found[attention] = DecodingCost.of(built, 64, torch.device("cpu"))
    return found


def test_state_bytes_are_those_of_keys_and_values(decoding):
    keys_and_values = 2 * 2 * (2 * 8) * 64 * 4  # layers, both, heads x width, tokens, bytes
    positions = decoding["softmax"].state_bytes - keys_and_values
    assert 0 <= positions <= 2 * 64 * 8
    assert decoding["softmax"].context == decoding["performer"].context == 64
    assert all(found.seconds > 0 and found.flops > 0 for found in decoding.values())


@pytest.mark.parametrize(("max_positions", "context"), [(8, 4), (16, 8), (64, 48)])
def test_decoding_is_timed_within_the_learned_positions(max_positions, context):
    model = build(position="learned", max_positions=max_positions, attention="softmax")
    assert DecodingCost.of(model, max_positions, torch.device("cpu")).context == context


def test_the_page_has_training_and_decoding_costs(decoding):
    stage = Measured(
        "distillation", log(12), log(13), 4096, "runs/x/1-main", TrainingCost(3725.2, 1.5e15, 2**31)
    )
    text = replace(report_of(), stages=[stage], decoding=decoding).markdown()
    assert "| distillation | 1:02:05 | 1.50e+15 | 2.00 GiB |" in text
    dense, student = (line for line in text.splitlines() if line.startswith(("| softmax |", "| performer |")))
    assert "| 100.0% |" in dense
    share = decoding["performer"].state_bytes / decoding["softmax"].state_bytes
    assert f"| {share:.1%} | {1e3 * decoding['performer'].seconds:.2f} |" in student
    assert "Not measured: the model is an encoder, or no process has all of it." in report_of().markdown()


def test_the_report_names_the_recipe_and_the_softmax_layers():
    recipe_text = recipe(Uptrain(alpha=0.3, transfer=TransferStage(steps=6)))
    text = report_of(recipe=recipe_text, kept=[0, 3]).markdown()
    assert '* Up-trained with transfer={"steps": 6}, alpha=0.3.' in text
    assert "* Layers that stay softmax: 0, 3." in text
    assert "Up-trained with" not in report_of(recipe=recipe(Uptrain())).markdown()


def test_tensorboard_shows_only_the_last_report(tmp_path):
    write_events(replace(report_of(), swapped=Measured("first", log(30), log(30))), tmp_path)
    write_events(report_of(), tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = {f"report/{kind}/{name}" for kind in ("loss", "perplexity", "beyond") for name in NAMES}
    assert set(events.Tags()["scalars"]) == tags | {"report/recovered/distillation"}
    (share,) = events.Scalars("report/recovered/distillation")
    assert (share.step, share.value) == (4096, pytest.approx(0.8))
    (page,) = events.Tensors("report/text_summary")
    assert page.tensor_proto.string_val == [report_of().markdown().encode()]


def test_trackers_get_the_report_as_a_run_beside_those_of_the_stages(tmp_path):
    lines: list[str] = []
    config = Config.model_validate(
        {
            "run": {"name": "up", "root": str(tmp_path)},
            "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 2},
            "data": {"train": "corpus"},
            "training": {"steps": 5, "seq_len": 16, "global_batch_size": 1},
            "logging": {"trackio": {"project": tmp_path.name}},
        }
    )
    config.run.folder.mkdir()
    send(report_of(), config, lines.append)
    shown = trackio_history(tmp_path.name, "up/report")
    found = {tag: (line["step"], value) for line in shown for tag, value in line.items()}
    assert found["report/recovered/distillation"] == (4096, pytest.approx(0.8))
    assert {tag for tag in found if tag.startswith("report/loss/")} == {
        f"report/loss/{name}" for name in NAMES
    }
    assert found["report"][1]["_value"] == report_of().markdown()
    assert not [line for line in lines if "warning" in line]


def test_without_a_window_beyond_counts_all_tokens():
    assert "*beyond* counts the tokens with at least 64 tokens of their document" in report_of().markdown()
    assert (
        "*beyond* counts all tokens, as there is no near window" in replace(report_of(), window=0).markdown()
    )


def test_with_a_further_trained_dense_model_both_fractions_are_reported(tmp_path):
    report = report_of(trained_on=Measured("dense, trained on", log(8), log(8), tokens=4096))
    report.write(tmp_path)
    lines = (tmp_path / "uptrain_report.md").read_text().splitlines()
    assert "| distillation | 4,096 | 2.4849 | 12.000 | 2.5649 | 80.0% | 66.7% |" in lines
    assert "| dense | 0 | 2.3026 | 10.000 | 2.1972 |  |  |" in lines
    found = json.loads((tmp_path / "uptrain_report.json").read_text())
    assert found["recovered_of_trained_on"] == {"distillation": pytest.approx(2 / 3)}
