"""A corpus' tokenizer in the form that `AutoTokenizer` reads."""

from pathlib import Path

from data_pipeline.tokenizers import BPE_EOD, ByteTokenizer, Tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it, with the ids that the model was trained on."""
    if not isinstance(tokenizer, ByteTokenizer):
        tokenizer.save(folder)
        return
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=_bytes(tokenizer), eos_token=BPE_EOD)
    assert fast.eos_token_id == tokenizer.eod, fast.eos_token_id
    fast.save_pretrained(folder)


def _bytes(tokenizer: ByteTokenizer):
    """UTF-8 bytes as a byte-level BPE without merges, byte b with id b."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Model

    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    model = Model(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(BPE_EOD, special=True)])
    return model


def _characters() -> list[str]:
    """What byte-level BPE writes for each byte: itself where that is a visible character, else one from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]
