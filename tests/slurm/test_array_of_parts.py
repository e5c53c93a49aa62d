"""A job array prepares the parts of one source, and another job merges them."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from data_pipeline.manifest import Manifest
from launch.cli import main
from tests.slurm.submitting import megakernel, submit, until, until_state

pytestmark = pytest.mark.second

WORDS = "prepare --source texts --tokenizer byte --workers 1 --validation-fraction 0.1"


def process_of_part(part: str) -> int | None:
    """Process id of the `prepare` of a part, if it runs."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if (
                b"launch.cli" in words
                and b"--part" in words
                and words[words.index(b"--part") + 1] == part.encode()
            ):
                return int(folder.name)
    return None


def test_the_parts_are_the_whole_source_also_if_one_is_killed(place):
    Path("texts").mkdir()
    for number in range(6):
        rows = [json.dumps({"text": f"{number} {row} " + "word " * 400}) for row in range(8_000)]
        Path("texts", f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    assert main([*WORDS.split(), "--out", "whole"]) == 0
    array = f"--cluster slurm -G 0 --name parts -- {WORDS} --part %a/3 --out part-%a"
    submit("--array 0-2", array)
    until(lambda: [*Path().glob(".part-1.partial-*/progress.json")])
    process = process_of_part("1/3")
    assert process is not None
    os.kill(process, signal.SIGKILL)
    # The job is requeued, or given up: then the same command goes on.
    if until_state("parts-1", "COMPLETED", "FAILED")["state"] == "FAILED":
        submit("--array 1", array)
    for number in range(3):
        assert until_state(f"parts-{number}", "COMPLETED", "FAILED")["state"] == "COMPLETED"
    logs = "".join(path.read_text() for path in Path("runs/parts-1/logs").rglob("*.err"))
    assert "of 2 files are finished" in logs, "it went on where it was killed"
    # A job's command is expanded by no shell.
    submit("--cluster slurm -G 0 --name merged -- merge part-* --out merged")
    assert until_state("merged", "COMPLETED", "FAILED")["state"] == "COMPLETED", megakernel("logs merged").out
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert Path("merged", name).read_bytes() == Path("whole", name).read_bytes()
    assert Manifest.read(Path("merged")).splits == Manifest.read(Path("whole")).splits
