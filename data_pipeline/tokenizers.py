"""Text to token ids and back: bytes, words, pixels, a BPE trained on the spot, or any Hugging Face tokenizer."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megakernel.config.errors import UserError, first_line


def unreachable(name: str, repo_type: str) -> str | None:
    """Why nothing of the hub's `name` can be fetched; None for a folder, and where the hub answers, whatever it says.

    Its libraries try for a minute before they say that it does not answer.

    repo_type: model or dataset.
    """
    if Path(name).is_dir():
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=10)
    except HfHubHTTPError:
        return None
    # Wrong names, an offline mode, name servers, proxies and certificates have types of several libraries.
    except Exception as error:
        return first_line(error)
    return None


BPE_EOD = "<|endoftext|>"
UNKNOWN_WORD = "<|unknown|>"
CHAT_TEMPLATE = "chat_template.jinja"
"""File of a tokenizer's folder, as `transformers` names it."""
ADD_BOS = "add_bos"
"""Key of tokenizer_config.json under which `Tokenizer.add_bos` is kept."""
MOST_MERGED = 4_000_000
"""Ids of a BPE: its trainer ends the process where it cannot allocate room for all of them at once."""
# Digits, spaces, line ends, accents, wide scripts and an emoji: tokenizers that split, normalize or merge
# differently give other ids, however their files are written.
_PROBE = "def f(x):\n\treturn  x+1 # 3.14, don't\r\nÀ é ü ß Ω 漢字 한 👍🏽 \u00a0 <|endoftext|>"


class Tokenizer(ABC):
    """Text to ids and back; `eod` ends every document and is never produced by encoding text."""

    kind: str
    vocab_size: int
    eod: int
    bos: int | None = None
    """Its token for the beginning of a text; None where it has none."""

    add_bos = False
    """Whether documents and prompts begin with it."""

    chat_template: str | None = None
    """Jinja that makes texts of conversations; None where it has none."""

    probe = _PROBE
    """A text whose ids tell tokenizers of this kind apart."""

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without `eod`."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; `eod` and `bos` are left out."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write everything `load` needs into `folder`."""

    @abstractmethod
    def for_transformers(self) -> Any:
        """The same tokenizer as a `PreTrainedTokenizerBase`, with the chat template. UserError where there is none."""

    @property
    def eod_text(self) -> str:
        """How `eod` is written in a chat template."""
        return BPE_EOD

    @abstractmethod
    def _vocabulary(self) -> Any:
        """What the ids stand for, as JSON."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without `eod`."""
        return self.encode_batch([text])[0]

    @property
    def prefix(self) -> list[int]:
        """What every document and prompt begins with, once: `bos`, or nothing."""
        return [self.bos] if self.add_bos and self.bos is not None else []

    def prompt(self, text: str) -> list[int]:
        """Ids of a text to continue; of an empty one the token that comes before a document's first."""
        return [*self.prefix, *self.encode(text)] or [self.eod]

    @property
    def ends_messages(self) -> bool:
        """Whether its chat template writes `eod` inside of conversations, so that it does not tell where they end."""
        template = self.chat_template or ""
        return "eos_token" in template or self.eod_text in template

    @property
    def hash(self) -> str:
        """SHA-256 of what the tokenizer does (vocabulary, eod, ids of a probe text), not of its files."""
        behaviour = [self.eod, self.encode(self.probe), self._vocabulary()]
        return hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()


class _BytesTokenizer(Tokenizer):
    """Ids 0-255 are bytes; 256 ends a document."""

    vocab_size = 257
    eod = 256
    marker: str
    """The file that says which of them a folder has."""

    def save(self, folder: Path) -> None:
        """Write the marker, and the chat template."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.marker).write_text(json.dumps({"vocab_size": self.vocab_size, "eod": self.eod}) + "\n")
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template, encoding="utf-8")

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(i for i in ids if i != self.eod)

    def _vocabulary(self) -> Any:
        return self.kind


class ByteTokenizer(_BytesTokenizer):
    """UTF-8 bytes are ids 0-255; 256 ends a document."""

    kind = "byte"
    marker = "byte_tokenizer.json"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """UTF-8 bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self._bytes(ids).decode(errors="replace")

    def for_transformers(self) -> Any:
        """A byte-level BPE without merges."""
        tokenizer = byte_level(self.eod, BPE_EOD)
        tokenizer.chat_template = self.chat_template
        return tokenizer


class PixelTokenizer(_BytesTokenizer):
    """Gray values, written as the characters U+0000 to U+00FF, are ids 0-255; 256 ends an image."""

    kind = "pixels"
    marker = "pixel_tokenizer.json"
    probe = "".join(map(chr, range(256)))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The number of each character; UserError for a text that is no image."""
        try:
            return [list(text.encode("latin-1")) for text in texts]
        except UnicodeEncodeError as error:
            character = error.object[error.start]
            raise UserError(
                f"--tokenizer pixels reads images, and a text holds {character!r}; take --tokenizer byte"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The image, a character for each pixel."""
        return self._bytes(ids).decode("latin-1")

    def for_transformers(self) -> Any:
        """There is none."""
        raise UserError("--tokenizer pixels reads images; take --tokenizer byte, or a Hugging Face tokenizer")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of `transformers`; its end-of-sequence token ends documents."""

    kind = "huggingface"

    def __init__(self, tokenizer: Any):
        """Wrap a `PreTrainedTokenizerBase` that has an eos token."""
        assert tokenizer.eos_token_id is not None
        self._tokenizer = tokenizer
        self.eod = int(tokenizer.eos_token_id)
        self.bos = tokenizer.bos_token_id
        # A token that also ends documents stands before each as it is.
        self.add_bos = self._adds_bos and self.bos != self.eod
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.chat_template = self._own_template

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without `bos`; special tokens spelled out in a text are ordinary text."""
        if not texts:  # of which `transformers` makes an IndexError
            return []
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        """The text, with no clean-up of spaces."""
        spoken = [i for i in ids if i not in (self.eod, self.bos)]
        return self._tokenizer.decode(spoken, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Write the files `AutoTokenizer.from_pretrained` reads; it then begins texts as documents begin here."""
        if self._adds_bos != self.add_bos:
            self._tokenizer.add_bos_token = self.add_bos
        self._tokenizer.init_kwargs[ADD_BOS] = self.add_bos
        self.for_transformers().save_pretrained(folder)

    def for_transformers(self) -> Any:
        """What it wraps."""
        if self.chat_template != self._own_template:
            self._tokenizer.chat_template = self.chat_template
        return self._tokenizer

    @property
    def eod_text(self) -> str:
        """Its end-of-sequence token."""
        return self._tokenizer.eos_token

    @property
    def _own_template(self) -> str | None:
        """Of several the one for conversations without tools."""
        own = self._tokenizer.chat_template
        return own.get("default") if isinstance(own, dict) else own

    @property
    def _adds_bos(self) -> bool:
        """Its own rule, wherever it is written: `add_bos_token`, a class, a post-processor."""
        return self.bos is not None and self._tokenizer("a")["input_ids"][:1] == [self.bos]

    def _vocabulary(self) -> Any:
        return sorted(self._tokenizer.get_vocab().items(), key=lambda entry: entry[1])


def load(folder: Path | str, *, add_bos: bool | None = None, own_rule: bool = False) -> Tokenizer:
    """The tokenizer that `save` wrote, or any Hugging Face tokenizer directory or hub name.

    add_bos: whether documents begin with its `bos`; None: as the folder says. own_rule: what a folder says that `save`
    has not written: the tokenizer's own rule, or, as in earlier versions, that they do not.
    Raises UserError where there is none, or where it has no end-of-sequence token.
    """
    tokenizer = _load(folder, own_rule)
    if add_bos and tokenizer.bos in (None, tokenizer.eod):
        raise UserError(
            f"add_bos: tokenizer {str(folder)!r} has no beginning-of-sequence token beside the one that ends "
            "documents; leave it out, or set bos_token in its tokenizer_config.json"
        )
    if add_bos is not None:
        tokenizer.add_bos = add_bos
    return tokenizer


def _load(folder: Path | str, own_rule: bool) -> Tokenizer:
    for kind in (ByteTokenizer, PixelTokenizer):
        if (Path(folder) / kind.marker).is_file():
            marked = kind()
            template = Path(folder) / CHAT_TEMPLATE
            marked.chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
            return marked
    from transformers import AutoTokenizer, PreTrainedConfig

    try:
        # Given, so that no config.json is looked at that names code to run: a tokenizer needs none of it.
        config = PreTrainedConfig() if _names_code(Path(folder)) else None
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            config=config,
            trust_remote_code=False,
            local_files_only=unreachable(str(folder), "model")
            is not None,  # what was fetched before is still found
        )
    # transformers tells a missing file, an unreachable hub and a malformed file by many types.
    except Exception as error:
        raise UserError(
            f"tokenizer {str(folder)!r} cannot be loaded ({first_line(error)}); give byte, bpe:SIZE, words, pixels, "
            "a directory with tokenizer.json, or a reachable hub name"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {str(folder)!r} has no end-of-sequence token to end documents with; "
            "set eos_token in its tokenizer_config.json"
        )
    found, ours = HuggingFaceTokenizer(tokenizer), ByteTokenizer()
    found.add_bos = tokenizer.init_kwargs.get(ADD_BOS, own_rule and found.add_bos)
    ours.chat_template = found.chat_template
    known = is_byte_level(tokenizer.get_vocab(), ours.eod) and found.encode(_PROBE) == ours.encode(_PROBE)
    return ours if known else found  # an exported one is known again: data is the same as under its own name


def _names_code(folder: Path) -> bool:
    try:
        return "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """A byte-level BPE of at most `vocab_size` ids, `<|endoftext|>` (0) and the 256 bytes included.

    Few or uniform texts have fewer pairs worth merging and give a smaller vocabulary.
    """
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BPE_EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=model, eos_token=BPE_EOD))


def train_words(texts: Iterable[str]) -> HuggingFaceTokenizer:
    """The words between spaces, an id each, the most frequent first; others become one word, and spaces are lost."""
    from tokenizers import Tokenizer as Model
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Model(models.WordLevel(unk_token=UNKNOWN_WORD))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=[BPE_EOD, UNKNOWN_WORD], show_progress=False)
    model.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=model, eos_token=BPE_EOD, unk_token=UNKNOWN_WORD)
    )


def make(spec: str, documents: Iterator[str], *, add_bos: bool | None = None) -> Tokenizer:
    """The tokenizer that `--tokenizer SPEC` names: `byte`, `pixels`, `words`, `bpe:SIZE`, a directory or a hub name.

    documents: read by `words` and `bpe:SIZE` only, up to SAMPLE_CHARACTERS. add_bos: whether documents begin with its
    `bos`, which only a directory or hub name has; None: as its own rule says.
    """
    name, _, size = spec.partition(":")
    if add_bos and (spec in ("byte", "pixels", "words") or name == "bpe"):
        raise UserError(f"--add-bos: --tokenizer {spec} has no beginning-of-sequence token; leave it out")
    if spec == "byte":
        return ByteTokenizer()
    if spec == "pixels":
        return PixelTokenizer()
    if spec == "words":
        return train_words(_sample(documents))
    if name != "bpe":
        return load(spec, add_bos=add_bos, own_rule=True)
    if not re.fullmatch("[0-9]{1,9}", size) or not 257 <= int(size) <= MOST_MERGED:
        shown = spec if len(spec) < 40 else f"{spec[:40]}..."
        raise UserError(
            f"--tokenizer {shown}: a byte-level BPE needs a size of at least 257 and at most {MOST_MERGED:,}; "
            "write bpe:8192"
        )
    return train_bpe(_sample(documents), int(size))


SAMPLE_CHARACTERS = 100_000_000
"""Of the documents that a tokenizer is trained on."""


def _sample(documents: Iterator[str]) -> Iterator[str]:
    characters = SAMPLE_CHARACTERS
    for document in documents:
        yield document[:characters]
        characters -= len(document)
        if characters <= 0:
            return


def byte_level(eod: int, eod_name: str) -> Any:
    """UTF-8 bytes as a byte-level BPE without merges, byte b with id b; a `PreTrainedTokenizerFast`.

    Sequences of a batch are padded on the left, with `eod`: that is what generation wants.
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
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
