"""`megakernel plan`, end to end."""

import json
import re

import pytest

from launch.cli import main
from launch.plan import device_counts

from ..config import trees


@pytest.fixture
def file(tmp_path):
    return str(trees.file(tmp_path, training={"seq_len": 2048, "global_batch_size": 64}))


def test_a_range_is_the_powers_of_two_in_it():
    assert device_counts("64") == [64]
    assert device_counts("12") == [12]
    assert device_counts("8..4096") == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert device_counts("5..9") == [8]


def test_tables_show_layouts_memory_time_and_traffic(file, capsys):
    assert main(["plan", file, "model.vocab_size=1000", "--gpus", "8", "--gpu", "h100", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    for wanted in ("predicted, not measured", "memory per device, GB", "optimizer", "sent per device", "MFU"):
        assert wanted in shown
    assert "1,000 ids by model.vocab_size" in shown
    (invalid,) = re.findall(r"^(\d+) layouts are invalid:", shown, re.MULTILINE)
    listed = [int(count) for count in re.findall(r"^ +(\d+) x ", shown, re.MULTILINE)]
    # The most frequent reasons first; each of those left out has at least one layout.
    assert listed == sorted(listed, reverse=True)
    assert sum(listed) + int(re.findall(r"and (\d+) more reasons", shown)[0]) <= int(invalid)
    assert "beyond DeepSpeed's pipeline engine" in shown


def test_json_holds_what_the_tables_show_and_every_reason(file, capsys):
    assert main(["plan", file, "--gpus", "8..16", "--gpu", "a100", "--json", "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"] is True
    assert found["gpu"]["memory"] == 80e9
    assert [one["gpus"] for one in found["plans"]] == [8, 16]
    for one in found["plans"]:
        assert len(one["layouts"]) == 3
        assert one["refused"]
        best = one["layouts"][0]
        assert best["memory_bytes_total"] == pytest.approx(sum(best["memory_bytes"].values()))
        assert best["step_seconds"] == pytest.approx(sum(best["seconds"].values()))
        sizes = best["layout"]
        product = sizes["tensor"] * sizes["context"] * sizes["data"] * sizes["pipeline"]
        assert product == one["gpus"]


def test_the_keys_of_a_layout_are_overrides_that_a_run_takes(file, capsys):
    assert main(["plan", file, "--gpus", "8", "--gpu", "h200", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["plans"][0]["layouts"][0]["keys"]
    overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    assert main(["config", file, *overrides]) == 0


@pytest.mark.second
def test_a_range_shows_how_the_run_scales(file, capsys):
    assert main(["plan", file, "--gpus", "8..16", "--gpu", "b200"]) == 0
    shown = capsys.readouterr().out
    for wanted in ("strong scaling", "weak scaling", "longer sequences"):
        assert wanted in shown
    assert "50,257 ids assumed" in shown


@pytest.mark.second
def test_a_page_has_its_command_and_the_baselines(file, capsys, tmp_path):
    out = tmp_path / "pages" / "plan.md"
    assert main(["plan", file, "--gpus", "8", "--gpu", "h100", "--page", str(out)]) == 0
    page = out.read_text()
    assert capsys.readouterr().out == page
    assert f"`megakernel plan {file} --gpus 8 --gpu h100 --page {out}`" in page
    assert "Nothing on this page was measured" in page
    assert "softmax, ring attention" in page


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--gpus", "8", "--gpu", "h900"], "--gpu h900 is not known; choose a100, h100, h200, b200"),
        (["--gpus", "many", "--gpu", "h100"], "--gpus many is neither a number nor a range"),
        (["--gpus", "64..8", "--gpu", "h100"], "--gpus 64..8 holds no number of devices"),
        (["--gpus", "9..15", "--gpu", "h100"], "--gpus 9..15 holds no power of two"),
        (["--gpus", "0", "--gpu", "h100"], "--gpus 0 holds no number of devices"),
        (
            ["--gpus", "1000001", "--gpu", "h100"],
            "holds no number of devices from 1 to 1,000,000; write 64 or",
        ),
        (["--gpus", "9" * 30, "--gpu", "h100"], "is neither a number nor a range"),
        (["--gpus", "8.." + "9" * 5000, "--gpu", "h100"], "is neither a number nor a range"),
        (["--gpus", "8", "--gpu", "h100", "--top", "0"], "--top 0 shows nothing"),
        (["--gpus", "8", "--gpu", "h100", "--at", "16"], "--at 16 is none of --gpus 8"),
        (["--gpus", "8", "--gpu", "h100", "--network", "0"], "--network 0 moves nothing"),
        (
            ["--gpus", "8", "--gpu", "h100", "training.seq_len=0"],
            "training.seq_len=0 should be greater than 0",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(file, options, complaint, refused):
    assert complaint in refused("plan", file, *options)
