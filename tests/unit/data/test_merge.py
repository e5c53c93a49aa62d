"""`megakernel merge`: prepared folders become one, which holds what they hold."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_pipeline import merge as module
from data_pipeline.corpus import Corpora
from data_pipeline.manifest import Manifest
from data_pipeline.merge import merge
from data_pipeline.prepare import PrepareRequest, prepare
from data_pipeline.token_files import TokenFile
from data_pipeline.verification import check_unchanged
from tests.chats import CHATML, save_tokenizer, write_chats
from tests.unit.data.conftest import documents, prepared, write_jsonl


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[Path]:
    """Three folders of bytes; the last one has no validation split."""
    folder = tmp_path_factory.mktemp("shards")
    for number, fraction in enumerate((0.2, 0.2, 0.0)):
        source = write_jsonl(folder / f"{number}.jsonl", documents(30 + number, seed=number))
        prepared(folder / f"web-{number}", [str(source)], validation_fraction=fraction)
    return [folder / f"web-{number}" for number in range(3)]


def said(folders, out: Path, overwrite: bool = False) -> str:
    console = Console(file=io.StringIO(), width=1000)
    made = merge(folders, out, overwrite=overwrite, console=console)
    return console.file.getvalue() if made else "nothing to do"  # type: ignore[attr-defined]


def texts(folder: Path, split: str) -> list[bytes]:
    return [tokens.astype(np.int64).tobytes() for tokens in TokenFile(folder / split)]


def test_a_merged_folder_has_the_documents_of_all_in_their_order(shards, tmp_path, configure):
    message = said(shards, tmp_path / "web")
    for split, parts in (("train", shards), ("validation", shards[:2])):
        assert texts(tmp_path / "web", split) == [text for part in parts for text in texts(part, split)]
    manifest, single = Manifest.read(tmp_path / "web"), [Manifest.read(shard) for shard in shards]
    assert manifest.splits["train"].bytes == sum(each.splits["train"].bytes for each in single)
    assert "1 folders have no validation split, the first: " + str(shards[2]) in message
    # Another fraction is another split of the same document.
    assert f"{shards[0]} and {shards[2]} were split by other --validation-fraction or --seed" in message
    # What training opens, and compares with its checksums.
    corpora = Corpora(configure(str(tmp_path / "web"), data={"verify": "full"}).data)
    assert (
        corpora.train[0].record("train").documents == 30 + 31 + 32 - manifest.splits["validation"].documents
    )


def test_megatron_reads_a_merged_folder(shards, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    said(shards, tmp_path / "web")
    dataset = IndexedDataset(str(tmp_path / "web" / "train"))
    assert [x.astype(np.int64).tobytes() for x in dataset[:]] == texts(tmp_path / "web", "train")
    assert len(dataset.document_indices) == len(dataset) + 1


def test_the_same_command_again_does_nothing_and_other_folders_are_refused(shards, tmp_path, refused):
    assert "2 folders" in said(shards[:2], tmp_path / "web")
    assert said(shards[:2], tmp_path / "web") == "nothing to do"
    line = refused("merge", *shards, "--out", tmp_path / "web")
    assert "web has other content; choose another --out, or add --overwrite" in line
    assert "3 folders" in said(shards, tmp_path / "web", overwrite=True)


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_an_index_is_the_same_in_any_pieces(shards, tmp_path, monkeypatch, piece):
    monkeypatch.setattr("data_pipeline.token_files.INDEX_PIECE", piece)
    said(shards[:1] + shards[2:], tmp_path / "web")
    source = [str(shard.parent / f"{shard.name[-1]}.jsonl") for shard in (shards[2],)]
    prepared(tmp_path / "again", source, validation_fraction=0.0)
    assert (tmp_path / "again" / "train.idx").read_bytes() == (shards[2] / "train.idx").read_bytes()
    file = TokenFile(tmp_path / "web" / "train")
    assert texts(tmp_path / "web", "train") == texts(shards[0], "train") + texts(shards[2], "train")
    assert len(file) == 30 + 32 - Manifest.read(shards[0]).splits["validation"].documents


def test_answers_of_conversations_stay_known(tmp_path):
    save_tokenizer(CHATML, tmp_path / "tokenizer")
    for number in range(2):
        chats = [
            [{"role": "user", "content": f"{number} {i}"}, {"role": "assistant", "content": f"yes {i}"}]
            for i in range(20)
        ]
        source = write_chats(tmp_path / f"{number}.jsonl", chats)
        request = PrepareRequest(
            source=[str(source)], tokenizer=str(tmp_path / "tokenizer"), text_key="messages", chat=True
        )
        prepare(request, tmp_path / str(number), workers=1, overwrite=False, console=Console(quiet=True))
    parts = [tmp_path / "0", tmp_path / "1"]
    said(parts, tmp_path / "both")
    merged = Manifest.read(tmp_path / "both").splits["train"].scored
    assert merged is not None
    assert merged.tokens == sum(Manifest.read(part).splits["train"].scored.tokens for part in parts)
    assert texts(tmp_path / "both", "train.scored") == [
        x for part in parts for x in texts(part, "train.scored")
    ]


@pytest.mark.parametrize("failing", [2, 3, 4])
def test_a_merge_that_ends_goes_on_after_the_last_saved_file(shards, tmp_path, monkeypatch, failing):
    whole = tmp_path / "whole"
    said(shards, whole)
    monkeypatch.setattr(module, "SAVED_BYTES", 1)
    append, calls = module._append, []

    def interrupted(part, whole):
        calls.append(part)
        append(part, whole)
        if len(calls) == failing:
            raise KeyboardInterrupt  # after its bytes are written, and before they are recorded

    monkeypatch.setattr(module, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        said(shards, tmp_path / "web")
    assert not (tmp_path / "web").exists()
    monkeypatch.setattr(module, "_append", append)
    assert f"goes on from {tmp_path}" in (message := said(shards, tmp_path / "web"))
    assert f"{failing - 1} of 5 files are copied" in message
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (tmp_path / "web" / name).read_bytes() == (whole / name).read_bytes()
    # The checksums, too: those of the files that were copied before are computed anew.
    assert Manifest.read(tmp_path / "web").splits == Manifest.read(whole).splits
    check_unchanged(tmp_path / "web", Manifest.read(tmp_path / "web"))
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_damaged_file_is_named_and_nothing_is_left(shards, tmp_path, refused):
    import shutil

    shutil.copytree(shards[1], tmp_path / "copy")
    tokens = bytearray((tmp_path / "copy" / "train.bin").read_bytes())
    tokens[0] ^= 1
    (tmp_path / "copy" / "train.bin").write_bytes(tokens)
    line = refused("merge", shards[0], tmp_path / "copy", "--out", tmp_path / "web")
    assert f"{tmp_path / 'copy' / 'train.bin'} is not what its manifest.json records; copy its folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_folders_that_do_not_belong_together_are_refused(shards, tmp_path, refused):
    texts_, out = documents(30, seed=9), tmp_path / "web"
    source = str(write_jsonl(tmp_path / "other.jsonl", texts_))
    prepared(tmp_path / "bpe", [source], tokenizer="bpe:300")
    rows = [{"text": text, "kind": index % 2} for index, text in enumerate(texts_)]
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared(tmp_path / "labelled", [str(tmp_path / "labelled.jsonl")], labels="kind")
    first = shards[0]
    assert "is the only folder; give two or more" in refused("merge", first, "--out", out)
    assert "is given twice" in refused("merge", first, shards[1], first, "--out", out)
    line = refused("merge", first, tmp_path / "bpe", "--out", out)
    assert f"prepare it with --tokenizer {first / 'tokenizer'}" in line
    assert "has a class for every document" in refused("merge", first, tmp_path / "labelled", "--out", out)
    assert "does not exist" in refused("merge", first, tmp_path / "nothing", "--out", out)
    assert "is one of the folders" in refused("merge", *shards, "--out", first, "--overwrite")
    assert not out.exists()
