"""`prepare --part I/N`: of what the jobs of an array prepare, `megakernel merge` makes the folder of the source."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console

from data_pipeline import samples
from data_pipeline.manifest import Manifest
from data_pipeline.merge import merge
from data_pipeline.prepare import PrepareRequest, prepare
from tests.unit.data.conftest import documents, prepared, write_jsonl
from tests.unit.data.test_prepare import start, wait_for

FILES = ("train.bin", "train.idx", "validation.bin", "validation.idx")


def write_sources(folder: Path, sizes: tuple[int, ...]) -> Path:
    """Tables of so many documents, and between them a file that is left out."""
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        write_jsonl(folder / f"{number:03}.jsonl", documents(size, seed=number))
    (folder / "001.pdf").write_bytes(b"%PDF-1.7")
    return folder


def merged(folders: list[Path], out: Path) -> Path:
    assert merge(folders, out, overwrite=False, console=Console(quiet=True)) is not None
    return out


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((40, 40, 40, 40), 2),
        ((300, 1, 1, 1), 4),
        pytest.param((1, 1, 200, 1, 50), 3, marks=pytest.mark.second),
    ],
)
def test_the_parts_are_the_whole_source_in_its_order(tmp_path, sizes, count):
    source = [str(write_sources(tmp_path / "source", sizes))]
    prepared(tmp_path / "whole", source)
    for number in range(count):
        prepared(tmp_path / f"web-{number}", source, part=f"{number}/{count}")
    # In whatever order they are given, such as that of a pattern, in which web-10 is before web-2.
    parts = [tmp_path / f"web-{number}" for number in reversed(range(count))]
    web = merged(parts, tmp_path / "web")
    for name in FILES:
        assert (web / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert Manifest.read(web).splits == Manifest.read(tmp_path / "whole").splits
    files = [Manifest.read(part).source["files"] for part in parts]
    assert sum(files) == len(sizes)
    assert min(files) > 0
    left_out = [Manifest.read(part).source.get("left_out", {}) for part in parts]
    assert sum(bool(one) for one in left_out) == 1, "the PDF is told of once"


def test_parts_have_about_the_same_size(tmp_path):
    source = [str(write_sources(tmp_path / "source", (30,) * 20 + (120,) * 5))]
    tokens = []
    for number in range(4):
        manifest = prepared(tmp_path / f"web-{number}", source, part=f"{number}/4", validation_fraction=0.0)
        tokens.append(manifest.splits["train"].tokens)
    assert max(tokens) < 1.5 * sum(tokens) / 4


def test_a_missing_part_and_one_of_other_files_are_refused(tmp_path, refused):
    folder = write_sources(tmp_path / "source", (40, 40, 40))
    for number in range(3):
        prepared(tmp_path / f"web-{number}", [str(folder)], part=f"{number}/3")
    web = [tmp_path / f"web-{number}" for number in range(3)]
    line = refused("merge", web[0], web[2], "--out", tmp_path / "web")
    assert (
        f"{web[0]} is one of 3 parts of a source, and part 1 is not given; prepare it with --part 1/3" in line
    )
    shutil.copytree(web[1], tmp_path / "again")
    line = refused("merge", *web, tmp_path / "again", "--out", tmp_path / "web")
    assert f"{tmp_path / 'again'} and {web[1]} are both part 1/3; leave one out" in line
    # A file more, while the array runs: another part of it would be in none, or in two.
    write_jsonl(folder / "999.jsonl", documents(5, seed=9))
    prepared(tmp_path / "changed", [str(folder)], part="1/3")
    line = refused("merge", web[0], tmp_path / "changed", web[2], "--out", tmp_path / "web")
    assert "part 1 is not given, because the source's files changed between the parts" in line
    assert not (tmp_path / "web").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"part": "3/3"}, "--part 3/3 is no part; write I/N, with I from 0 to N - 1"),
        ({"part": "one"}, "--part one is no part"),
        (
            {"part": "0/9"},
            "the source has 3 files that are read, and a part has at least one; give at most 3 parts",
        ),
        ({"part": "0/2", "tokenizer": "bpe:300"}, "--tokenizer bpe:300 would be another one for each part"),
        ({"part": "0/2", "labels": "id"}, "`megakernel merge` joins no labelled folders"),
        (
            {"part": "0/2", "max_documents": "5"},
            "--max-documents 5 counts those of the whole source; leave it out",
        ),
        ({"part": "0/2", "source": "hf:c4"}, "--part 0/2 chooses files, and --source hf:c4 has none"),
        ({"part": "0/2", "source": "task:passkey", "max_documents": None}, "--part 0/2 chooses files"),
    ],
)
def test_what_has_no_parts_is_refused_with_the_remedy(tmp_path, refused, options, reason):
    source = write_sources(tmp_path / "source", (5, 5, 5))
    given = {"source": source, "tokenizer": "byte", "out": tmp_path / "web", **options}
    words = [word for key, value in given.items() if value for word in (f"--{key.replace('_', '-')}", value)]
    assert reason in refused("prepare", *words)
    assert not (tmp_path / "web").exists()


@pytest.mark.second
def test_a_part_that_is_killed_goes_on_and_the_parts_are_the_whole_source(tmp_path):
    text = json.dumps({"text": "word " * 200}) + "\n"
    (tmp_path / "source").mkdir()
    for number in range(8):
        (tmp_path / "source" / f"{number}.jsonl").write_text(text * (4_000 if number < 7 else 100))
    options = {"validation_fraction": 0.0}
    prepared(tmp_path / "whole", [str(tmp_path / "source")], **options)
    words = ("--part", "1/2", "--validation-fraction", "0", "--workers", "1")
    process = start(tmp_path, *words, source=str(tmp_path / "source"))
    wait_for(process, tmp_path / "data", ".out.partial-*/progress.json")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    [left] = (tmp_path / "data").glob(".out.partial-*")
    finished = json.loads((left / "progress.json").read_text())["counts"]["files"]
    assert finished > 0
    prepared(tmp_path / "data" / "out", [str(tmp_path / "source")], part="1/2", **options)
    assert not left.exists(), "it went on from there"
    prepared(tmp_path / "data" / "0", [str(tmp_path / "source")], part="0/2", **options)
    web = merged([tmp_path / "data" / "0", tmp_path / "data" / "out"], tmp_path / "web")
    assert (web / "train.bin").read_bytes() == (tmp_path / "whole" / "train.bin").read_bytes()
    assert (web / "train.idx").read_bytes() == (tmp_path / "whole" / "train.idx").read_bytes()


def test_merging_more_folders_than_a_process_may_open_files(tmp_path):
    prepared(tmp_path / "0", [str(write_jsonl(tmp_path / "text.jsonl", documents(20, seed=1)))])
    for number in range(1, 40):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 12, hard))
    try:
        merged([tmp_path / str(number) for number in range(40)], tmp_path / "all")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    documents_of_one = Manifest.read(tmp_path / "0").splits["train"].documents
    assert Manifest.read(tmp_path / "all").splits["train"].documents == 40 * documents_of_one


def test_a_merge_loads_one_tokenizer_and_reads_nothing_again(tmp_path, monkeypatch):
    from data_pipeline import tokenizers
    from data_pipeline.manifest import FileRecord

    source = [str(write_sources(tmp_path / "source", (20, 20, 20)))]
    for number in range(3):
        prepared(tmp_path / str(number), source, part=f"{number}/3")
    loaded, load = [], tokenizers.load
    monkeypatch.setattr(
        tokenizers, "load", lambda folder, **options: loaded.append(folder) or load(folder, **options)
    )
    monkeypatch.setattr(FileRecord, "of", staticmethod(lambda file, *_: pytest.fail(f"{file} is read again")))
    merged([tmp_path / str(number) for number in range(3)], tmp_path / "web")
    assert len(loaded) <= 1


@pytest.mark.parametrize(
    ("limits", "most", "raised"),
    [
        ((1024, 1024), 21, None),
        ((1024, 4096), 149, 4096),
        ((1024, 2**20), 1024, 25_088),
        ((1024, resource.RLIM_INFINITY), 1024, 25_088),
        ((2**20, 2**20), 1024, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1024, None),
    ],
)
def test_so_many_corpora_stay_open_as_a_process_may_open_files(monkeypatch, limits, most, raised):
    was_set = []
    monkeypatch.setattr(samples.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(samples.resource, "setrlimit", lambda kind, new: was_set.append(new))
    files = samples.OpenFiles()
    assert files.tokens.cache_info().maxsize == files.epochs.cache_info().maxsize == most
    assert [new[0] for new in was_set if new[0] != limits[0]] == ([] if raised is None else [raised])


def test_a_request_without_parts_is_recorded_as_before(tmp_path):
    source = [str(write_sources(tmp_path / "source", (5, 5)))]
    assert "part" not in PrepareRequest(source=source, tokenizer="byte").arguments()
    manifest = prepared(tmp_path / "web", source)
    assert "part" not in manifest.arguments
    again = prepare(
        PrepareRequest(source=source, tokenizer="byte", validation_fraction=0.2),
        tmp_path / "web",
        workers=1,
        overwrite=False,
        console=Console(quiet=True),
    )
    assert again is None, "nothing to do"
