"""The check that data was prepared with the tokenizer of the initial weights."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from data_pipeline import tokenizers
from data_pipeline.tokenizers import ByteTokenizer
from megakernel.checkpoint.dense.tokenizer import save_tokenizer
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import UserError
from megakernel.model.settings import model_settings
from megakernel.parallel import OneProcess
from tests import bos_tokenizers
from tests.unit.config import trees

DATA = Path("data/x")


def check(source, digest, add_bos=False):
    """Check the weights of `source` against a corpus with this tokenizer hash."""
    corpora = SimpleNamespace(train=[DATA], tokenizer_hash=digest, bos=1 if add_bos else None)
    return WeightSource("init.from", source, None).check_tokenizer(corpora)


@pytest.fixture(scope="module")
def bpe():
    return tokenizers.train_bpe(["some words, some more words"] * 9, 270)


@pytest.fixture
def sources(bpe, tmp_path):
    """A run, one of its checkpoints and a folder of transformers, all with one BPE tokenizer."""
    bpe.save(tmp_path / "run" / "tokenizer")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    save_tokenizer(bpe, tmp_path / "dense")
    return {
        tmp_path / "run": tmp_path / "run" / "tokenizer",
        checkpoint: tmp_path / "run" / "tokenizer",
        tmp_path / "dense": tmp_path / "dense",
    }


def test_the_same_tokenizer_is_accepted_without_a_warning(sources, bpe):
    assert [check(source, bpe.hash) for source in sources] == [None] * 3


def test_another_tokenizer_is_refused_in_one_line_with_the_remedy(sources):
    for source, folder in sources.items():
        with pytest.raises(UserError) as caught:
            check(source, ByteTokenizer().hash)
        assert str(caught.value) == (
            f"init.from={source} has another tokenizer than data.train={DATA}; prepare the data with "
            f"`megakernel prepare --tokenizer {folder}`"
        )


@pytest.mark.parametrize(
    ("rule", "add_bos", "flag"), [("template", False, "--add-bos"), ("no rule", True, "--no-add-bos")]
)
def test_data_with_another_bos_rule_is_accepted_with_a_warning(rule, add_bos, flag, tmp_path):
    """For the rule of a dense model and that of a run; runs of earlier versions had none."""
    bos_tokenizers.save(rule, tmp_path)
    digest = tokenizers.load(tmp_path).hash
    warning = check(tmp_path, digest, add_bos=add_bos)
    assert f"; prepare the data with `megakernel prepare {flag}` to keep" in warning
    assert check(tmp_path, digest, add_bos=not add_bos) is None
    bos_tokenizers.save(rule, tmp_path / "run" / "tokenizer")
    assert check(tmp_path / "run", digest) is None


def test_weights_without_a_tokenizer_are_accepted_with_a_warning(tmp_path):
    warning = check(tmp_path, ByteTokenizer().hash)
    assert (
        warning == f"{tmp_path} has no tokenizer: whether {DATA} was prepared with the same one is not known"
    )


def test_the_byte_tokenizer_is_recognized_in_the_form_of_transformers(tmp_path):
    save_tokenizer(ByteTokenizer(), tmp_path)
    assert check(tmp_path, ByteTokenizer().hash) is None


@pytest.mark.parametrize(
    ("source", "remedy"),
    [(None, "remove the key or raise it"), ("m", "prepare the data with the tokenizer of init.from=m")],
)
def test_a_vocabulary_smaller_than_the_data_needs_is_refused(source, remedy):
    config = trees.config(model={"vocab_size": 256}, init={"from": source})
    text = rf"model.vocab_size=256 is smaller than the corpus's tokenizer \(257 ids\); {remedy}"
    with pytest.raises(UserError, match=text):
        model_settings(config, OneProcess(), 257)
