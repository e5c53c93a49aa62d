import json
import os
from dataclasses import asdict, replace

import pytest

from launch.slurm import collectives
from launch.slurm.preflight import NodeReport, node_report, read_reports, unfit_by_report, unfit_nodes
from launch.slurm.slow_nodes import Timing

FIT = NodeReport("n1", 1e9, 64 << 30, [0.0, 0.01], None, {"python": "3.11.2", "torch": "2.13.0"})
NODES = ["n1", "n2", "n3"]


def reports(**changes):
    found = {node: replace(FIT, node=node) for node in NODES}
    return {**found, "n2": replace(found["n2"], **changes)}


def test_nodes_with_equal_reports_are_fit():
    assert unfit_by_report(reports(), gpus_per_node=2) == {}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpus": [0.0]}, "1 of 2 GPUs can be seen"),
        ({"gpus": [0.0, 0.5]}, "1 GPUs are in use (50% of their memory)"),
        ({"memory": 1 << 30}, "1.0 GiB of memory are free"),
        (
            {"unwritable": "Read-only file system"},
            "the run's folder cannot be written (Read-only file system)",
        ),
        ({"time": 1e9 + 90}, "its clock is +90 s off"),
        ({"versions": {**FIT.versions, "torch": "2.12.0"}}, "torch is 2.12.0 and 2.13.0 elsewhere"),
    ],
)
def test_an_unfit_node_is_named_with_the_reason(changes, why):
    assert unfit_by_report(reports(**changes), gpus_per_node=2) == {"n2": why}


def test_a_node_without_a_gpu_driver_needs_no_gpus():
    assert unfit_by_report(reports(gpus=None), gpus_per_node=2) == {}


def test_reports_are_read_from_the_output_and_missing_ones_are_named():
    lines = ["Welcome to n1!", json.dumps(asdict(FIT)), json.dumps({"node": "n2"})]
    found = read_reports(lines, ["n1", "n2"])
    assert found == {"n1": FIT, "n2": None}
    assert unfit_by_report(found, gpus_per_node=0) == {"n2": "sent no report"}
    assert unfit_by_report(read_reports([], ["n1", "n2"]), 0) == {}, "no single node is to blame"


def test_a_slow_pair_with_an_unfit_node_is_blamed_on_the_unfit_node():
    unwritable = replace(FIT, node="n2", unwritable="Read-only file system")
    slow = [Timing(rank, node, ["n1", "n2"], 9.0) for rank, node in enumerate(["n1", "n2"])]
    lines = [json.dumps(asdict(one)) for one in (FIT, unwritable, *slow)]
    found = unfit_nodes(lines, ["n1", "n2"], gpus_per_node=2, seconds=1)
    assert found == {"n2": "the run's folder cannot be written (Read-only file system)"}
    lines = [json.dumps(asdict(one)) for one in (FIT, replace(FIT, node="n2"), *slow)]
    assert set(unfit_nodes(lines, ["n1", "n2"], gpus_per_node=2, seconds=1)) == {"n1", "n2"}
    assert unfit_nodes(lines, ["n1", "n2"], gpus_per_node=2, seconds=10) == {}


def test_a_failing_all_reduce_does_not_hide_the_reason_in_a_report():
    short = replace(FIT, node="n2", gpus=[0.0])
    failed = Timing(1, "n2", ["n2"], None, "CUDA error: invalid device ordinal")
    lines = [json.dumps(asdict(one)) for one in (FIT, short, failed)]
    found = unfit_nodes(lines, ["n1", "n2"], gpus_per_node=2, seconds=1)
    assert found == {"n2": "1 of 2 GPUs can be seen"}


def test_a_node_reports_its_own_state(tmp_path):
    report = node_report(tmp_path, "n1")
    assert report.unwritable is None
    assert report.memory > 0
    assert report.versions["torch"] != "not installed"
    assert list(tmp_path.iterdir()) == []
    assert "No such file" in (node_report(tmp_path / "elsewhere", "n1").unwritable or "")


def test_memory_that_a_gpu_does_not_report_counts_as_free(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1024, 81559'\necho '[N/A], [N/A]'\necho '0, 0'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert node_report(tmp_path, "n1").gpus == [0.013, 0.0, 0.0]


@pytest.mark.parametrize(
    ("visible", "arguments"),
    [("4,5", "--id=4,5"), ("GPU-1a,GPU-2b", "--id=GPU-1a,GPU-2b"), ("MIG-1a", ""), ("", ""), (None, "")],
)
def test_gpus_of_other_jobs_are_not_counted(visible, arguments, tmp_path, monkeypatch):
    """On a node whose devices are not constrained, nvidia-smi shows all of them."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nshift 2\n[ "$*" = "{arguments}" ] && echo "0, 81559"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert node_report(tmp_path, "n1").gpus == [0.0]


@pytest.mark.parametrize(("visible", "fit"), [("0", True), ("0,1", False)])
def test_a_node_whose_tasks_see_one_gpu_each_is_fit(visible, fit, tmp_path, monkeypatch):
    """As under `--gpus-per-task=1`; a node of which one of two GPUs is gone is not."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 81559'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    report = replace(node_report(tmp_path, "n1", tasks=2), memory=2**40)
    assert unfit_by_report({"n1": report}, 2) == ({} if fit else {"n1": "1 of 2 GPUs can be seen"})


def test_a_failure_fits_one_line_of_srun():
    reason = collectives._one_line(RuntimeError("日" * 4000))
    failed = Timing(8191, "h" * 64, ["h" * 64, "i" * 64], None, reason)  # the longest possible host names
    assert len(json.dumps(asdict(failed))) < 1024
