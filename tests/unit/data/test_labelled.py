import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.batch import PADDING, Batch
from data_pipeline.corpus import Corpora
from data_pipeline.examples import Cut
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.manifest import FileRecord
from data_pipeline.order import Share
from data_pipeline.token_files import TokenFile
from megakernel.config import Config, UserError
from tests.hostile import plant_pickle
from tests.unit.data.conftest import SEQ_LEN, prepared, step_batches

Configure = Callable[..., Config]
EOD = 256
ROWS = [
    {
        "text": f"{number} " + "x" * (7 * number % 50),
        "other": f"and {number}",
        "kind": ("cat", "dog", "ant")[number % 3],
    }
    for number in range(40)
]


def write(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ROWS with their first text."""
    folder = tmp_path_factory.mktemp("labelled")
    prepared(folder / "prepared", write(folder / "rows.jsonl", ROWS), labels="kind")
    return folder / "prepared"


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ROWS with both texts."""
    folder = tmp_path_factory.mktemp("pairs")
    source = write(folder / "rows.jsonl", ROWS)
    prepared(folder / "prepared", source, labels="kind", second_text_key="other")
    return folder / "prepared"


@pytest.fixture
def classify(configure: Configure) -> Configure:
    """A classifier's configuration; keys of model.classifier as keywords."""

    def build(train: Any, training: dict[str, Any] | None = None, **classifier: Any) -> Config:
        config = configure(train, **(training or {}))
        model = {"kind": "classifier", "classifier": {"num_classes": 3, **classifier}, "attention": "softmax"}
        sizes = {"num_layers": 1, "hidden_size": 64, "num_heads": 2}
        return Config(**{**config.model_dump(), "model": {**sizes, **model}})

    return build


def texts(batch: Batch) -> list[str]:
    """The text of each sequence, without padding."""
    rows = [row[positions != PADDING] for row, positions in zip(batch.tokens, batch.positions)]
    return [bytes(token for token in row.tolist() if token < EOD).decode() for row in rows]


def test_classes_are_numbered_in_order(labelled: Path):
    labels = Corpora(Config.model_fields["data"].annotation(train=labelled)).train[0].manifest.labels
    assert labels is not None
    assert labels.classes == ["ant", "cat", "dog"]


def test_an_epoch_reads_every_example_once_with_its_label(labelled: Path, classify: Configure):
    single = {"seq_len": 64, "global_batch_size": 1, "micro_batch_size": 1}
    config = classify(labelled, {**single, "steps": 2 * len(ROWS)})
    count = Corpora(config.data).train[0].record("train").documents
    kinds = {row["text"]: sorted(("cat", "dog", "ant")).index(row["kind"]) for row in ROWS}
    seen = []
    for number in range(2 * count):
        [batch] = step_batches(config, number)
        [text] = texts(batch)
        assert batch.labels.tolist() == [kinds[text]]
        seen.append(text)
    assert len(set(seen[:count])) == count
    assert set(seen[:count]) == set(seen[count:])
    assert seen[:count] != seen[count:], "the second epoch has another order"


def test_documents_are_padded_or_truncated_to_the_sequence_length(labelled: Path, classify: Configure):
    for batch in step_batches(classify(labelled), 0):
        assert batch.tokens.shape == batch.positions.shape == (2, SEQ_LEN)
        for row, positions, text in zip(batch.tokens, batch.positions, texts(batch)):
            length = int((positions != PADDING).sum())
            assert positions.tolist() == list(range(length)) + [PADDING] * (SEQ_LEN - length)
            whole = next(r["text"] for r in ROWS if r["text"].startswith(text.split(" ")[0] + " "))
            assert text == whole[:SEQ_LEN]
            assert (row[length - 1] == EOD) == (len(whole) < SEQ_LEN)


def test_pooling_cls_puts_a_classification_token_first(labelled: Path, classify: Configure):
    [plain, *_], [with_cls, *_] = (
        step_batches(classify(labelled), 0),
        step_batches(classify(labelled, pooling="cls"), 0),
    )
    assert (with_cls.tokens[:, 0] == 258).all(), "the id after the tokenizer's 257 ids and the mask"
    assert torch.equal(with_cls.tokens[:, 1:], plain.tokens[:, :-1])


def test_the_documents_of_a_pair_are_adjacent_sequences(pairs: Path, classify: Configure):
    for batch in step_batches(classify(pairs, documents=2), 0):
        assert batch.tokens.shape == (4, SEQ_LEN)
        assert batch.labels.shape == batch.loss_mask.shape == (2,)
        first, second = texts(batch)[0::2], texts(batch)[1::2]
        assert second == [f"and {text.split(' ')[0]}" for text in first]


def test_data_parallel_replicas_read_the_batch_of_one_process(pairs: Path, classify: Configure):
    config = classify(pairs, documents=2)
    replicas = [step_batches(config, 2, data_rank=rank, data_size=2) for rank in range(2)]
    together = [batch for passes in zip(*replicas) for batch in passes]
    for name in ("tokens", "positions", "labels"):
        expected = torch.cat([getattr(batch, name) for batch in step_batches(config, 2)])
        assert torch.equal(torch.cat([getattr(batch, name) for batch in together]), expected)


def test_sequences_after_the_last_example_do_not_count(labelled: Path, classify: Configure):
    config = classify(labelled, {"eval_samples": 5})
    batches = list(ValidationBatches(config, Corpora(config.data), Share()))
    assert [batch.loss_mask.tolist() for batch in batches] == [[True, True], [True, True], [True, False]]


@pytest.mark.parametrize(
    ("classifier", "problem"),
    [
        ({"num_classes": 2}, r"model\.classifier\.num_classes=2 does not fit .* where it is 3; set 3"),
        ({"documents": 2}, r"model\.classifier\.documents=2 does not fit .* where it is 1; set 1"),
    ],
)
def test_a_head_that_does_not_fit_the_data_is_refused(
    labelled: Path, classify: Configure, classifier: dict[str, Any], problem: str
):
    with pytest.raises(ValueError, match=problem):
        step_batches(classify(labelled, **classifier), 0)


def test_text_without_labels_is_refused(corpus: Path, classify: Configure):
    with pytest.raises(
        ValueError, match=r"data\.train=.* has no labels to classify by; prepare it with --labels KEY"
    ):
        step_batches(classify(corpus), 0)


def test_corpora_of_other_classes_are_refused(labelled: Path, classify: Configure, tmp_path: Path):
    rows = [{**row, "kind": number % 3} for number, row in enumerate(ROWS)]
    prepared(tmp_path / "numbers", write(tmp_path / "rows.jsonl", rows), labels="kind")
    with pytest.raises(ValueError, match=r"numbers has the classes \[0, 1, 2\], corpora before it \['ant'"):
        step_batches(classify([str(labelled), str(tmp_path / "numbers")]), 0)


def test_missing_labels_are_refused(classify: Configure, tmp_path: Path):
    prepared(tmp_path / "out", write(tmp_path / "rows.jsonl", ROWS), labels="kind")
    (tmp_path / "out" / "train.labels.npy").unlink()
    with pytest.raises(ValueError, match=r"lacks train\.labels\.npy; copy the folder"):
        step_batches(classify(tmp_path / "out"), 0)


def test_label_files_are_not_unpickled(labelled: Path, classify: Configure, tmp_path: Path):
    copy = Path(shutil.copytree(labelled, tmp_path / "copy"))
    plant_pickle(copy / "train.labels.npy", tmp_path / "harm")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["labels"]["files"]["train"] = FileRecord.of(copy / "train.labels.npy").model_dump()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"train\.labels\.npy holds no labels .*; prepare the folder again"):
        step_batches(classify(copy), 0)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            [{"text": "a", "kind": 1}, {"text": "b", "kind": 1}],
            r"--labels holds 1 class; give examples of at least two",
        ),
        ([{"text": "a", "kind": 0.5}], r"column 'kind' holds float, not a class; set --labels"),
        ([{"text": "a", "kind": None}], r"column 'kind' holds NoneType, not a class; set --labels"),
        ([{"text": "a", "sort": 1}], r"no column 'kind' among text, sort; set --labels"),
    ],
)
def test_rows_without_classes_are_refused(rows: list[dict[str, Any]], problem: str, tmp_path: Path):
    with pytest.raises(ValueError, match=problem):
        prepared(
            tmp_path / "out", write(tmp_path / "rows.jsonl", rows), labels="kind", validation_fraction=0.0
        )


@pytest.mark.parametrize("signs", ["-1 0 1", "-1 +0 +1"])
def test_classes_of_a_tab_separated_table_may_be_negative_numbers(signs: str, tmp_path: Path):
    rows = [f"{sign}\ttext {row} of {sign}" for row in range(3) for sign in signs.split()]
    # Spreadsheets write a byte order mark.
    (tmp_path / "rows.tsv").write_text("\ufefflabel\ttext\n" + "\n".join(rows), encoding="utf-8")
    manifest = prepared(tmp_path / "out", [str(tmp_path / "rows.tsv")], labels="label")
    assert manifest.labels is not None
    assert manifest.labels.classes == [-1, 0, 1]


def test_a_class_that_is_not_unicode_is_skipped(tmp_path: Path):
    source = write(tmp_path / "rows.jsonl", [*ROWS, {"text": "half an emoji", "kind": "\ud83d"}])
    manifest = prepared(tmp_path / "out", source, labels="kind")
    assert manifest.skipped == {"not UTF-8": 1}
    assert manifest.labels is not None
    assert manifest.labels.classes == ["ant", "cat", "dog"]


def test_labels_for_plain_text_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(
        ValueError, match=r"--labels kind is a column of tables and .*a\.txt is not a table; give files"
    ):
        prepared(tmp_path / "out", [str(tmp_path)], labels="kind")


def test_cut_documents_are_counted(labelled: Path, pairs: Path, classify: Configure):
    def count(folder: Path, seq_len: int = SEQ_LEN, **classifier: Any) -> Cut:
        config = classify(folder, {"seq_len": seq_len}, **classifier)
        [found] = TrainingBatches(config, Corpora(config.data), Share()).cut()
        return found

    def expected(folder: Path, added: int = 0, seq_len: int = SEQ_LEN) -> Cut:
        lengths = [len(tokens) + added for tokens in TokenFile(folder / "train")]
        lost = [length - seq_len for length in lengths]  # the first of them is the end-of-document token
        cut, without_end = sum(n > 1 for n in lost), sum(n == 1 for n in lost)
        return Cut(str(folder), seq_len, "documents", len(lengths), cut, max(lengths), without_end)

    assert count(labelled) == expected(labelled)
    assert count(labelled, pooling="cls") == expected(labelled, added=1)
    assert count(pairs, documents=2) == expected(pairs)
    longest = expected(labelled).longest
    of_text_alone = count(labelled, seq_len=longest - 1)
    assert of_text_alone == expected(labelled, seq_len=longest - 1)
    assert of_text_alone.cut == 0
    assert of_text_alone.without_end > 0
    assert f" {of_text_alone.without_end} more leave out their end-of-document token alone; " in str(
        of_text_alone
    )
    assert "more leave out" not in str(count(labelled, seq_len=64))
