"""Metrics of blocks of layers, merged into those of one run."""

import json
import math

from megakernel.uptraining.blocks import merge_metrics


def runs(tmp_path, *blocks):
    for number, lines in enumerate(blocks):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield run


def test_losses_and_times_are_summed_and_rates_averaged_over_time(tmp_path):
    first = {"step": 1, "train/loss": 1.5, "train/grad_norm": 3.0, "train/lr": 0.1, "memory/peak_gib": 2.0}
    second = {"step": 1, "train/loss": 0.5, "train/grad_norm": 4.0, "train/lr": 0.1, "memory/peak_gib": 1.0}
    first |= {"throughput/step_time": 1.0, "throughput/tflops": 6.0, "throughput/tokens_per_sec": 30.0}
    second |= {"throughput/step_time": 2.0, "throughput/tflops": 3.0, "throughput/tokens_per_sec": 15.0}
    ((step, scalars),) = merge_metrics(runs(tmp_path, [first], [second]))
    assert step == 1
    assert scalars == {
        "train/loss": 2.0,
        "train/grad_norm": 5.0,
        "train/lr": 0.1,
        "memory/peak_gib": 2.0,
        "throughput/step_time": 3.0,
        "throughput/tflops": 2.0,
        "throughput/tokens_per_sec": 10.0,
    }


def test_metrics_of_all_heads_are_merged_and_missing_numbers_stay_nan(tmp_path):
    first = [{"step": 1, "transfer/error/layer_0/head_0": 0.5}, {"step": 2, "train/loss": None}]
    second = [{"step": 1, "transfer/error/layer_1/head_0": 0.25}, {"step": 2, "train/loss": 1.0}]
    (_, heads), (_, losses) = merge_metrics(runs(tmp_path, first, second))
    assert heads == {"transfer/error/layer_0/head_0": 0.5, "transfer/error/layer_1/head_0": 0.25}
    assert math.isnan(losses["train/loss"])
