"""Tokenizers: bytes, words, pixels, a BPE trained by `prepare`, or any Hugging Face tokenizer."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megakernel.config.errors import UserError, first_line, nearest_first
from megakernel.config.extras import need


def unreachable(name: str, repo_type: str) -> str | None:
    """Why the hub cannot be reached for `name`; None for a folder, and if the hub answers at all.

    Checked first because the hub's own libraries retry for a minute before they fail. repo_type: model or dataset.
    """
    if Path(name).is_dir():
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=10)
    except HfHubHTTPError:
        return None
    # Invalid names, offline mode, DNS, proxies and certificates raise exceptions of several libraries.
    except Exception as error:
        return first_line(error)
    return None


BPE_EOD = "<|endoftext|>"
UNKNOWN_WORD = "<|unknown|>"
CHAT_TEMPLATE = "chat_template.jinja"
"""File name of the chat template in a tokenizer's folder, as in `transformers`."""
ADD_BOS = "add_bos"
"""Key of `Tokenizer.add_bos` in tokenizer_config.json."""
MAX_BPE_SIZE = 4_000_000
"""Largest size of a BPE: its trainer aborts the process if it cannot allocate memory for all ids at once."""
# Digits, spaces, line ends, accents, wide scripts and an emoji: tokenizers that split, normalize or merge
# differently give different ids, whatever their files look like.
_PROBE = "def f(x):\n\treturn  x+1 # 3.14, don't\r\nÀ é ü ß Ω 漢字 한 👍🏽 \u00a0 <|endoftext|>"


class Tokenizer(ABC):
    """Text to token ids and back; `eod` ends every document and is never produced by encoding text."""

    kind: str
    vocab_size: int
    eod: int
    bos: int | None = None
    """Beginning-of-sequence token; None if it has none."""

    add_bos = False
    """Whether documents and prompts begin with `bos`."""

    chat_template: str | None = None
    """Jinja template that renders conversations; None if it has none."""

    unknown: int | None = None
    """The id of all that it has no other id for; None if it loses nothing in this way."""

    parse_special = False
    """Whether `encode_batch` reads the names of `special_tokens` in a text as these tokens."""

    probe = _PROBE
    """A text whose ids distinguish tokenizers of this kind."""

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without `eod`."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without `eod` and `bos`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write everything `load` needs into `folder`."""

    @abstractmethod
    def for_transformers(self) -> Any:
        """A `PreTrainedTokenizerBase` with the chat template. UserError if `transformers` has no equivalent."""

    @property
    def eod_text(self) -> str:
        """The text of `eod` in a chat template."""
        return BPE_EOD

    @abstractmethod
    def _vocabulary(self) -> Any:
        """The vocabulary as JSON values, for `hash`."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without `eod`."""
        return self.encode_batch([text])[0]

    @property
    def prefix(self) -> list[int]:
        """The ids that every document and prompt begins with: `bos`, or none."""
        return [self.bos] if self.add_bos and self.bos is not None else []

    def prompt(self, text: str) -> list[int]:
        """Ids of a text to continue; never empty: without `bos`, an empty text is `eod`, as if a document had ended."""
        return [*self.prefix, *self.encode(text)] or [self.eod]

    @property
    def special_tokens(self) -> dict[int, str]:
        """Id -> name of the tokens that are no text."""
        return {}

    @property
    def ends_messages(self) -> bool:
        """Whether its chat template writes `eod` inside conversations, so that `eod` does not mark their end."""
        template = self.chat_template or ""
        return "eos_token" in template or self.eod_text in template

    @property
    def hash(self) -> str:
        """SHA-256 of the tokenizer's behavior (vocabulary, eod, ids of a probe text), not of its files."""
        behavior = [self.eod, self.encode(self.probe), self._vocabulary()]
        return hashlib.sha256(json.dumps(behavior).encode()).hexdigest()


class _BytesTokenizer(Tokenizer):
    """Ids 0-255 are bytes; 256 ends a document."""

    vocab_size = 257
    eod = 256
    marker: str
    """Name of the file that identifies the tokenizer of a folder."""

    def save(self, folder: Path) -> None:
        """Write the marker file and the chat template."""
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
        """The text; bytes that are not UTF-8 (a truncated character) become U+FFFD."""
        return self._bytes(ids).decode(errors="replace")

    def for_transformers(self) -> Any:
        """A byte-level BPE without merges."""
        tokenizer = byte_level(self.eod, BPE_EOD)
        tokenizer.chat_template = self.chat_template
        return tokenizer


class PixelTokenizer(_BytesTokenizer):
    """Gray values, as characters U+0000 to U+00FF, are ids 0-255; 256 ends an image."""

    kind = "pixels"
    marker = "pixel_tokenizer.json"
    probe = "".join(map(chr, range(256)))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The code points of each text; UserError for a text that is not an image."""
        try:
            return [list(text.encode("latin-1")) for text in texts]
        except UnicodeEncodeError as error:
            character = error.object[error.start]
            raise UserError(
                f"--tokenizer pixels reads images, and a text holds {character!r}; use --tokenizer byte"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The image, one character per pixel."""
        return self._bytes(ids).decode("latin-1")

    def for_transformers(self) -> Any:
        """Raises UserError: there is no equivalent."""
        raise UserError("--tokenizer pixels reads images; use --tokenizer byte, or a Hugging Face tokenizer")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of `transformers`; its end-of-sequence token ends documents."""

    kind = "huggingface"

    def __init__(self, tokenizer: Any):
        """Wrap a `PreTrainedTokenizerBase` that has an eos token."""
        assert tokenizer.eos_token_id is not None
        self._tokenizer = tokenizer
        self.eod = int(tokenizer.eos_token_id)
        self.bos = tokenizer.bos_token_id
        # If BOS is also the end-of-document token, it precedes every document anyway.
        self.add_bos = self._adds_bos_itself and self.bos != self.eod
        # GPT-2's byte-level BPE names the token that ends documents, and never uses it for text.
        if tokenizer.unk_token_id not in (self.eod, self.bos):
            self.unknown = tokenizer.unk_token_id
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.chat_template = self._own_template

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without `bos`; names of special tokens are ordinary text unless `parse_special`."""
        if not texts:  # `transformers` raises IndexError
            return []
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=not self.parse_special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        """The text, without clean-up of spaces."""
        text_ids = [i for i in ids if i not in (self.eod, self.bos)]
        return self._tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Write the files for `AutoTokenizer.from_pretrained`, with `add_bos` as its rule."""
        if self._adds_bos_itself != self.add_bos:
            self._tokenizer.add_bos_token = self.add_bos
        self._tokenizer.init_kwargs[ADD_BOS] = self.add_bos
        self.for_transformers().save_pretrained(folder)

    def for_transformers(self) -> Any:
        """The wrapped tokenizer."""
        if self.chat_template != self._own_template:
            self._tokenizer.chat_template = self.chat_template
        return self._tokenizer

    @property
    def special_tokens(self) -> dict[int, str]:
        """See `Tokenizer`: its special and other added tokens."""
        return {number: token.content for number, token in self._tokenizer.added_tokens_decoder.items()}

    @property
    def eod_text(self) -> str:
        """Its end-of-sequence token."""
        return self._tokenizer.eos_token

    @property
    def _own_template(self) -> str | None:
        """Its template; of several, the default one, for conversations without tools."""
        template = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def _adds_bos_itself(self) -> bool:
        """Whether it adds BOS itself, whatever the reason: `add_bos_token`, its class, a post-processor."""
        return self.bos is not None and self._tokenizer("a")["input_ids"][:1] == [self.bos]

    def _vocabulary(self) -> Any:
        return sorted(self._tokenizer.get_vocab().items(), key=lambda entry: entry[1])


def load(
    folder: Path | str, *, add_bos: bool | None = None, own_rule: bool = False, eos_token: str | None = None
) -> Tokenizer:
    """The tokenizer that `save` wrote, or any Hugging Face tokenizer directory or hub name.

    add_bos: whether documents begin with `bos`; None: as recorded in the folder. own_rule: for a folder that `save` has
    not written, use the tokenizer's own rule; otherwise no BOS is added, as in earlier versions.
    eos_token: the token that ends documents; None: the tokenizer's own.
    Raises UserError for no tokenizer, or one without an end-of-sequence token.
    """
    tokenizer = _load(folder, own_rule, eos_token)
    if add_bos and tokenizer.bos in (None, tokenizer.eod):
        raise UserError(
            f"add_bos: tokenizer {str(folder)!r} has no beginning-of-sequence token other than the one that ends "
            "documents; leave it out, or set bos_token in its tokenizer_config.json"
        )
    if add_bos is not None:
        tokenizer.add_bos = add_bos
    return tokenizer


def _load(folder: Path | str, own_rule: bool, eos_token: str | None) -> Tokenizer:
    for kind in (ByteTokenizer, PixelTokenizer):
        if (Path(folder) / kind.marker).is_file():
            if eos_token is not None:
                raise _has_its_own_end(folder)
            marked = kind()
            template = Path(folder) / CHAT_TEMPLATE
            marked.chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
            return marked
    need(f"tokenizer {folder}", "transformers")
    from transformers import AutoTokenizer, PreTrainedConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            # An explicit config stops AutoTokenizer from reading a config.json that names code to run.
            config=PreTrainedConfig() if _names_code(Path(folder)) else None,
            trust_remote_code=False,
            # If the hub is unreachable, read the local cache.
            local_files_only=unreachable(str(folder), "model") is not None,
        )
    # transformers raises many types for a missing file, an unreachable hub or a malformed file.
    except Exception as error:
        raise UserError(
            f"tokenizer {str(folder)!r} cannot be loaded ({first_line(error)}); give byte, bpe:SIZE, words, pixels, "
            "a directory with tokenizer.json, or a reachable hub name"
        ) from error
    if eos_token is not None:
        _set_eos(tokenizer, folder, eos_token)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {str(folder)!r} does not say which token ends documents{_candidates(tokenizer)}; name it "
            'with --eos-token TOKEN, or write {"eos_token": "TOKEN"} into its tokenizer_config.json'
        )
    loaded, byte = HuggingFaceTokenizer(tokenizer), ByteTokenizer()
    loaded.add_bos = tokenizer.init_kwargs.get(ADD_BOS, own_rule and loaded.add_bos)
    byte.chat_template = loaded.chat_template
    # An exported byte tokenizer is recognized, so that prepared data is the same as with `byte`.
    is_byte = is_byte_level(tokenizer.get_vocab(), byte.eod) and loaded.encode(_PROBE) == byte.encode(_PROBE)
    return byte if is_byte else loaded


def _set_eos(tokenizer: Any, folder: Path | str, eos_token: str) -> None:
    """Let `eos_token` end documents. A tokenizer without a configuration gets the BOS that it adds itself, too."""
    vocabulary = tokenizer.get_vocab()
    if eos_token not in vocabulary:
        special = {token.content for token in tokenizer.added_tokens_decoder.values()}
        raise UserError(
            f"--eos-token {eos_token}: tokenizer {str(folder)!r} has no such token; give one that it has, such as "
            f"{nearest_first(eos_token, special or vocabulary, 5)}"
        )
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        whole, plain = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (True, False))
        if whole[:1] != plain[:1]:
            tokenizer.add_special_tokens({"bos_token": tokenizer.convert_ids_to_tokens(whole[0])})
    tokenizer.add_special_tokens({"eos_token": eos_token})


def _candidates(tokenizer: Any) -> str:
    """The special tokens, of which one probably ends documents."""
    names = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return f" (it has {', '.join(names[:8])}{' ...' if len(names) > 8 else ''})" if names else ""


def _has_its_own_end(spec: object) -> UserError:
    return UserError(
        f"--eos-token: --tokenizer {spec} has its own end-of-document token; leave the option out"
    )


def _names_code(folder: Path) -> bool:
    try:
        return "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


_LONGEST_WORD = 512
"""Characters of a word that a BPE is trained on; no word of a language or of code is longer."""

# What Python alone counts as space, the trainer's pattern of words does not.
_LONG_WORD = re.compile(rf"[^\s\x1c-\x1f]{{{_LONGEST_WORD + 1},}}|[\s\x1c-\x1f]{{{_LONGEST_WORD + 1},}}")


def _in_short_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut wherever a word reaches `_LONGEST_WORD` characters.

    The trainer takes time in the square of a word's length: months for a genome, which is one word.
    """
    for text in texts:
        start = 0
        for word in _LONG_WORD.finditer(text):
            for end in range(word.start() + _LONGEST_WORD, word.end(), _LONGEST_WORD):
                yield text[start:end]
                start = end
        yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """A byte-level BPE of at most `vocab_size` ids, including `<|endoftext|>` (0) and the 256 bytes.

    Few or uniform texts have fewer pairs to merge and give a smaller vocabulary.
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
    model.train_from_iterator(_in_short_words(texts), trainer)
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=model, eos_token=BPE_EOD))


def train_words(texts: Iterable[str]) -> HuggingFaceTokenizer:
    """A tokenizer of words split at spaces, most frequent first; unknown words share one id, and spaces are lost."""
    from tokenizers import Tokenizer as Model
    from tokenizers import models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Model(models.WordLevel(unk_token=UNKNOWN_WORD))
    model.normalizer = normalizers.Replace(BPE_EOD, UNKNOWN_WORD)  # as a word of a text it ends no document
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=[BPE_EOD, UNKNOWN_WORD], show_progress=False)
    model.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=model, eos_token=BPE_EOD, unk_token=UNKNOWN_WORD)
    )


def is_trained(spec: str) -> bool:
    """Whether `make` trains the tokenizer that `--tokenizer SPEC` names."""
    return spec == "words" or spec.partition(":")[0] == "bpe"


def is_own(spec: str) -> bool:
    """Whether `make` makes the tokenizer itself: `byte`, `pixels` or one that it trains."""
    return spec in ("byte", "pixels") or is_trained(spec)


def make(
    spec: str, documents: Iterator[str], *, add_bos: bool | None = None, eos_token: str | None = None
) -> Tokenizer:
    """The tokenizer that `--tokenizer SPEC` names: `byte`, `pixels`, `words`, `bpe:SIZE`, a directory or a hub name.

    documents: read only for `words` and `bpe:SIZE`, up to SAMPLE_CHARACTERS. add_bos: whether documents begin with
    `bos`, which only tokenizers of a directory or hub name have; None: the tokenizer's own rule. eos_token: the token
    that ends documents, for such tokenizers; None: the tokenizer's own.
    """
    name, _, size = spec.partition(":")
    if add_bos and is_own(spec):
        raise UserError(f"--add-bos: --tokenizer {spec} has no beginning-of-sequence token; leave it out")
    if eos_token is not None and is_own(spec):
        raise _has_its_own_end(spec)
    if spec == "byte":
        return ByteTokenizer()
    if spec == "pixels":
        return PixelTokenizer()
    if spec == "words":
        need("--tokenizer words", "transformers")
        return train_words(_sample(documents))
    if name != "bpe":
        return load(spec, add_bos=add_bos, own_rule=True, eos_token=eos_token)
    if not re.fullmatch("[0-9]{1,9}", size) or not 257 <= int(size) <= MAX_BPE_SIZE:
        shown = spec if len(spec) < 40 else f"{spec[:40]}..."
        raise UserError(
            f"--tokenizer {shown}: a byte-level BPE needs a size of at least 257 and at most {MAX_BPE_SIZE:,}; "
            "write bpe:8192"
        )
    need(f"--tokenizer {spec}", "transformers")
    return train_bpe(_sample(documents), int(size))


SAMPLE_CHARACTERS = 100_000_000
"""Characters of documents that a tokenizer is trained on."""


def _sample(documents: Iterator[str]) -> Iterator[str]:
    characters = SAMPLE_CHARACTERS
    for document in documents:
        yield document[:characters]
        characters -= len(document)
        if characters <= 0:
            return


def byte_level(eod: int, eod_name: str) -> Any:
    """A `PreTrainedTokenizerFast` of UTF-8 bytes: a byte-level BPE without merges, with id b for byte b.

    Batches are padded on the left with `eod`, as generation needs.
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
    """Whether the ids are the bytes and `eod` only."""
    return {name: number for name, number in vocabulary.items() if number != eod} == _vocabulary()


def _vocabulary() -> dict[str, int]:
    """Byte-level BPE's character for each byte -> the byte: itself if printable, otherwise one from U+0100 on."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
