"""`--task translation`: what it refuses, and what it counts beside BLEU."""

import json
from types import SimpleNamespace

import pytest

from data_pipeline import tokenizers
from data_pipeline.corpus import Corpora
from megakernel.config import Config, UserError
from megakernel.evaluation.result import Table
from megakernel.evaluation.run import parse
from tests.unit.data.conftest import prepared

KEYS = {"text_key": "en", "second_text_key": "de"}
SIZE = {"num_layers": 1, "hidden_size": 8, "num_heads": 1}


def run_of(train, **training):
    """An encoder-decoder's run on corpora, as far as the task reads it."""
    config = Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {
                "kind": "encoder_decoder",
                "encoder": {"num_layers": 1},
                "attention": "softmax",
                **SIZE,
            },
            "data": {"train": train, "isolate_documents": False},
            "training": {"steps": 1, "seq_len": 16, "global_batch_size": 1, **training},
        }
    )
    text = Corpora(config.data, validation=False)
    tokenizer = tokenizers.load(text.tokenizer_folder)
    return SimpleNamespace(config=config, text=text, tokenizer=tokenizer, folder="runs/x", step=3, model=None)


def repeat(opened, model, sources, **options):
    """Translates each source by itself."""
    return ((index, opened.tokenizer.decode(ids), True) for index, ids in enumerate(sources))


def task_of(spec="translation", samples=None):
    [task] = parse([spec], samples=samples, translate=repeat)
    return task


def pairs_of(folder, rows, **options):
    folder.mkdir()
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"en": source, "de": target}) + "\n" for source, target in rows)
    )
    prepared(folder / "out", [str(folder / "rows.jsonl")], validation_fraction=0.5, **KEYS, **options)
    return folder / "out"


@pytest.fixture(scope="module")
def few_and_many(tmp_path_factory):
    """Corpora of 8 and of 60 pairs of words, those of the second with words that the first one's tokenizer lacks."""
    folder = tmp_path_factory.mktemp("pairs")
    few = pairs_of(folder / "few", [(f"a {n}", f"b {n}") for n in range(8)], tokenizer="words")
    rows = [(f"a {n % 8}", f"b strange{n}") for n in range(60)]
    return few, pairs_of(folder / "many", rows, tokenizer=str(few / "tokenizer"))


def test_text_without_pairs_is_refused(corpus):
    with pytest.raises(UserError, match=r"data.train=.* holds no pairs .*, or give --data a folder of pairs"):
        task_of().check(run_of(str(corpus)))


@pytest.mark.parametrize(("samples", "of_run"), [(0, 16), (-3, 16), (None, 0)])
def test_no_samples_are_refused(samples, of_run, few_and_many):
    few, _ = few_and_many
    with pytest.raises(UserError, match=r"samples=.* leaves nothing to evaluate; give --samples 1 or more"):
        task_of(samples=samples).check(run_of(str(few), eval_samples=of_run))


def test_references_and_sources_with_unknown_words_are_counted(few_and_many):
    pytest.importorskip("sacrebleu")
    few, many = few_and_many
    for folder, all_unknown in ((few, False), (many, True)):
        run = run_of(str(folder), eval_samples=100)
        task = task_of()
        task.check(run)
        score = task.measure(run, lambda done, total: None)
        assert score.unknown_references == all_unknown * len(score.texts)
        assert score.unknown_sources == 0
        assert score.as_dict()["unknown_references"] == score.unknown_references


def test_pairs_that_weights_repeat_are_counted_once(few_and_many):
    pytest.importorskip("sacrebleu")
    few, many = few_and_many
    run = run_of([{"path": str(few), "weight": 0.9}, {"path": str(many), "weight": 0.1}], eval_samples=30)
    score = task_of().measure(run, lambda done, total: None)
    assert score.distinct == len(set(score.texts)) < len(score.texts)
    assert f"of {len(score.texts)} pairs, {score.distinct} of them distinct, (" in score.table().below[0]


def test_byte_level_tokenizers_know_every_word(tmp_path):
    assert tokenizers.ByteTokenizer().unknown is None
    words, bytes_ = tokenizers.train_words(["a b"]), tokenizers.train_bpe(["a b"], 300)
    assert words.encode("a c")[1] == words.unknown
    assert bytes_.unknown is None
    words.save(tmp_path)
    assert tokenizers.load(tmp_path).unknown == words.unknown


def test_bars_and_newlines_of_texts_do_not_break_a_table_in_markdown():
    table = Table("title", ("source", "translation"), [("a|b", "c\nd\r\ne")], total=("all", "|"))
    assert table.markdown().splitlines() == [
        "title",
        "",
        "| source | translation |",
        "| --- | --- |",
        r"| a\|b | c<br>d<br>e |",
        r"| all | \| |",
    ]
