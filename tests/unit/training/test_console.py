import io

import pytest

from megakernel.training.observing.console import Console, decimal

SCALARS = {
    "train/loss": 2.34124,
    "train/bits_per_byte": 3.3777,
    "train/lr": 2.9e-4,
    "train/grad_norm": 0.8123,
    "train/tokens": 3_000_000.0,
    "train/skipped_steps": 0.0,
    "throughput/tokens_per_sec": 12431.4,
}


def printed(*steps, total=1000, **changes) -> str:
    out = io.StringIO()
    console = Console(total, total_tokens=24_879_184, file=out)
    for step in steps:
        console.step(step, SCALARS | changes)
    return out.getvalue()


def test_a_step_is_one_plain_line_in_a_log_file():
    line = printed(120)
    assert line.count("\n") == 1
    assert "\x1b" not in line
    for part in (
        "step  120/1000",
        "loss 2.3412",
        "lr 2.90e-04",
        "norm 0.812",
        "12,431 tok/s",
        "ETA 0:29:20",  # 21,879,184 tokens are left
    ):
        assert part in line


@pytest.mark.parametrize(
    ("step", "total", "changes", "left_out"),
    [
        (10, 20, {}, set()),
        (90_000, 95_367, {"throughput/mfu": 0.41}, {"lr"}),
        (90_000, 95_367, {"throughput/mfu": 0.41, "throughput/tokens_per_sec": 1.2e6}, {"lr"}),
        (90_000, 95_367, {"throughput/tokens_per_sec": 12.0}, set()),  # 21 days
        (900_000, 953_670, {"throughput/mfu": 0.41, "train/skipped_steps": 12.0}, {"lr", "norm", "MFU"}),
    ],
)
def test_a_steps_line_fits_80_columns_and_leaves_out_what_metrics_jsonl_has(step, total, changes, left_out):
    line = printed(step, total=total, **changes).rstrip("\n")
    assert len(line) <= 80
    shown = {"lr", "norm"} | ({"MFU"} if "throughput/mfu" in changes else set())
    assert {word for word in shown if f"  {word} " not in line} == left_out
    for word in ("loss", "tok/s", "ETA"):
        assert word in line


def test_long_times_and_high_speeds_are_short():
    assert "ETA 21d 2h" in printed(1, **{"throughput/tokens_per_sec": 12.0})
    assert "1.20M tok/s" in printed(1, **{"throughput/tokens_per_sec": 1.2e6})


def test_mfu_and_skipped_steps_appear_only_if_there_are_any():
    assert "MFU" not in printed(1)
    assert "skipped" not in printed(1)
    line = printed(1, **{"throughput/mfu": 0.412, "train/skipped_steps": 3.0})
    assert "MFU 41.2%" in line
    assert "3 skipped" in line


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [
        (-0.0, "", "0.0000"),
        (-4e-5, "+", "0.0000"),
        (4e-5, "+", "0.0000"),
        (-6e-5, "", "-0.0001"),
        (2.5, "+", "+2.5000"),
    ],
)
def test_what_rounds_to_zero_has_no_sign(value, sign, text):
    assert decimal(value, sign=sign) == text


def test_a_non_finite_loss_is_printed():
    assert "loss nan" in printed(1, **{"train/loss": float("nan")})


def test_the_progress_line_is_only_for_terminals():
    out = io.StringIO()
    Console(10, 10, file=out).progress(5)
    assert out.getvalue() == ""


def test_an_evaluation_has_its_own_line():
    out = io.StringIO()
    Console(10, 10, file=out).evaluation(5, {"eval/loss": 1.5, "eval/bits_per_byte": 2.164})
    assert out.getvalue() == "eval at step 5  loss 1.5000  2.1640 bits/byte\n"


def test_a_note_is_printed_unchanged():
    out = io.StringIO()
    Console(10, 10, file=out).note("checkpoint step_20 is broken: [complete.json] is missing " + "x" * 200)
    assert out.getvalue() == "checkpoint step_20 is broken: [complete.json] is missing " + "x" * 200 + "\n"
