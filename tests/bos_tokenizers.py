"""Small tokenizers of `transformers`, one for each way in which a tokenizer may add BOS."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def _fast(template: bool, bos: str = BOS) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate((BOS, EOS, *letters))}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    if template:
        add_bos = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
        model.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), add_bos])
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token=bos, eos_token=EOS)


def _llama() -> LlamaTokenizer:
    names = ["<unk>", "<s>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: number for number, name in enumerate(names)}
    return LlamaTokenizer(vocab=vocabulary, merges=[], add_bos_token=True)


MADE = {
    "template": lambda: _fast(template=True),  # Llama 3
    "add_bos_token": _llama,  # Llama 2
    "no rule": lambda: _fast(template=False),  # Pythia
    "bos is eos": lambda: _fast(template=True, bos=EOS),  # OPT
}
WITH_BOS = ("template", "add_bos_token")


def save(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """Write the tokenizer and return it."""
    tokenizer: PreTrainedTokenizerBase = MADE[name]()
    tokenizer.save_pretrained(folder)
    return tokenizer
