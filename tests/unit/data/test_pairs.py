"""Texts with their translations: how they are prepared, read and cut."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from data_pipeline import tokenizers
from data_pipeline.batch import PADDING, Batch
from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.manifest import Manifest
from data_pipeline.merge import merge
from data_pipeline.order import Share
from data_pipeline.pairs import TranslationPairs, check_pairs
from data_pipeline.prepare import PrepareRequest, prepare
from data_pipeline.token_files import TokenFile
from megakernel.config import Config, UserError
from megakernel.config.model import EncoderStack
from tests import bos_tokenizers
from tests.unit.data.conftest import SEQ_LEN, prepared, step_batches

Configure = Callable[..., Config]
EOD = 256
FILES = ("train.bin", "train.idx", "validation.bin", "validation.idx")
ROWS = [
    (f"{number} " + "x" * (7 * number % 40), f"zu {number} " + "ü" * (5 * number % 30))
    for number in range(60)
]
KEYS = {"text_key": "en", "second_text_key": "de"}


def write_tsv(path: Path, rows: list[tuple[str, str]] = ROWS) -> str:
    path.write_text(
        "en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8"
    )
    return str(path)


def pairs_of(folder: Path, split: str) -> list[tuple[str, str]]:
    """The pairs of a split, from its token files."""
    texts = [bytes(tokens[:-1].tolist()).decode() for tokens in TokenFile(folder / split)]
    return list(zip(texts[::2], texts[1::2], strict=True))


@pytest.fixture(scope="session")
def translations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ROWS as bytes."""
    folder = tmp_path_factory.mktemp("translations")
    prepared(folder / "prepared", [write_tsv(folder / "rows.tsv")], **KEYS)
    return folder / "prepared"


@pytest.fixture
def translate(configure: Configure) -> Configure:
    """The configuration of an encoder-decoder; further arguments as for `configure`."""

    def build(train: Any, **options: Any) -> Config:
        config = configure(train, **options)
        encoder = EncoderStack(num_layers=1)
        model = config.model.model_copy(update={"kind": "encoder_decoder", "encoder": encoder})
        return config.model_copy(update={"model": model})

    return build


def opened(folder: Path, seq_len: int, seed: int = 0) -> TranslationPairs:
    corpora = Corpora(Config.model_fields["data"].annotation(train=folder), validation=False)
    return TranslationPairs(corpora.train, "train", seq_len, seed, EOD)


def columns(batch: Batch) -> tuple[list[str], list[str]]:
    """The texts of the sources, and of the labels that count."""
    sources = [row[positions != PADDING] for row, positions in zip(batch.tokens[::2], batch.positions[::2])]
    targets = [row[counts] for row, counts in zip(batch.labels, batch.loss_mask)]
    texts = [bytes(i for i in row.tolist() if i < EOD).decode(errors="replace") for row in sources + targets]
    return texts[: len(sources)], texts[len(sources) :]


def test_a_text_and_its_translation_stay_together_in_one_split(translations: Path):
    manifest = Manifest.read(translations)
    assert manifest.pairs
    train, validation = pairs_of(translations, "train"), pairs_of(translations, "validation")
    assert sorted(train + validation) == sorted(ROWS)
    assert len(validation) > 5
    assert manifest.splits["train"].documents == 2 * len(train)


def test_copies_of_a_pair_are_in_the_same_split(tmp_path: Path):
    prepared(tmp_path / "out", [write_tsv(tmp_path / "rows.tsv", ROWS + ROWS)], **KEYS)
    assert not set(pairs_of(tmp_path / "out", "train")) & set(pairs_of(tmp_path / "out", "validation"))


def test_translations_of_one_text_are_in_the_same_split(tmp_path: Path):
    """Or a text that is held out would be known from training, with another translation."""
    others = [(source, f"{target}, again") for source, target in ROWS]
    prepared(tmp_path / "out", [write_tsv(tmp_path / "rows.tsv", ROWS + others)], **KEYS)
    train, validation = (
        {source for source, _ in pairs_of(tmp_path / "out", split)} for split in ("train", "validation")
    )
    assert validation
    assert not train & validation


def test_a_manifest_of_an_earlier_version_holds_no_pairs(corpus: Path, tmp_path: Path):
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert manifest.pop("pairs") is False
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert Manifest.read(tmp_path) == Manifest.read(corpus)


def test_all_kinds_of_tables_hold_the_same_pairs(translations: Path, tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"en": source, "de": target} for source, target in ROWS]
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["en", "de"])
        writer.writeheader()
        writer.writerows(rows)
    nested = [{"translation": row} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nested))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(nested), tmp_path / "rows.parquet")
    for name in ("rows.csv", "rows.jsonl", "rows.parquet"):
        keys = KEYS if name == "rows.csv" else {key: f"translation.{name}" for key, name in KEYS.items()}
        prepared(tmp_path / f"of-{name}", [str(tmp_path / name)], **keys)
        for file_name in FILES:
            assert (tmp_path / f"of-{name}" / file_name).read_bytes() == (
                translations / file_name
            ).read_bytes()


@pytest.mark.second
def test_a_dataset_of_the_hub_holds_the_same_pairs(translations: Path, tmp_path: Path):
    (tmp_path / "hub").mkdir()
    rows = [{"translation": {"en": source, "de": target}} for source, target in ROWS]
    (tmp_path / "hub" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {key: f"translation.{name}" for key, name in KEYS.items()}
    prepared(tmp_path / "out", [f"hf:{tmp_path / 'hub'}"], **keys)
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (translations / name).read_bytes()


def test_rows_without_one_side_are_skipped_and_counted(tmp_path: Path):
    rows = [*ROWS, ("only English", ""), ("blanks", " \u00a0 "), ("", "nur Deutsch")]
    manifest = prepared(tmp_path / "out", [write_tsv(tmp_path / "rows.tsv", rows)], **KEYS)
    assert manifest.skipped == {"one side is empty": 3}
    assert sum(split.documents for split in manifest.splits.values()) == 2 * len(ROWS)


def test_the_last_lines_count_pairs_and_the_tokens_of_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    from launch.cli import main

    source = write_tsv(tmp_path / "rows.tsv", [("ab", "xyz"), ("a", "b"), ("", "b")])
    options = ["--text-key", "en", "--second-text-key", "de", "--validation-fraction", "0"]
    assert (
        main(["prepare", "--source", source, *options, "--tokenizer", "byte", "--out", str(tmp_path / "out")])
        == 0
    )
    lines = capsys.readouterr().err.splitlines()
    assert "  train: 2 pairs, 5 source tokens, 6 target tokens, 0.0 MB" in lines
    assert "  skipped 1 pair: one side is empty" in lines


def test_a_trained_tokenizer_has_the_words_of_both_sides(tmp_path: Path):
    rows = [(f"alpha {number}", f"omega {number}") for number in range(200)]
    source = write_tsv(tmp_path / "rows.tsv", rows)
    prepared(tmp_path / "out", [source], tokenizer="bpe:320", **KEYS)
    tokenizer = tokenizers.load(tmp_path / "out" / "tokenizer")
    for word in ("alpha", "omega"):
        assert len(tokenizer.encode(word)) <= 2


def test_a_batch_has_exactly_these_tokens(tmp_path: Path):
    source = write_tsv(tmp_path / "rows.tsv", [("ab", "xyz")])
    prepared(tmp_path / "out", [source], validation_fraction=0.0, **KEYS)
    batch = opened(tmp_path / "out", seq_len=6).batch([0], Share())
    assert batch.tokens.tolist() == [[97, 98, EOD, 0, 0, 0], [EOD, 120, 121, 122, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, -1, -1, -1], [0, 1, 2, 3, -1, -1]]
    assert batch.labels.tolist() == [[120, 121, 122, EOD, 0, 0]]
    assert batch.loss_mask.tolist() == [[True, True, True, True, False, False]]
    assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64


@pytest.mark.parametrize(
    ("seq_len", "source", "target"),
    [
        (5, [97, 98, 99, EOD], [120, 121, 122, 123, EOD]),
        (4, [97, 98, 99, EOD], [120, 121, 122, 123]),
        (3, [97, 98, EOD], [120, 121, 122]),
        (1, [EOD], [120]),
    ],
)
def test_a_cut_source_keeps_its_end_and_a_cut_target_has_none(
    seq_len: int, source: list[int], target: list[int], tmp_path: Path
):
    table = write_tsv(tmp_path / "rows.tsv", [("abc", "xyz{")])
    prepared(tmp_path / "out", [table], validation_fraction=0.0, **KEYS)
    batch = opened(tmp_path / "out", seq_len).batch([0], Share())
    [from_source, inputs] = batch.tokens
    assert from_source[batch.positions[0] != PADDING].tolist() == source
    assert batch.labels[batch.loss_mask].tolist() == target
    assert inputs[batch.positions[1] != PADDING].tolist() == [EOD, *target[:-1]]


def test_a_beginning_of_sequence_token_is_that_of_documents(tmp_path: Path):
    bos_tokenizers.save("template", tmp_path / "tokenizer")
    source = write_tsv(tmp_path / "rows.tsv", [("ab", "xyz")])
    options = {"tokenizer": str(tmp_path / "tokenizer"), "validation_fraction": 0.0}
    manifest = prepared(tmp_path / "out", [source], **options, **KEYS)
    bos = manifest.tokenizer.bos
    assert bos is not None
    batch = opened(tmp_path / "out", seq_len=8).batch([0], Share())
    assert batch.tokens[0, 0] == batch.labels[0, 0] == bos
    assert batch.tokens[1, :2].tolist() == [EOD, bos]


def test_an_epoch_reads_every_pair_once(translations: Path, translate: Configure):
    single = {"seq_len": 128, "global_batch_size": 1, "micro_batch_size": 1}
    count = len(pairs_of(translations, "train"))
    config = translate(translations, **single, steps=2 * count)
    seen = []
    for step in range(2 * count):
        [batch] = step_batches(config, step)
        [source], [target] = columns(batch)
        seen.append((source, target))
    assert sorted(seen[:count]) == sorted(seen[count:]) == sorted(pairs_of(translations, "train"))
    assert seen[:count] != seen[count:], "the second epoch has another order"


def test_the_order_depends_on_the_seed_alone(translations: Path, translate: Configure):
    def sources(seed: int, **training: int) -> list[str]:
        batches = step_batches(translate(translations, seed=seed, **training), 3)
        return [source for batch in batches for source in columns(batch)[0]]

    assert sources(7) == sources(7, micro_batch_size=4) == sources(7, steps=5)
    assert sources(7) != sources(8)


def test_data_parallel_replicas_read_the_batch_of_one_process(translations: Path, translate: Configure):
    config = translate(translations)
    replicas = [step_batches(config, 2, data_rank=rank, data_size=2) for rank in range(2)]
    together = [batch for passes in zip(*replicas) for batch in passes]
    for name in ("tokens", "positions", "labels", "loss_mask"):
        expected = torch.cat([getattr(batch, name) for batch in step_batches(config, 2)])
        assert torch.equal(torch.cat([getattr(batch, name) for batch in together]), expected)


def test_pairs_behind_the_last_of_the_validation_set_do_not_count(translations: Path, translate: Configure):
    config = translate(translations, eval_samples=5)
    batches = list(ValidationBatches(config, Corpora(config.data), Share()))
    assert [batch.loss_mask.any(1).tolist() for batch in batches] == [
        [True, True],
        [True, True],
        [True, False],
    ]


def test_longer_sequences_go_on_behind_the_pairs_that_shorter_ones_have_read(
    translations: Path, translate: Configure
):
    schedule = [{"until_step": 2, "seq_len": 96}]
    config = translate(translations, seq_len=128, steps=6, seq_len_schedule=schedule)
    batches = [batch for step in range(6) for batch in step_batches(config, step)]
    count = len(pairs_of(translations, "train"))
    sources = [source for batch in batches for source in columns(batch)[0]]
    assert len(sources) == 48
    assert len(set(sources[:count])) == min(count, len(sources))


def test_cut_texts_are_counted_once_per_length_of_sequences(tmp_path: Path, translate: Configure):
    rows = [("a" * 5, "b" * 40), ("a" * 31, "b" * 32), ("a" * 32, "b" * 9), ("a" * 7, "b" * 3)]
    prepared(tmp_path / "out", [write_tsv(tmp_path / "rows.tsv", rows)], validation_fraction=0.0, **KEYS)
    schedule = [{"until_step": 4, "seq_len": SEQ_LEN}]
    options = {"global_batch_size": 2, "eval_samples": 0, "seq_len_schedule": schedule}
    config = translate(tmp_path / "out", seq_len=64, **options)
    batches = TrainingBatches(config, Corpora(config.data, validation=False), Share())
    found = [(one.seq_len, one.documents, one.total, one.cut, one.longest) for one in batches.cut()]
    assert found == [
        (32, "source texts", 4, 1, 33),
        (32, "target texts", 4, 2, 41),
        (64, "source texts", 4, 0, 33),
        (64, "target texts", 4, 0, 41),
    ]
    assert str(batches.cut()[1]) == (
        f"{tmp_path / 'out'}: 2 target texts (50.0%) are cut at 32 tokens; the longest of 4 target texts has 41 tokens"
    )
    assert [one.seq_len for one in batches.cut(step=4)] == [64, 64]
    assert batches.packing() == []


def test_merged_pairs_are_those_of_all_folders(translations: Path, tmp_path: Path):
    other = [(f"another {number}", f"anderes {number}") for number in range(30)]
    prepared(tmp_path / "other", [write_tsv(tmp_path / "other.tsv", other)], **KEYS)
    folders = [translations, tmp_path / "other"]
    manifest = merge(folders, tmp_path / "both", overwrite=False, console=Console(quiet=True))
    assert manifest is not None
    assert manifest.pairs
    for split in ("train", "validation"):
        assert pairs_of(tmp_path / "both", split) == [
            pair for one in folders for pair in pairs_of(one, split)
        ]


def test_parts_of_a_source_of_pairs_are_the_whole_source(tmp_path: Path):
    (tmp_path / "source").mkdir()
    for number in range(2):
        write_tsv(tmp_path / "source" / f"{number}.tsv", ROWS[30 * number : 30 * (number + 1)])
    source = [str(tmp_path / "source")]
    prepared(tmp_path / "whole", source, **KEYS)
    for number in range(2):
        prepared(tmp_path / f"part-{number}", source, part=f"{number}/2", **KEYS)
    merge(
        [tmp_path / "part-0", tmp_path / "part-1"],
        tmp_path / "out",
        overwrite=False,
        console=Console(quiet=True),
    )
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_pairs_and_texts_are_not_merged(translations: Path, corpus: Path, tmp_path: Path, refused):
    for folders in ([translations, corpus], [corpus, translations]):
        line = refused("merge", *folders, "--out", tmp_path / "out")
        assert f"{translations} holds pairs of a text and its translation, and {corpus} does not" in line


@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm", "classifier"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_other_kinds_of_models_refuse_pairs(
    kind: str, split: str, translations: Path, corpus: Path, configure: Configure
):
    train = translations if split == "train" else corpus
    config = configure(train, data={"validation": str(translations)})
    classifier = {"classifier": {"num_classes": 2}} if kind == "classifier" else {}
    attention = {} if kind == "causal_lm" else {"attention": "softmax"}
    model = {"kind": kind, "num_layers": 1, "hidden_size": 64, "num_heads": 2, **classifier, **attention}
    config = Config(**{**config.model_dump(), "model": model})
    read = TrainingBatches if split == "train" else ValidationBatches
    expected = (
        rf"data\.{split}=.* holds pairs of a text and its translation; set model.kind: encoder_decoder, or "
    )
    with pytest.raises(UserError, match=expected):
        read(config, Corpora(config.data), Share())


def test_an_encoder_decoder_refuses_corpora_without_pairs(
    corpus: Path, translations: Path, translate: Configure
):
    config = translate([str(translations), str(corpus)])
    with pytest.raises(
        UserError, match=r"data\.train=.* holds no pairs of a text and its translation; prepare it with "
    ):
        TrainingBatches(config, Corpora(config.data), Share())
    check_pairs([("data.train", Corpora(translate(translations).data).train[0])])


def test_the_loss_of_pairs_is_no_code_length_of_their_text(translations: Path, translate: Configure):
    assert not Corpora(translate(translations).data).is_text("train")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"second_text_key": "fr"}, "no column 'fr' among en, de; set --second-text-key"),
        (
            {"second_text_key": "en"},
            "--second-text-key en is the column of the first text, too; name another",
        ),
        (
            {"chat": True},
            "--second-text-key de: conversations have no second text; leave out one of it and --chat",
        ),
    ],
)
def test_columns_that_make_no_pairs_are_refused(options: dict[str, Any], problem: str, tmp_path: Path):
    with pytest.raises(UserError, match=problem):
        prepared(tmp_path / "out", [write_tsv(tmp_path / "rows.tsv")], **KEYS | options)


@pytest.mark.parametrize("source", ["stdlib", "task:mqar", "{}/a.txt", "{}"])
def test_a_second_text_of_what_is_no_table_is_refused(source: str, tmp_path: Path, refused):
    (tmp_path / "a.txt").write_text("text")
    words = ["--source", source.format(tmp_path), "--second-text-key", "de", "--tokenizer", "byte"]
    line = refused("prepare", *words, "--out", tmp_path / "out")
    assert "--second-text-key de is a column of tables, and" in line or "de is a column of tables and" in line


def test_a_folder_of_pairs_is_not_prepared_again(translations: Path, tmp_path: Path):
    source = write_tsv(tmp_path / "rows.tsv")
    prepared(tmp_path / "out", [source], **KEYS)
    request = PrepareRequest(source=[source], tokenizer="byte", validation_fraction=0.2, **KEYS)
    options = {"workers": 1, "overwrite": False, "console": Console(quiet=True)}
    assert prepare(request, tmp_path / "out", **options) is None
    with pytest.raises(UserError, match=r"was prepared with second_text_key='de', not None"):
        prepare(request.model_copy(update={"second_text_key": None}), tmp_path / "out", **options)
