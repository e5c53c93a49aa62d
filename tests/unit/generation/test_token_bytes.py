"""The bytes of tokens, for tokenizers that split characters in different ways."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from data_pipeline.tokenizers import (
    BPE_EOD,
    ByteTokenizer,
    HuggingFaceTokenizer,
    byte_level,
    train_bpe,
    train_words,
)
from megakernel.generation.text import TokenBytes

TEXT = "naïve 漢字 👍🏽 é\ufffd end\n\ttab"


def sentencepiece():
    """A tokenizer of a few pieces with byte fallback, as of Llama 2, whose decoder drops the first space."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "n",
        "v",
        "e",
        "▁e",
    ]
    model = Tokenizer(
        models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, [("▁", "e")], byte_fallback=True)
    )
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    )


TOKENIZERS = {
    "byte": ByteTokenizer,
    "bpe": lambda: train_bpe([TEXT, "naïve 漢字 " * 20], 270),
    "byte level": lambda: HuggingFaceTokenizer(byte_level(256, BPE_EOD)),
    "sentencepiece": sentencepiece,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(name):
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(TEXT)
    data = [TokenBytes(tokenizer).of(token) for token in tokens]
    assert b"".join(data).decode().removeprefix(" " if name == "sentencepiece" else "") == TEXT
    assert any(b"\xef" not in part and b"\xf0" in part for part in data), "a part of a character"


def test_special_tokens_have_the_bytes_of_their_names():
    tokenizer = sentencepiece()
    assert TokenBytes(tokenizer).of(tokenizer.eod) == b"</s>"
    assert TokenBytes(tokenizer).of(1) == b"<s>"
    assert TokenBytes(ByteTokenizer()).of(256) == BPE_EOD.encode()


def test_words_have_their_bytes():
    tokenizer = train_words(["a wörd of words"])
    assert [TokenBytes(tokenizer).of(token).strip() for token in tokenizer.encode("wörd of")] == [
        "wörd".encode(),
        b"of",
    ]
