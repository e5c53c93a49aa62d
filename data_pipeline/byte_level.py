"""The byte tokenizer in the form that `AutoTokenizer` reads, and known again when it comes back in that form."""

from collections.abc import Mapping
from typing import Any

BYTES = 256


def byte_level(eod: int, eod_name: str) -> Any:
    """UTF-8 bytes as a byte-level BPE without merges, byte b with id b; a `PreTrainedTokenizerFast`.

    Rows of a batch are padded on the left, with `eod`: that is what generation wants.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(eod_name, special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=eod_name, pad_token=eod_name, padding_side="left"
    )
    assert fast.eos_token_id == eod, fast.eos_token_id
    return fast


def is_byte_level(vocabulary: Mapping[str, int], eod: int) -> bool:
    """Whether ids are bytes, and nothing else but `eod`."""
    return {name: number for name, number in vocabulary.items() if number != eod} == _vocabulary()


def _vocabulary() -> dict[str, int]:
    """What byte-level BPE writes for each byte -> the byte: itself where it is visible, else one from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(BYTES, 2 * BYTES))
    return {chr(byte) if byte in visible else chr(next(hidden)): byte for byte in range(BYTES)}
