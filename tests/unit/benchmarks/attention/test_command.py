"""`python -m benchmarks.kernels.attention`, end to end on a CPU."""

import pytest
import torch

from benchmarks.kernels.attention import SUITES, machine, measuring
from benchmarks.kernels.attention.__main__ import main as attention
from benchmarks.page import run_main
from launch.cli import main as megakernel
from megakernel.config import RunFailed


@pytest.fixture(autouse=True)
def small_device_measurements(monkeypatch):
    """Measure the limits of the device on small inputs, since these tests do not need them."""
    monkeypatch.setitem(machine.MULTIPLIED, "cpu", 64)
    monkeypatch.setitem(machine.COPIED, "cpu", 2**16)


def main(arguments):
    """The exit status of the command."""
    return run_main(lambda: attention(arguments))


CPU_SUITE = ["--suite", "cpu"]
ONE_RUN = [*CPU_SUITE, "--repeats", "1", "--max-tokens"]


def tables(page):
    """The cells of all tables, row by row, without separator rows."""
    found, inside = [], False
    for line in page.splitlines():
        if line.startswith("| ---"):
            continue
        if line.startswith("|"):
            if not inside:
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        inside = line.startswith("|")
    return found


@pytest.mark.second
def test_the_cpu_suite_writes_a_table_of_its_measurements(tmp_path, capsys):
    out = tmp_path / "results" / "page.md"
    assert main([*ONE_RUN, "2048", "--only", "FLuRKA", "--out", str(out)]) == 0
    page = out.read_text()
    assert capsys.readouterr().out == page
    assert (
        "python -m benchmarks.kernels.attention --suite cpu --repeats 1 --max-tokens 2048 --only FLuRKA`"
        in page
    )
    assert f"torch {torch.__version__}" in page
    assert "GB/s" in page
    assert "* FLuRKA: a doubling of N costs at most " in page
    short, long = tables(page)
    assert len(short) == len(long) == 2
    assert all(len(row) == len(short[0]) for row in (*short, *long))
    measured = dict(zip(long[0], long[1]))
    assert measured["implementation"] == "FLuRKA"
    assert float(measured["forward + backward ms"].replace(",", "")) > 0
    assert measured["time per doubling"].endswith("x")
    assert float(measured["error"]) <= 1e-5


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--repeats", "0"], "--repeats 0 measures nothing; set at least 1"),
        (["--suite", "cpu", "--max-tokens", "1000"], "--max-tokens 1000 leaves no case; set at least 1024"),
        (["--suite", "cpu", "--min-tokens", "50000"], "--min-tokens 50000 leaves no case; set at most 32768"),
        (
            ["--suite", "cpu", "--min-tokens", "3000", "--max-tokens", "2000"],
            "--min-tokens 3000 leaves no case; set at most 2000",
        ),
        (
            ["--suite", "cpu", "--only", "flash"],
            "--only 'flash' is no implementation of the suite; choose among kernel elu",
        ),
    ],
)
def test_invalid_options_of_bench_are_refused_in_one_line(options, error, capsys):
    assert main(options) == 2
    assert error in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_suite_without_a_gpu_is_refused(capsys):
    assert main(["--suite", "default"]) == 2
    assert "needs a GPU and torch sees none; take --suite cpu" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_default_suite_measures_all_implementations_on_a_gpu(tmp_path):
    out = tmp_path / "page.md"
    command = ["--suite", "default", "--max-tokens", "16384", "--repeats", "2"]
    selection = [part for name in ("kernel elu", "FLuRKA", "SDPA") for part in ("--only", name)]
    assert main([*command, *selection, "--out", str(out)]) == 0
    page = out.read_text()
    assert f"{torch.cuda.get_device_name()}, bfloat16; driver " in page
    for table in tables(page):
        assert [row[0] for row in table] == ["implementation", "kernel elu", "FLuRKA", "SDPA"]


@pytest.mark.gpu
def test_whole_layers_at_the_papers_smallest_size_are_measured_on_a_gpu(tmp_path):
    out = tmp_path / "page.md"
    command = ["--suite", "paper", "--max-tokens", "7500", "--repeats", "2"]
    assert main([*command, "--out", str(out)]) == 0
    assert len(tables(out.read_text())) == 2  # the first cases of figure 3 and of appendix C


def test_no_page_is_written_after_a_failed_check(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise RunFailed("kernel elu is wrong")

    monkeypatch.setattr(measuring, "_row", fail)
    out = tmp_path / "page.md"
    assert main([*CPU_SUITE, "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "kernel elu is wrong" in captured.err
    assert not out.exists()


@pytest.mark.second
def test_results_so_far_are_kept_if_the_measurement_ends_early(tmp_path, monkeypatch):
    measure, measured = measuring._row, []

    def interrupted(*args):
        if measured:
            raise KeyboardInterrupt
        measured.append(measure(*args))
        return measured[0]

    monkeypatch.setattr(measuring, "_row", interrupted)
    out = tmp_path / "page.md"
    command = [*ONE_RUN, "1024", "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        main(command)
    assert not out.exists()
    [[_, row]] = tables((tmp_path / "page.md.partial").read_text())
    assert row[0] == measured[0].implementation
    monkeypatch.undo()
    assert main([*command, "--only", "kernel elu"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.md"]


def test_a_page_that_cannot_be_written_is_refused_before_the_measurements(tmp_path, capsys):
    command = [*ONE_RUN, "1024", "--out"]
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "page.md"):
        assert main([*command, str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"--out {out} cannot be written" in captured.err


def test_every_case_of_a_suite_is_valid_for_its_implementations():
    """Checks only shapes, so that a suite's cases are known to be valid before a GPU is available."""
    from benchmarks.kernels.attention.cases import lower_bound
    from benchmarks.kernels.attention.implementations import IMPLEMENTATIONS

    for suite in SUITES.values():
        for case in suite.cases:
            assert all(
                lower_bound(IMPLEMENTATIONS[name].preset, case, 2, True).flops > 0
                for name in suite.implementations
            )


def test_dev_bench_runs_the_module(capfd):
    assert megakernel(["dev", "bench", "attention", "--repeats", "0"]) == 2
    assert "--repeats 0 measures nothing; set at least 1" in capfd.readouterr().err
