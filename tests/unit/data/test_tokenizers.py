import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

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
    with pytest.raises(
        ValueError, match=r"which token ends documents \(it has <\|endoftext\|>\); name it with --eos-token"
    ):
        tokenizers.load(tmp_path)


def test_a_folder_of_tokenizer_json_alone_is_read_with_eos_token(tmp_path: Path):
    """Its own rule, too: such a file may put a token before every document."""
    model = _bpe()._tokenizer.backend_tokenizer
    model.add_special_tokens(["<s>", "</s>"])
    model.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"it has .*<s>, </s>\); name it with --eos-token TOKEN, or write"):
        tokenizers.make(str(tmp_path), iter([]))
    with pytest.raises(
        ValueError, match=r"--eos-token </x>: .* has no such token; give one that it has, such as </s>"
    ):
        tokenizers.make(str(tmp_path), iter([]), eos_token="</x>")
    tokenizer = tokenizers.make(str(tmp_path), iter([]), eos_token="</s>")
    ids = {name: model.token_to_id(name) for name in ("<s>", "</s>")}
    assert (tokenizer.eod, tokenizer.prefix) == (ids["</s>"], [ids["<s>"]])
    assert not {*ids.values()} & {*tokenizer.encode("a </s> b <s>")}
    assert tokenizers.make(str(tmp_path), iter([]), eos_token="</s>", add_bos=False).prefix == []
    tokenizer.save(tmp_path / "saved")
    saved = tokenizers.load(tmp_path / "saved")
    assert (saved.hash, saved.prefix, saved.vocab_size) == (
        tokenizer.hash,
        tokenizer.prefix,
        tokenizer.vocab_size,
    )


def test_eos_token_replaces_the_one_of_the_tokenizer(tmp_path: Path):
    bpe = _bpe()
    bpe._tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    bpe.save(tmp_path)
    tokenizer = tokenizers.make(str(tmp_path), iter([]), eos_token="<|end|>")
    assert tokenizer.eod == bpe._tokenizer.convert_tokens_to_ids("<|end|>") != bpe.eod
    assert tokenizer.decode(tokenizer.encode("alpha <|end|>")) == "alpha <|end|>"


@pytest.mark.parametrize("spec", ["byte", "pixels", "words", "bpe:300"])
def test_eos_token_is_refused_where_the_tokenizer_is_made(spec: str):
    with pytest.raises(
        ValueError, match=rf"--eos-token: --tokenizer {spec} has its own end-of-document token"
    ):
        tokenizers.make(spec, iter([]), eos_token="</s>")


def genome(letters: int) -> str:
    return "".join(random.Random(1).choices("ACGT", k=letters))


@pytest.mark.parametrize("word", [genome, lambda length: " " * length, lambda length: "ab" * (length // 2)])
def test_a_bpe_is_trained_in_time_linear_in_the_longest_word(word: Callable[[int], str]):
    """Of 8 times as many letters 8 times as long, not 64 times; a factor of 3 is left for noise."""

    def seconds(letters: int) -> float:
        started = time.process_time()
        tokenizers.train_bpe([word(letters)], 600)
        return time.process_time() - started

    seconds(1_000)  # imports
    assert seconds(160_000) < 24 * max(seconds(20_000), 0.02)


def test_a_long_word_is_encoded_whole_and_decoded_again():
    bpe = tokenizers.train_bpe([genome(30_000), *documents(20, seed=3)], 600)
    text = genome(100_000) + " " * 5_000 + "é" * 3_000
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert len(ids) < 0.5 * 100_000 + 8_000, "letters were merged"


def test_words_of_usual_length_are_trained_as_ever():
    """A BPE of texts without a word of more than 512 characters is the same as without the limit."""
    texts = [*documents(50, seed=3), "x" * 512 + " " * 512 + "y"]
    unlimited = Model(models.BPE())
    unlimited.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": [tokenizers.BPE_EOD], "initial_alphabet": alphabet, "show_progress": False}
    unlimited.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, **options))
    assert tokenizers.train_bpe(texts, 600)._tokenizer.get_vocab() == unlimited.get_vocab()


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
