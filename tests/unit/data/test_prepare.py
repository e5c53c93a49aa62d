import argparse
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from rich.console import Console

from data_pipeline import tokenizers
from data_pipeline.document import Document
from data_pipeline.encoding import content_hash
from data_pipeline.manifest import Manifest
from data_pipeline.partial_folder import atomic_folder
from data_pipeline.prepare import PrepareRequest, prepare
from launch import prepare as command
from launch.cli import main
from megakernel.config import UserError
from tests.disk import files_of_at_most
from tests.tiers import tiered
from tests.unit.data.conftest import documents, prepared, write_jsonl

TEXTS = documents(60, seed=6)


def texts_of(folder: Path, split: str) -> list[str]:
    """The documents of a split, from its token files; each ends with the end-of-document token."""
    tokenizer = tokenizers.load(folder / "tokenizer")
    rows = [row.tolist() for row in IndexedDataset(str(folder / split))]
    assert all(row[-1] == tokenizer.eod and row.count(tokenizer.eod) == 1 for row in rows)
    return [tokenizer.decode(row) for row in rows]


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "source.jsonl", TEXTS)


@pytest.fixture(scope="module")
def prepared_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with source.jsonl and a corpus prepared from it per tokenizer."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_jsonl(folder / "source.jsonl", TEXTS)
    for tokenizer in ("byte", "bpe:300"):
        prepared(folder / tokenizer, [str(source)], tokenizer=tokenizer)
    return folder


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_every_document_is_in_exactly_one_split(prepared_folders: Path, tokenizer: str):
    train, validation = (
        texts_of(prepared_folders / tokenizer, "train"),
        texts_of(prepared_folders / tokenizer, "validation"),
    )
    assert train
    assert validation
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in train], "documents keep the order of the source"


def test_the_split_has_the_requested_size_and_is_drawn_by_the_seed(tmp_path: Path):
    source = write_jsonl(tmp_path / "many.jsonl", documents(2000, seed=7))
    prepared(tmp_path / "a", [str(source)], seed=1)
    prepared(tmp_path / "b", [str(source)], seed=2)
    a, b = texts_of(tmp_path / "a", "validation"), texts_of(tmp_path / "b", "validation")
    # Binomial with mean 400 and deviation 18; the hash is fixed, so this can never become flaky.
    assert 330 < len(a) < 470
    assert len(set(a) & set(b)) < 150


def test_copies_of_a_document_are_in_the_same_split(tmp_path: Path):
    source = write_jsonl(tmp_path / "twice.jsonl", [*TEXTS, *reversed(TEXTS)])
    prepared(tmp_path / "out", [str(source)])
    assert not set(texts_of(tmp_path / "out", "train")) & set(texts_of(tmp_path / "out", "validation"))


def test_the_number_of_workers_changes_nothing(prepared_folders: Path, tmp_path: Path):
    request = PrepareRequest(
        source=[str(prepared_folders / "source.jsonl")], tokenizer="byte", validation_fraction=0.2
    )
    three = prepare(request, tmp_path / "three", workers=3, overwrite=False, console=Console(quiet=True))
    assert three is not None
    assert three.splits == Manifest.read(prepared_folders / "byte").splits


def test_the_manifest_describes_the_folder(prepared_folders: Path):
    out, source = prepared_folders / "bpe:300", prepared_folders / "source.jsonl"
    manifest = Manifest.read(out)
    tokenizer = tokenizers.load(out / "tokenizer")
    assert manifest.tokenizer.hash == tokenizer.hash
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert manifest.source == {"kind": "files", "paths": [str(source)], "files": 1}
    for split, record in manifest.splits.items():
        texts, rows = texts_of(out, split), IndexedDataset(str(out / split))
        assert record.documents == len(texts)
        assert record.bytes == sum(len(text.encode()) for text in texts)
        assert record.tokens == sum(len(row) for row in rows)
        assert record.bin.size == (out / f"{split}.bin").stat().st_size
        assert record.bin.sha256 == hashlib.sha256((out / f"{split}.bin").read_bytes()).hexdigest()
        assert record.idx.sha256 == hashlib.sha256((out / f"{split}.idx").read_bytes()).hexdigest()
        assert rows.index.dtype is np.uint16, "a vocabulary below 65,500 needs two bytes per token"


def test_the_standard_library_can_be_prepared(tmp_path: Path):
    manifest = prepared(tmp_path / "out", ["stdlib"], max_documents=20)
    assert manifest.source["kind"] == "stdlib"
    assert sum(record.documents for record in manifest.splits.values()) == 20
    assert any("import" in text for text in texts_of(tmp_path / "out", "train"))


def test_a_prepared_corpus_tokenizer_prepares_the_next_corpus(prepared_folders: Path, tmp_path: Path):
    first, source = Manifest.read(prepared_folders / "bpe:300"), prepared_folders / "source.jsonl"
    second = prepared(
        tmp_path / "out", [str(source)], tokenizer=str(prepared_folders / "bpe:300" / "tokenizer")
    )
    assert second.tokenizer == first.tokenizer
    assert second.splits["train"].bin == first.splits["train"].bin


def test_preparing_again_does_nothing_and_reports_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    arguments = f"--source {source} --tokenizer byte --out {out} --validation-fraction 0.2".split()
    assert run(*arguments, "--workers", 1) == 0
    assert "tokenizer byte, vocabulary 257" in " ".join(capsys.readouterr().err.split())
    written_at = (out / "manifest.json").stat().st_mtime_ns
    assert run(*arguments, "--workers", 2) == 0
    assert "nothing to do" in " ".join(capsys.readouterr().err.split())
    assert (out / "manifest.json").stat().st_mtime_ns == written_at


def test_other_arguments_are_refused_without_overwrite(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    prepared(out, [str(source)])
    with pytest.raises(
        ValueError, match=r"was prepared with seed=0, not 5; choose another --out, or add --overwrite"
    ):
        prepared(out, [str(source)], seed=5)
    request = PrepareRequest(source=[str(source)], tokenizer="byte", validation_fraction=0.2, seed=5)
    assert prepare(request, out, workers=1, overwrite=True, console=Console(quiet=True)) is not None
    assert Manifest.read(out).arguments["seed"] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source.jsonl"]


def test_damage_is_found_when_preparing_again(source: Path, tmp_path: Path):
    prepared(tmp_path / "out", [str(source)])
    tokens = tmp_path / "out" / "train.bin"
    tokens.write_bytes(b"\x01" + tokens.read_bytes()[1:])
    with pytest.raises(
        ValueError, match=r"train\.bin is missing or changed since it was prepared; add --overwrite"
    ):
        prepared(tmp_path / "out", [str(source)])


def test_a_missing_tokenizer_is_found_when_preparing_again(source: Path, tmp_path: Path):
    prepared(tmp_path / "out", [str(source)])
    shutil.rmtree(tmp_path / "out" / "tokenizer")
    with pytest.raises(ValueError, match=r"--out .*out lacks tokenizer/; add --overwrite to make it again"):
        prepared(tmp_path / "out", [str(source)])


@pytest.mark.parametrize("other_file", ["notes.txt", "manifest.json"])
def test_a_folder_that_is_not_a_corpus_is_never_replaced(source: Path, tmp_path: Path, other_file: str):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / other_file).write_text('{"name": "of a browser extension, say"}')
    (tmp_path / "thesis" / "final.tex").write_text("years of work")
    with pytest.raises(
        ValueError, match=r"--out .*thesis exists and is not a prepared folder; choose another --out"
    ):
        run("--source", source, "--tokenizer", "byte", "--out", tmp_path / "thesis", "--overwrite")
    assert (tmp_path / "thesis" / "final.tex").read_text() == "years of work"


@pytest.mark.parametrize("fraction", [1e-6, 1 - 1e-6])
def test_each_split_has_a_document_if_there_are_two(tmp_path: Path, fraction: float):
    texts = documents(5, seed=1)
    source = write_jsonl(tmp_path / "few.jsonl", [*texts, *reversed(texts)])
    small, large = sorted(
        ("train", "validation"), key={"train": 1 - fraction, "validation": fraction}.__getitem__
    )
    prepared(tmp_path / "out", [str(source)], validation_fraction=fraction)
    assert len(texts_of(tmp_path / "out", small)) == 2, "a document and its copy"
    assert len(texts_of(tmp_path / "out", large)) == 8
    # The least hash is the first below a growing bound, so a larger fraction keeps this document.
    reordered = write_jsonl(tmp_path / "reordered.jsonl", texts[::-1])
    prepared(tmp_path / "again", [str(reordered)], validation_fraction=fraction)
    assert set(texts_of(tmp_path / "again", small)) == set(texts_of(tmp_path / "out", small))


def test_a_split_with_documents_is_the_share_of_all_hashes(tmp_path: Path):
    """Corpora of earlier versions, which only had this rule, are prepared the same again."""
    manifest = prepared(tmp_path / "out", [str(write_jsonl(tmp_path / "source.jsonl", TEXTS))])
    held_out = [text for text in TEXTS if content_hash(Document((text,)).content, 0) < 0.2 * 2**64]
    assert texts_of(tmp_path / "out", "validation") == held_out
    # Of the version before this test.
    assert manifest.splits["validation"].bin.sha256.startswith("e32eba4161dbc8e8")


def test_text_that_cannot_be_split_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "one.txt").write_text("one document")
    (tmp_path / "copy.txt").write_text("one document")
    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.prepare.parallel_map", None)
        with pytest.raises(
            ValueError, match=r"--validation-fraction 0\.2 cannot split one document, or several of the same"
        ):
            prepared(tmp_path / "out", [str(tmp_path / "one.txt"), str(tmp_path / "copy.txt")])
    manifest = prepared(tmp_path / "out", [str(tmp_path / "one.txt")], validation_fraction=0.0)
    assert list(manifest.splits) == ["train"]
    assert not (tmp_path / "out" / "validation.bin").exists()


@pytest.mark.parametrize(
    ("options", "explanation"),
    [
        (
            ["--split", "test"],
            r"--split test is of a hub dataset, and --source .* is not hf:NAME; leave it out",
        ),
        (["--include", "*.py"], r"--include \*\.py chooses files of directories, and --source .* names none"),
    ],
)
def test_options_without_effect_are_refused(
    source: Path, tmp_path: Path, options: list[str], explanation: str
):
    with pytest.raises(ValueError, match=explanation):
        run("--source", source, "--tokenizer", "byte", "--out", tmp_path / "out", *options)


@pytest.mark.parametrize(
    ("options", "explanation"),
    [
        (
            "--source task:mqar --text-key body",
            "--text-key body is a column of tables, and --source task:mqar has",
        ),
        ("--source stdlib --text-key body", "--text-key body is a column of tables, and --source stdlib has"),
        ("--source {} --text-key body", r"--text-key body is a column of tables, and --source .*\.txt has"),
        (
            "--source glue:cola:CoLA --text-key body",
            "--text-key body is a column of tables, and --source glue",
        ),
        (
            "--source sparsity --validation-fraction 0.1",
            "--validation-fraction 0.1 splits documents, and --source",
        ),
        (
            "--source lra:text:aclImdb --validation-fraction 0",
            "and --source lra:text:aclImdb is already split",
        ),
    ],
)
def test_options_that_a_source_has_no_use_for_are_refused(tmp_path: Path, options: str, explanation: str):
    (tmp_path / "a.txt").write_text("text")
    words = options.format(tmp_path / "a.txt").split()
    with pytest.raises(ValueError, match=rf"{explanation}.*; leave it out$"):
        run(*words, "--tokenizer", "byte", "--out", tmp_path / "out")


@pytest.mark.second
def test_their_defaults_are_not_refused(tmp_path: Path):
    defaults = "--validation-fraction", 0.02, "--text-key", "text", "--split", "train"
    command = "--source", "sparsity:train=9,validation=9", "--tokenizer", "words", *defaults
    assert run(*command, "--out", tmp_path / "out") == 0


@pytest.mark.second
def test_a_folder_that_records_an_option_without_effect_is_prepared(tmp_path: Path):
    command = "--source", "sparsity:train=9,validation=9", "--tokenizer", "words", "--out", tmp_path / "out"
    run(*command)
    manifest = Manifest.read(tmp_path / "out")
    manifest.arguments["validation_fraction"] = 0.2
    manifest.write(tmp_path / "out")
    assert run(*command) == 0


def test_a_missing_directory_is_named_although_include_is_given(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--source .*nosuch does not exist; give files, a directory"):
        run(
            "--source",
            tmp_path / "nosuch",
            "--include",
            "*.py",
            "--tokenizer",
            "byte",
            "--out",
            tmp_path / "o",
        )


def test_a_prepared_folder_needs_its_source_no_more(tmp_path: Path):
    (tmp_path / "source").mkdir()
    write_jsonl(tmp_path / "source" / "a.jsonl", TEXTS)
    command = "--source", tmp_path / "source", "--include", "*.jsonl", "--tokenizer", "byte"
    run(*command, "--out", tmp_path / "out")
    shutil.rmtree(tmp_path / "source")
    run(*command, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("relative", "absolute"),
    [
        ("task:passkey:filler=f.txt", "task:passkey:filler={}/f.txt"),
        ("task:needle:length=9,filler=a/f.txt,seed=3", "task:needle:length=9,filler={}/a/f.txt,seed=3"),
        ("lra:text:aclImdb", "lra:text:{}/aclImdb"),
        ("lra:listops:./listops-1000", "lra:listops:{}/listops-1000"),
        ("glue:cola:glue, all/CoLA", "glue:cola:{}/glue, all/CoLA"),
    ],
)
def test_the_path_of_a_named_source_does_not_depend_on_the_current_folder(
    relative: str, absolute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def recorded(spec: str) -> list[str]:
        return PrepareRequest(source=[spec], tokenizer="byte").arguments()["source"]

    monkeypatch.chdir(tmp_path)
    assert recorded(relative) == [absolute.format(tmp_path)]
    written = absolute.format("/of/an/earlier/../version")
    assert recorded(written) == [written]


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "stdlib",
            "hf:name:config",
            "task:mqar",
            "task:passkey:filler=sentences,length=9",
            "sparsity:p=0.1",
        ),
        *(
            "lra:listops",
            "lra:listops:",
            "lra:listops:train=9",
            "lra:text:hf:name",
            "glue:cola:hf:name:config",
        ),
    ],
)
def test_a_named_source_without_a_path_is_recorded_as_it_is(spec: str):
    assert PrepareRequest(source=[spec], tokenizer="byte").arguments()["source"] == [spec]


def test_other_data_under_the_same_relative_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f.txt").write_text(f"The text of folder {name}. " * 40)
    command = "--source", "task:passkey:filler=f.txt,length=200", "--tokenizer", "byte", "--max-documents", 9
    monkeypatch.chdir(tmp_path / "one")
    for _ in range(2):
        assert run(*command, "--out", tmp_path / "out") == 0
    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(ValueError, match=r"was prepared with source=\['task:passkey:filler=.*/one/f\.txt"):
        run(*command, "--out", tmp_path / "out")


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_read(tmp_path: Path):
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt"))
    source.write_text("text")
    with pytest.raises(ValueError, match=r"--source '.*\\udcff\.txt' is not UTF-8; rename it"):
        prepared(tmp_path / "out", [str(source)])


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_an_invalid_validation_fraction_is_refused(source: Path, tmp_path: Path, fraction: float):
    with pytest.raises(ValueError, match=rf"--validation-fraction {fraction} must lie in \[0, 1\)"):
        prepared(tmp_path / "out", [str(source)], validation_fraction=fraction)


@pytest.mark.parametrize("option", ["--workers", "--max-documents"])
def test_counts_below_one_are_usage_errors(source: Path, tmp_path: Path, option: str):
    with pytest.raises(SystemExit) as exit_:
        run("--source", source, "--tokenizer", "byte", "--out", tmp_path / "out", option, 0)
    assert exit_.value.code == 2


def test_a_failed_prepare_leaves_no_files(tmp_path: Path):
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n' * 5000 + '{"text": \n' * 20)
    with pytest.raises(ValueError, match=r"broken\.jsonl cannot be read"):
        prepared(tmp_path / "data" / "out", [str(tmp_path / "broken.jsonl")])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt holds no text; give files with text"):
        prepared(tmp_path / "data" / "out", [str(tmp_path / "empty.txt")])
    assert list((tmp_path / "data").iterdir()) == []


def start(folder: Path, *arguments: str, source: str = "stdlib") -> subprocess.Popen[bytes]:
    """`prepare` of a source to `folder`/data/out, in a process that the test may kill."""
    (folder / "data").mkdir()
    program = (
        "import argparse, launch.prepare as c; p = argparse.ArgumentParser(); c.add_arguments(p)\n"
        "if __name__ == '__main__': c.run(p.parse_args())"
    )
    (folder / "main.py").write_text(program)
    options = ["--source", source, "--tokenizer", "byte", "--out", str(folder / "data" / "out"), *arguments]
    return subprocess.Popen(
        [sys.executable, str(folder / "main.py"), *options],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        # A shell starts background processes, which may include these tests, with SIGINT ignored; nohup, with SIGHUP.
        preexec_fn=lambda: [signal.signal(sent, signal.SIG_DFL) for sent in (signal.SIGINT, signal.SIGHUP)],
    )


def wait_for(process: subprocess.Popen[bytes], folder: Path, pattern: str) -> None:
    while not list(folder.glob(pattern)):
        with pytest.raises(subprocess.TimeoutExpired):  # it is still running
            process.wait(timeout=0.02)


@pytest.mark.parametrize(
    "sent", tiered([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], [signal.SIGTERM, signal.SIGINT])
)
def test_a_prepare_that_is_interrupted_before_it_has_finished_a_file_leaves_no_files(
    tmp_path: Path, sent: signal.Signals
):
    # One file, which takes seconds: of many, the first may be finished before the signal arrives.
    large = tmp_path / "large.jsonl"
    large.write_text(json.dumps({"text": "word " * 200}) + "\n", encoding="utf-8")
    large.write_bytes(large.read_bytes() * 60_000)
    process = start(tmp_path, source=str(large))
    wait_for(process, tmp_path / "data", ".out.partial-*")
    process.send_signal(sent)
    assert process.wait() != 0
    assert list((tmp_path / "data").iterdir()) == []


def test_a_killed_prepare_leaves_no_processes_and_its_folder_is_named_later(
    source: Path, tmp_path: Path, capsys
):
    process = start(tmp_path, "--workers", "2")
    wait_for(process, tmp_path / "data", ".out.partial-*/train.bin")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) >= 2
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while any(map(_runs, workers)):
        assert time.monotonic() < until
        time.sleep(0.05)
    [left] = (tmp_path / "data").iterdir()
    options = ["--tokenizer", "byte", "--validation-fraction", 0, "--out", tmp_path / "data" / "out"]
    assert run("--source", source, *options) == 0
    assert (
        f"{left} belongs to another `megakernel prepare`; delete it if none is running"
        in capsys.readouterr().err
    )


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_is_reported_with_the_remedy(tmp_path: Path):
    process = start(tmp_path, "--workers", "2")
    wait_for(process, tmp_path / "data", ".out.partial-*/train.bin")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    _, stderr = process.communicate()
    remedy = b"most likely out of memory; set fewer, or give shorter documents"
    assert b"one of --workers 2 was killed, " + remedy in stderr
    for left in (tmp_path / "data").iterdir():  # unless it was killed before a file was finished
        assert f"{left} keeps the files that are finished" in " ".join(stderr.decode().split())


def test_a_folder_that_another_process_made_meanwhile_is_kept(tmp_path: Path):
    out = tmp_path / "out"

    def write(text: str, meanwhile: Callable[[], None]) -> None:
        with atomic_folder(out) as folder:
            (folder / "a").write_text(text)
            meanwhile()  # with the same process id, as in another container

    with pytest.raises(ValueError, match=r"out was made by another process meanwhile; name another folder"):
        write("first", lambda: write("second", lambda: None))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "a").read_text() == "second"


@pytest.mark.parametrize("meanwhile", ["another process", "an error"])
def test_a_failed_replacement_loses_nothing_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
):
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    (out / "a").write_text("old")

    def fail(path: Path, target: Path) -> Path:
        if target == out and path.name.startswith(".out.partial-"):
            if meanwhile == "an error":
                raise OSError(errno.EIO, "broken disk")
            out.mkdir()
            (out / "a").write_text("new")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises((OSError, ValueError)), atomic_folder(out, overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "a").read_text() == ("old" if meanwhile == "an error" else "new")


def test_a_symbolic_link_is_kept_and_its_target_replaced(source: Path, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out"
    prepared(tmp_path / "disk" / "real", [str(source)])
    link.symlink_to(tmp_path / "disk" / "real")
    (tmp_path / "disk" / ".real.replaced").mkdir()
    (tmp_path / "disk" / ".real.replaced" / "left").write_text("by an earlier version that was killed")
    options = ["--tokenizer", "byte", "--validation-fraction", 0, "--overwrite", "--workers", 1]
    assert run("--source", source, "--out", link, *options) == 0
    assert Manifest.read(tmp_path / "disk" / "real").arguments["validation_fraction"] == 0
    assert link.is_symlink()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == [".real.replaced", "real"]


def test_a_link_that_leads_nowhere_is_refused(source: Path, tmp_path: Path):
    link, disk = tmp_path / "out", tmp_path / "unmounted" / "disk"
    link.symlink_to(disk)
    with pytest.raises(
        UserError, match=f"{link} is a link to {disk}, which does not exist; make it, or name"
    ):
        run("--source", source, "--out", link, "--tokenizer", "byte", "--workers", 1)
    assert not disk.parent.exists()


@pytest.mark.parametrize(("tokenizer", "space"), [("byte", 4000), ("byte", 10), ("bpe:300", 1000)])
def test_a_full_disk_is_reported_in_one_line_and_leaves_no_files(
    source: Path, tmp_path: Path, capsys, tokenizer: str, space: int
):
    out = tmp_path / "data/out"
    arguments = ["--source", str(source), "--tokenizer", tokenizer, "--out", str(out), "--workers", "1"]
    with files_of_at_most(space):
        assert main(["prepare", *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"megakernel: error: --out {out} cannot be written (")
    assert line.endswith("make it writable, free space or choose another --out")
    assert list(out.parent.iterdir()) == []
