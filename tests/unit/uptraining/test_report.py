"""What an up-training's report says."""

import json
from dataclasses import replace
from math import log

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megakernel.config import Uptrain
from megakernel.config.uptrain import TransferStage
from megakernel.uptraining.identity import Identity
from megakernel.uptraining.report import Measured, Report, recovered
from megakernel.uptraining.report_events import write_events
from megakernel.uptraining.summary import recipe


def test_recovered_is_the_share_of_the_perplexity_gap():
    assert recovered(log(20), log(12), log(10)) == pytest.approx(0.8)
    assert recovered(log(20), log(9), log(10)) == pytest.approx(1.1)
    assert recovered(log(10.05), log(9), log(10)) is None  # a swap that cost half a percent


NAMES = ("dense", "swapped_untrained", "distillation")
"""Of its rows, as TensorBoard has them."""


def made(**more):
    return Report(
        config="runs/x",
        window=64,
        parity=None,
        parity_reason="it is a run",
        identity=Identity(64, 2.5, 2.4),
        dense=Measured.untrained("dense", (log(10), log(9))),
        swapped=Measured.untrained("swapped, untrained", (log(20), log(21))),
        stages=[Measured("distillation", log(12), log(13), tokens=4096, folder="runs/x/1-main")],
        ablations=[],
        heads={"transfer/error/layer_1/head_0": 0.25, "transfer/far_mass/layer_1/head_0": 0.5},
        **more,
    )


def test_files_have_what_was_measured(tmp_path):
    report = made()
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


def test_a_report_says_how_its_model_was_made():
    said = recipe(Uptrain(alpha=0.3, transfer=TransferStage(steps=6)))
    text = made(recipe=said, kept=[0, 3]).markdown()
    assert '* Up-trained with transfer={"steps": 6}, alpha=0.3.' in text
    assert "* Layers that stay softmax: 0, 3." in text
    assert "Up-trained with" not in made(recipe=recipe(Uptrain())).markdown()


def test_tensorboard_shows_the_last_report_alone(tmp_path):
    write_events(replace(made(), swapped=Measured.untrained("first", (log(30), log(30)))), tmp_path)
    write_events(made(), tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = {f"report/{kind}/{name}" for kind in ("loss", "perplexity", "beyond") for name in NAMES}
    assert set(events.Tags()["scalars"]) == tags | {"report/recovered/distillation"}
    (share,) = events.Scalars("report/recovered/distillation")
    assert (share.step, share.value) == (4096, pytest.approx(0.8))
    (page,) = events.Tensors("report/text_summary")
    assert page.tensor_proto.string_val == [made().markdown().encode()]


def test_without_a_near_window_nothing_lies_beyond_it():
    assert "*beyond* counts the tokens with at least 64 tokens of their document" in made().markdown()
    assert "*beyond* counts all tokens, as there is no near window" in replace(made(), window=0).markdown()


def test_beside_a_dense_model_that_was_trained_on_both_shares_are_told(tmp_path):
    report = made(trained_on=Measured("dense, trained on", log(8), log(8), tokens=4096))
    report.write(tmp_path)
    lines = (tmp_path / "uptrain_report.md").read_text().splitlines()
    assert "| distillation | 4,096 | 2.4849 | 12.000 | 2.5649 | 80.0% | 66.7% |" in lines
    assert "| dense | 0 | 2.3026 | 10.000 | 2.1972 |  |  |" in lines
    found = json.loads((tmp_path / "uptrain_report.json").read_text())
    assert found["recovered_of_trained_on"] == {"distillation": pytest.approx(2 / 3)}
