"""Documents begin with exactly one BOS if their tokenizer adds it, as the manifest records."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoTokenizer

from data_pipeline import tokenizers
from data_pipeline.corpus import Corpora, PreparedCorpus
from data_pipeline.document import Document
from data_pipeline.encoding import Encoder, encode_answered
from data_pipeline.loader import TrainingBatches
from data_pipeline.manifest import Manifest
from data_pipeline.masking import Vocabulary, hide
from data_pipeline.order import Share
from data_pipeline.samples import BlendedSamples
from megakernel.config import UserError
from megakernel.config.data import Masking
from megakernel.training.run_folder import RunFolder
from tests import bos_tokenizers
from tests.unit.data.conftest import prepared, write_jsonl

TEXTS = [f"{number}: " + "some words " * (number % 7) for number in range(60)]


@pytest.fixture(params=bos_tokenizers.MADE)
def hf_tokenizer(request, tmp_path):
    """Name, folder and `transformers` object of each tokenizer."""
    folder = tmp_path / "hf"
    return request.param, folder, bos_tokenizers.save(request.param, folder)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Corpora of one tokenizer that adds BOS: with it, without it, and as an earlier version wrote them."""
    folder = tmp_path_factory.mktemp("corpora")
    source = [str(write_jsonl(folder / "texts.jsonl", TEXTS))]
    bos_tokenizers.save("template", folder / "tokenizer")
    for name, add_bos in (("with", None), ("without", False)):
        prepared(folder / name, source, tokenizer=str(folder / "tokenizer"), add_bos=add_bos)
    shutil.copytree(folder / "without", folder / "old")
    manifest = json.loads((folder / "old" / "manifest.json").read_text())
    del manifest["tokenizer"]["bos"], manifest["arguments"]["add_bos"]
    (folder / "old" / "manifest.json").write_text(json.dumps(manifest))
    bos_tokenizers.save("template", folder / "old" / "tokenizer")
    return folder


def rows(folder: Path) -> list[list[int]]:
    return [row.tolist() for row in IndexedDataset(str(folder / "train"))]


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_documents_begin_with_bos_as_the_tokenizer_or_add_bos_says(add_bos, hf_tokenizer, tmp_path):
    name, folder, hf = hf_tokenizer
    if add_bos and name == "bos is eos":
        with pytest.raises(
            UserError, match="no beginning-of-sequence token other than the one that ends documents"
        ):
            tokenizers.make(str(folder), iter([]), add_bos=add_bos)
        return
    begins = name in bos_tokenizers.WITH_BOS if add_bos is None else add_bos
    prefix = [hf.bos_token_id] if begins else []
    tokenizers.make(str(folder), iter([]), add_bos=add_bos).save(tmp_path / "saved")
    saved = tokenizers.load(tmp_path / "saved")
    encoded = Encoder(saved, "uint16", 0, 0.0).encode([Document((text,)) for text in TEXTS])["train"].tokens
    ids_of_texts = [hf(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [row.tolist() for row in encoded] == [[*prefix, *ids, hf.eos_token_id] for ids in ids_of_texts]
    assert saved.prompt("a b") == [*prefix, *hf("a b", add_special_tokens=False)["input_ids"]]
    assert saved.prompt("") == (prefix or [hf.eos_token_id])
    assert saved.decode(encoded[8]) == TEXTS[8]
    # `transformers` loads the same rule from the folder.
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("a b")["input_ids"] == saved.prompt("a b")
    assert tokenizers.load(folder, own_rule=True).hash == saved.hash


@pytest.mark.second
def test_a_corpus_of_an_earlier_version_stays_without_bos(corpora):
    assert rows(corpora / "old") == rows(corpora / "without")
    assert [row[1:] for row in rows(corpora / "with")] == rows(corpora / "old")
    old = tokenizers.load(corpora / "old" / "tokenizer")
    assert not old.add_bos
    assert old.hash == tokenizers.load(corpora / "with" / "tokenizer").hash
    assert Manifest.read(corpora / "old").tokenizer.bos is None
    request = {"tokenizer": str(corpora / "tokenizer")}
    for options in ({}, {"add_bos": False}):  # already prepared: nothing to do
        with pytest.raises(AssertionError, match=r"^assert None is not None"):
            prepared(corpora / "old", [str(corpora / "texts.jsonl")], **request, **options)
    with pytest.raises(
        UserError, match="was prepared with add_bos=None, not True; choose another --out, or add"
    ):
        prepared(corpora / "old", [str(corpora / "texts.jsonl")], **request, add_bos=True)


def test_bos_is_at_position_0_and_is_never_a_label(corpora, configure):
    config = configure(corpora / "with")
    bos, eod = 0, 1
    batches = TrainingBatches(config, Corpora(config.data), Share())
    seen = 0
    for batch in (batch for step in range(8) for batch in next(batches.from_step(step))):
        for tokens, labels, positions, counts in zip(
            batch.tokens, batch.labels, batch.positions, batch.loss_mask
        ):
            ends = (tokens == eod).nonzero().flatten()
            assert (labels[ends] == bos).all()  # exactly one after every end
            assert not counts[ends].any()
            begins = (tokens == bos).nonzero().flatten()
            assert (positions[begins] == 0).all()
            assert counts[begins].all()
            seen += len(begins)
    assert seen > 20


def test_corpora_with_and_without_bos_cannot_be_mixed(corpora, configure):
    refused = "begins documents with token None, .* with 0 .*; prepare it with --add-bos"
    with pytest.raises(UserError, match=refused):
        Corpora(configure([str(corpora / "with"), str(corpora / "old")]).data)
    Corpora(configure([str(corpora / "without"), str(corpora / "old")]).data)


def test_a_run_cannot_change_its_bos_rule(corpora, configure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder(configure(corpora / "old"))
    run.path.mkdir(parents=True)
    digest = Manifest.read(corpora / "old").tokenizer.hash
    for same in ("old", "old", "without"):
        run.keep_tokenizer(corpora / same / "tokenizer", digest)
    with pytest.raises(UserError, match=r"begin with BOS, unlike those .* prepare them with --no-add-bos"):
        run.keep_tokenizer(corpora / "with" / "tokenizer", digest)


def test_prompts_follow_the_add_bos_key(corpora, configure):
    for name, add_bos, prompt in (
        ("with", None, [0]),
        ("with", False, [1]),
        ("old", None, [1]),
        ("old", True, [0]),
    ):
        config = configure(corpora / name, data={"add_bos": add_bos})
        assert Corpora(config.data).tokenizer.prompt("") == prompt


def test_answer_spans_account_for_bos(corpora):
    tokenizer = tokenizers.load(corpora / "with" / "tokenizer")
    encoded = encode_answered(tokenizer, "key: value.", [(5, 10)])
    (start, end), tokens = encoded.answers[0], encoded.tokens
    assert tokens[0] == tokenizer.bos
    assert tokenizer.decode(tokens[start:end]) == "value"
    assert encoded.scored().nonzero()[0].tolist() == list(range(start, end))


@pytest.mark.parametrize("joined", [True, False])
def test_each_sequence_of_a_two_text_example_has_one_bos(joined, corpora):
    tokenizer = tokenizers.load(corpora / "with" / "tokenizer")
    encoder = Encoder(tokenizer, "uint16", seed=0, validation_bound=0)
    encoded = encoder.encode([Document(("a", "b"), label=1, joined=joined)])["train"].tokens
    assert [row.tolist().count(tokenizer.bos) for row in encoded] == ([1] if joined else [1, 1])
    assert all(row[0] == tokenizer.bos for row in encoded)


def test_masked_language_models_never_hide_bos():
    tokens = torch.tensor([0, 5, 6, 7, 1] * 20)
    hidden = hide(tokens, Masking(rate=1.0), Vocabulary(size=10, eod=1, bos=0), (0,))[1]
    assert torch.equal(hidden, tokens > 1)


def test_tokens_of_other_documents_contain_no_bos(corpora, tmp_path):
    corpus = PreparedCorpus(corpora / "with", 1.0, Manifest.read(corpora / "with"))
    samples = BlendedSamples([corpus], "train", 32, 0, tmp_path)
    samples.build(1)
    others = samples.corpora[0].foreign_tokens(0, 400, np.random.default_rng(0))
    assert (others > 1).all()
