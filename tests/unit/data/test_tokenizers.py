import json
from contextlib import suppress
from pathlib import Path

import pytest

from data_pipeline import tokenizers
from data_pipeline.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from megakernel.config.errors import UserError
from tests.unit.data.conftest import documents

TEXTS = [
    "",
    "a",
    "plain words, 1234 and punctuation!?",
    "tabs\t and  double  spaces \n\n\r\n and a last line without end",
    "Ünïcödé 漢字 한국어 👍🏽 e\u0301 \u200b \ufeff",
    "\x00\x01 control",
    "<|endoftext|> spelled out <|endoftext|>",
    " ",
]


def _bpe() -> HuggingFaceTokenizer:
    return tokenizers.train_bpe(documents(50, seed=3), 400)


@pytest.fixture(scope="module", params=[ByteTokenizer, _bpe], ids=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_back_the_text(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_encodes_to_the_end_of_a_document(tokenizer: Tokenizer, text: str):
    assert tokenizer.eod not in tokenizer.encode(text)


def test_no_word_encodes_to_the_end_of_a_document(tmp_path: Path):
    tokenizer = tokenizers.train_words(["one <|endoftext|> two x<|endoftext|> one"])
    tokenizer.save(tmp_path)
    for words in (tokenizer, tokenizers.load(tmp_path)):
        ids = words.encode("one <|endoftext|> x<|endoftext|> three two")
        assert words.eod not in ids
        assert ids[1] == ids[3], "an unknown word"
        assert len(set(ids)) == 4


def test_ids_are_in_the_vocabulary(tokenizer: Tokenizer):
    ids = [i for text in TEXTS for i in tokenizer.encode(text)]
    assert min(ids) >= 0
    assert max(ids) < tokenizer.vocab_size
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


def test_a_batch_is_encoded_like_its_texts(tokenizer: Tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_a_saved_tokenizer_loads_unchanged(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    loaded = tokenizers.load(tmp_path)
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (loaded.vocab_size, loaded.eod, loaded.hash) == (
        tokenizer.vocab_size,
        tokenizer.eod,
        tokenizer.hash,
    )


def test_decoding_leaves_out_end_of_document_tokens(tokenizer: Tokenizer):
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eod, *tokenizer.encode("cd")]) == "abcd"


def test_bytes_that_end_inside_a_character_can_be_decoded():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("a漢")[:-1]) == "a\ufffd"


def test_bpe_has_at_most_the_requested_size_and_merges():
    bpe = _bpe()
    assert 257 < bpe.vocab_size <= 400
    assert len(bpe.encode("alpha beta")) < len("alpha beta")


def test_tokenizers_that_encode_differently_have_different_hashes():
    other_text = tokenizers.train_bpe(documents(50, seed=4) + ["completely other words"] * 9, 400)
    assert len({ByteTokenizer().hash, _bpe().hash, other_text.hash}) == 3
    assert _bpe().hash == _bpe().hash


@pytest.mark.parametrize("spec", ["bpe:12", "bpe:", "bpe:many", "bpe:1000000000000", "bpe:nan", "bpe:-300"])
def test_an_invalid_bpe_size_is_refused(spec: str):
    with pytest.raises(ValueError, match=f"--tokenizer {spec}: .* at least 257 and .*; write bpe:8192"):
        tokenizers.make(spec, iter([]))


def test_a_missing_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"tokenizer '.*nothing' cannot be loaded .*; give byte, bpe:SIZE"
    ) as error:
        tokenizers.load(tmp_path / "nothing")
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_an_end_of_sequence_token_is_refused(tmp_path: Path):
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=_bpe()._tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no end-of-sequence token .* set eos_token"):
        tokenizers.load(tmp_path)


@pytest.mark.parametrize("named_in", ["config.json", "tokenizer_config.json"])
def test_custom_code_of_a_tokenizer_is_not_executed(
    named_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even after a confirmation at the prompt of `transformers`."""
    monkeypatch.setattr("builtins.input", lambda question: "y")
    _bpe().save(tmp_path)
    classes = {"AutoTokenizer": ["custom.Tokenizer", None], "AutoConfig": "custom.Config"}
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    custom = {"tokenizer_class": "Tokenizer", "auto_map": classes, "model_type": "custom"}
    (tmp_path / named_in).write_text(json.dumps({**content, **custom}))
    (tmp_path / "custom.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'harm')!r})\n")
    with suppress(UserError):  # unless the folder loads without its code
        tokenizers.load(tmp_path)
    assert not (tmp_path / "harm").exists()
