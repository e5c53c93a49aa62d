"""`megakernel plan`, end to end."""

import json
import re
from xml.etree import ElementTree

import pytest

from launch.cli import main
from launch.plan import device_counts

from ..config import trees


@pytest.fixture
def file(tmp_path):
    return str(trees.file(tmp_path, training={"seq_len": 2048, "global_batch_size": 64}))


def test_a_range_of_gpus_holds_its_powers_of_two():
    assert device_counts("64") == [64]
    assert device_counts("12") == [12]
    assert device_counts("8..4096") == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert device_counts("5..9") == [8]


def test_tables_show_layouts_memory_traffic_and_the_verdict(file, capsys):
    assert main(["plan", file, "model.vocab_size=1000", "--gpus", "8", "--gpu", "h100", "--top", "2"]) == 0
    output = capsys.readouterr().out
    for wanted in (
        "predicted, not measured",
        "memory per device, GB",
        "optimizer",
        "sent per device",
        "no seconds",
    ):
        assert wanted in output
    assert "1,000 ids by model.vocab_size" in output
    (invalid,) = re.findall(r"^(\d+) layouts are invalid:", output, re.MULTILINE)
    listed = [int(count) for count in re.findall(r"^ +(\d+) x ", output, re.MULTILINE)]
    # Most frequent reasons first; each of those that are not listed has at least one layout.
    assert listed == sorted(listed, reverse=True)
    assert sum(listed) + int(re.findall(r"and (\d+) more reasons", output)[0]) <= int(invalid)
    assert "beyond DeepSpeed's pipeline engine" in output
    assert re.search(r"^fits as configured: \d+\.\d GB free$", output, re.MULTILINE)


@pytest.mark.second
def test_the_overrides_to_paste_make_a_run_fit(file, capsys):
    """The last lines are words for the same command, which then fits."""
    large = ["model.num_layers=64", "model.hidden_size=4096", "model.num_heads=32", "parallel.zero_stage=1"]
    command = ["plan", file, *large, "--gpus", "64", "--gpu", "h100"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "does not fit as configured: " in output
    (words,) = re.findall(r"^nearest that fits: (.+)$", output, re.MULTILINE)
    assert main([*command, *words.split()]) == 0
    assert re.search(r"^fits as configured: ", capsys.readouterr().out, re.MULTILINE)


def test_a_network_has_no_effect_and_says_so(file, capsys):
    assert main(["plan", file, "--gpus", "8", "--gpu", "h100", "--network", "100", "--json"]) == 0
    printed = capsys.readouterr()
    assert "--network 100 has no effect any more" in printed.err
    assert json.loads(printed.out)["plans"]


def test_json_holds_the_tables_and_every_reason_for_refusal(file, capsys):
    assert main(["plan", file, "--gpus", "8..16", "--gpu", "a100", "--json", "--top", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["predicted"] is True
    assert report["gpu"]["memory"] == 80e9
    assert [plan["gpus"] for plan in report["plans"]] == [8, 16]
    for plan in report["plans"]:
        assert len(plan["layouts"]) == 3
        assert plan["refused"]
        best = plan["layouts"][0]
        assert best["memory_bytes_total"] == pytest.approx(sum(best["memory_bytes"].values()))
        assert best["sent_bytes"]["gradient"] > 0
        assert plan["nearest"] == plan["configured"]
        assert plan["step_seconds"] is None
        assert plan["flops"] > 0
        sizes = best["layout"]
        product = sizes["tensor"] * sizes["context"] * sizes["data"] * sizes["pipeline"]
        assert product == plan["gpus"]


def test_the_keys_of_a_layout_are_valid_overrides(file, capsys):
    assert main(["plan", file, "--gpus", "8", "--gpu", "h200", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["plans"][0]["layouts"][0]["keys"]
    overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    assert main(["config", file, *overrides]) == 0


@pytest.mark.second
def test_a_range_of_gpus_shows_scaling_tables(file, capsys):
    assert main(["plan", file, "--gpus", "8..16", "--gpu", "b200"]) == 0
    output = capsys.readouterr().out
    for wanted in ("strong scaling", "weak scaling", "longer sequences"):
        assert wanted in output
    assert "50,257 ids assumed" in output


@pytest.mark.second
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_computed(
    file, refused, tmp_path, monkeypatch
):
    monkeypatch.setattr("megakernel.analysis.planning.page.page", None)
    out = tmp_path / "file" / "plan.md"
    out.parent.write_text("")
    assert f"--page {out} cannot be written" in refused(
        "plan", file, "--gpus", "8", "--gpu", "h100", "--page", out
    )


def test_a_page_names_its_command_and_the_baselines(file, capsys, tmp_path):
    out = tmp_path / "pages" / "plan.md"
    assert main(["plan", file, "--gpus", "8", "--gpu", "h100", "--page", str(out)]) == 0
    page = out.read_text()
    assert capsys.readouterr().out == page
    assert f"`megakernel plan {file} --gpus 8 --gpu h100 --page {out}`" in page
    assert "Nothing on this page was measured" in page
    assert "## Softmax attention in the same model" in page
    assert "(plan.memory.svg)" in page
    listed = re.findall(r"^\| (configured|#\d) \|", page, re.MULTILINE)
    assert listed[0] == "configured"
    columns = [
        cells.split(" | ")
        for cells in re.findall(r"^\| memory per device, GB \|.*\n.*\n((?:\|.*\n)+)", page, re.M)[
            0
        ].splitlines()
    ]
    memory = {part.strip("| "): [float(cell.strip("| ")) for cell in cells] for part, *cells in columns}
    svg = ElementTree.parse(out.with_name("plan.memory.svg")).getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [rect for rect in svg.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    parts = [part for part in memory if part != "total"]
    assert len(bars) == len(listed) * len(parts)
    limit = next(svg.iter(f"{space}line"))
    left = min(float(bar.get("x")) for bar in bars)
    scale = (float(limit.get("x1")) - left) / 80
    titles = {bar.find(f"{space}title").text: float(bar.get("width")) for bar in bars}
    for number, name in enumerate(listed):
        ends = left
        for part in parts:
            width = titles[f"{name}: {part} {memory[part][number]:.3g} GB"]
            assert width == pytest.approx(memory[part][number] * scale, rel=0.01, abs=0.1)
            ends += width
        assert ends == pytest.approx(left + memory["total"][number] * scale, abs=2)
    words = [element.text for element in svg.iter(f"{space}text")]
    assert "NVIDIA H100 SXM: 80 GB" in words
    assert all(any(word.startswith(f"{part} ") and word.endswith(" GB") for word in words) for part in parts)


def test_a_page_of_a_run_that_fits_nowhere_says_why(file, capsys, tmp_path):
    out = tmp_path / "plan.md"
    huge = [
        "model.hidden_size=32768",
        "model.num_heads=64",
        "model.num_layers=64",
        "training.global_batch_size=1",
    ]
    invalid = ["parallel.tensor=2", "training.micro_batch_size=1"]
    command = ["plan", file, *huge, *invalid, "--gpus", "1", "--gpu", "h100", "--page", str(out)]
    assert main(command) == 0
    assert "No layout fits: needs " in out.read_text()
    assert not (tmp_path / "plan.memory.svg").exists()


@pytest.mark.parametrize(
    ("options", "error"),
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
        (["--gpus", "8", "--gpu", "h100", "--top", "0"], "--top: 0 is out of range"),
        (["--gpus", "8..16", "--gpu", "h100", "--top", "2"], "--top 2 has no effect with a range"),
        (
            ["--gpus", "8", "--gpu", "h100", "--top", "2", "--page", "a.md"],
            "--top 2 has no effect with --page",
        ),
        (
            ["--gpus", "8..16", "--gpu", "h100", "--at", "16", "--json"],
            "--at 16 has no effect with --json",
        ),
        (["--gpus", "8", "--gpu", "h100", "--page", "a.md", "--json"], "--page a.md is Markdown, and --json"),
        (["--gpus", "8", "--gpu", "h100", "--at", "16"], "--at 16 is none of --gpus 8"),
        (["--gpus", "8", "--gpu", "h100", "--network", "0"], "--network: 0 is out of range"),
        (["--gpus", "8", "--gpu", "h100", "--gpus-per-node", "0"], "--gpus-per-node: 0 is out of range"),
        (
            ["--gpus", "8", "--gpu", "h100", "deepspeed={zero_optimization: {offload_optimizer: cpu}}"],
            "deepspeed.zero_optimization={'offload_optimizer': 'cpu'} is not what DeepSpeed reads",
        ),
        (
            ["--gpus", "8", "--gpu", "h100", "training.seq_len=0"],
            "training.seq_len=0 should be greater than 0",
        ),
    ],
)
def test_invalid_options_of_plan_are_refused_in_one_line(file, options, error, refused):
    assert error in refused("plan", file, *options)
