"""A `prepare` that is killed goes on from the last source file that it finished, with the same result."""

import filecmp
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_pipeline import prepare as module
from data_pipeline import sources, tokenizers
from data_pipeline.manifest import Manifest
from data_pipeline.prepare import PrepareRequest, prepare
from tests.chats import CHATML, save_tokenizer
from tests.unit.data.conftest import documents
from tests.unit.data.test_prepare import _runs, start, wait_for


class Killed(BaseException):
    """What a test raises where a process would be killed."""


def write_sources(folder: Path, files: int = 4) -> Path:
    """Tables with a bad row each, which are large enough for progress to be saved at the end of each."""
    folder.mkdir()
    for number in range(files):
        rows = [{"text": text, "kind": index % 3} for index, text in enumerate(documents(700, seed=number))]
        lines = [json.dumps(row) for row in rows]
        lines[number] = '{"text": 5}'
        (folder / f"{number}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def run(source: Path, out: Path, **options: Any) -> str:
    """What `prepare` says."""
    console = Console(file=io.StringIO(), width=1000)
    fields = {"tokenizer": "byte", "validation_fraction": 0.2, **options}
    request = PrepareRequest(source=[str(source)], **fields)
    prepare(request, out, workers=1, overwrite=False, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def killed_at(monkeypatch: pytest.MonkeyPatch, batch: int, act: Callable[[], None]) -> None:
    """Let `prepare` do `act` before it gets the result of this batch."""
    parallel_map = module.parallel_map

    def interrupted(*arguments: Any) -> Iterator[Any]:
        for number, result in enumerate(parallel_map(*arguments)):
            if number == batch:
                act()
            yield result

    monkeypatch.setattr(module, "parallel_map", interrupted)


def fail() -> None:
    raise Killed


def same(one: Path, other: Path) -> bool:
    """Whether both prepared folders hold the same bytes, except for when they were made."""
    names = sorted(str(file.relative_to(one)) for file in one.rglob("*") if file.is_file())
    assert names == sorted(str(file.relative_to(other)) for file in other.rglob("*") if file.is_file())
    names.remove("manifest.json")
    _, different, missing = filecmp.cmpfiles(one, other, names, shallow=False)
    manifests = [Manifest.read(folder).model_dump(exclude={"created"}) for folder in (one, other)]
    return not different and not missing and manifests[0] == manifests[1]


@pytest.fixture(autouse=True)
def save_at_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk is."""
    monkeypatch.setattr(module, "_SHARE_OF_SAVING", float("inf"))


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, 3),
        pytest.param({"labels": "kind"}, 1, marks=pytest.mark.second),
        ({"max_documents": 2000}, 2),
        pytest.param({"tokenizer": "bpe:300"}, 2, marks=pytest.mark.second),
    ],
    ids=["byte", "labels", "max_documents", "bpe"],
)
def test_it_goes_on_from_the_last_finished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], batch: int
):
    source = write_sources(tmp_path / "source")
    run(source, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        killed_at(patch, batch, fail)
        with pytest.raises(Killed):
            run(source, tmp_path / "out", **options)
    [left] = tmp_path.glob(".out.partial-*")
    read: list[str] = []
    with monkeypatch.context() as patch:
        read_rows = sources.Files._read_rows
        patch.setattr(
            sources.Files,
            "_read_rows",
            lambda files, file: (read.append(file.path.name), read_rows(files, file))[1],
        )
        output = run(source, tmp_path / "out", **options)
    assert f"goes on from {left}: {batch} of 4 files are finished" in output
    assert set(read) == {f"{number}.jsonl" for number in range(batch, 3 if "max_documents" in options else 4)}
    assert same(tmp_path / "whole", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "whole"]


@pytest.mark.second
def test_many_small_files_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Progress is saved at the ends of some of them, wherever the batches end."""
    (tmp_path / "source").mkdir()
    for number in range(60):
        text = "".join(f"{number} {index}\n" for index in range(1 + number * 37 % 900))
        (tmp_path / "source" / f"{number:02}.txt").write_text(text * (1 + number % 7 * 3))
    run(tmp_path / "source", tmp_path / "whole")
    for batch in (3, 5, 1):
        with monkeypatch.context() as patch:
            killed_at(patch, batch, fail)
            with pytest.raises(Killed):
                run(tmp_path / "source", tmp_path / "out")
    assert "of 60 files are finished" in run(tmp_path / "source", tmp_path / "out")
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.second
def test_it_may_be_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_sources(tmp_path / "source")
    run(source, tmp_path / "whole")
    for finished in range(4):
        with monkeypatch.context() as patch:
            killed_at(patch, 1, fail)
            if finished < 3:
                with pytest.raises(Killed):
                    run(source, tmp_path / "out")
            else:
                assert "3 of 4 files are finished" in run(source, tmp_path / "out")
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.second
def test_chats_that_were_rejected_before_are_still_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    template = CHATML + "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = save_tokenizer(template, tmp_path / "tokenizer")
    (tmp_path / "source").mkdir()
    for number in range(3):
        answer = {"role": "assistant", "content": "Hello! " * 200}
        chats = [[{"role": "user", "content": f"{number} {index}"}, answer] for index in range(100)]
        chats[7] = [{"role": "user", "content": "no"}, answer]
        lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
        (tmp_path / "source" / f"{number}.jsonl").write_text("".join(lines))
    options = {"tokenizer": str(tokenizer), "chat": True, "text_key": "messages"}
    run(tmp_path / "source", tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        killed_at(patch, 1, fail)
        with pytest.raises(Killed):
            run(tmp_path / "source", tmp_path / "out", **options)
    run(tmp_path / "source", tmp_path / "out", **options)
    assert same(tmp_path / "whole", tmp_path / "out")
    assert Manifest.read(tmp_path / "out").skipped == {"bad row": 3}


@pytest.mark.second
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 5}, "seed=0, not 5"),
        pytest.param({"tokenizer": "words"}, "tokenizer='byte', not 'words'", marks=pytest.mark.second),
        ("touch", "other files"),
        ("append", "other files"),
    ],
)
def test_another_request_starts_anew_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, difference: str
):
    source = write_sources(tmp_path / "source")
    with monkeypatch.context() as patch:
        killed_at(patch, 2, fail)
        with pytest.raises(Killed):
            run(source, tmp_path / "out")
    [left] = tmp_path.glob(".out.partial-*")
    if change == "touch":
        os.utime(source / "0.jsonl", (1, 1))
    elif change == "append":
        with (source / "3.jsonl").open("a") as stream:
            stream.write('{"text": "more", "kind": 1}\n')
    options = change if isinstance(change, dict) else {}
    output = run(source, tmp_path / "out", **options)
    left_alone = (
        f"{left} belongs to another `megakernel prepare`; delete it if none is running. It was stopped"
    )
    assert left_alone in output
    assert f"It was stopped, and had {difference}: this one starts anew" in output
    assert left.is_dir(), "it may be gone on with"
    run(source, tmp_path / "whole", **options)
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.second
def test_two_at_once_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_sources(tmp_path / "source")
    outputs: list[str] = []

    def meanwhile() -> None:
        monkeypatch.undo()
        outputs.append(run(source, tmp_path / "out"))

    killed_at(monkeypatch, 2, meanwhile)
    with pytest.raises(ValueError, match=r"out was made by another process meanwhile"):
        run(source, tmp_path / "out")
    [output] = outputs
    assert "belongs to another `megakernel prepare`; delete it if none is running\n" in output
    assert "goes on" not in output
    run(source, tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "whole"]


def test_too_many_bad_rows_at_the_end_lose_no_finished_file(tmp_path: Path):
    source = write_sources(tmp_path / "source")
    (source / "4.jsonl").write_text('{"text": 5}\n' * 50)
    with pytest.raises(ValueError, match=r"54 of 2,850 rows are bad"):
        run(source, tmp_path / "out")
    console = Console(file=io.StringIO(), width=1000)
    request = PrepareRequest(source=[str(source)], tokenizer="byte", validation_fraction=0.2)
    prepare(request, tmp_path / "out", workers=1, overwrite=False, console=console, max_bad_rows=0.02)
    assert "5 of 5 files are finished" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.second
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_the_same_command_goes_on_after_a_signal(tmp_path: Path, sent: signal.Signals):
    process = start(tmp_path, "--workers", "1")
    wait_for(process, tmp_path / "data", ".out.partial-*/progress.json")
    process.send_signal(sent)
    _, stderr = process.communicate()
    [left] = (tmp_path / "data").iterdir()
    if sent == signal.SIGTERM:
        assert process.returncode == 128 + sent
        assert "keeps the files that are finished; the same command goes on from there" in " ".join(
            stderr.decode().split()
        )
    again = subprocess.run([*process.args, "--workers", "2"], capture_output=True, text=True, check=True)
    assert "files are finished" in " ".join(again.stderr.split())
    whole = [argument.replace("data/out", "whole") for argument in process.args]
    subprocess.run(whole, capture_output=True, check=True)
    assert same(tmp_path / "whole", tmp_path / "data" / "out")
    assert not left.exists()


@pytest.mark.second
@pytest.mark.parametrize("call", ["training", "encoding"])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_a_long_native_call(tmp_path: Path, sent: signal.Signals, call: str):
    """Each call would take minutes: the merges of many long words, and the one batch of a large text."""
    words = " ".join("".join(random_letters(500, number)) for number in range(4_000))
    (tmp_path / "long.txt").write_text(words * (1 if call == "training" else 30))
    tokenizer = "bpe:200000"
    if call == "encoding":
        tokenizers.train_bpe([words[:50_000]], 2_000).save(tmp_path / "tokenizer")
        tokenizer = str(tmp_path / "tokenizer")
    options = ["--source", str(tmp_path / "long.txt"), "--tokenizer", tokenizer, "--validation-fraction", "0"]
    process = start(tmp_path, *options, "--workers", "1")
    try:
        # The second child, after the resource tracker of multiprocessing.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(pids := children.read_text().split()) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        while seconds_of(pids[-1]) < 10:  # imports and reading take less
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(sent)
        started = time.monotonic()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    while _runs(pids[-1]):
        assert time.monotonic() - started < 20, "it takes less than one second; the call would take minutes"
        time.sleep(0.05)
    if sent != signal.SIGKILL:
        assert list((tmp_path / "data").iterdir()) == []


def random_letters(count: int, seed: int) -> list[str]:
    return random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=count)


def seconds_of(pid: str) -> float:
    """CPU seconds of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)
