"""Incremental detokenization, the bytes of tokens, and stop strings."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from data_pipeline.tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
"""What tokenizers decode an incomplete character to."""

CONTEXT = 8
"""Earlier tokens that are decoded with new ones, since some tokenizers drop a space at the start of a text."""


class TextStream:
    """Turns tokens into text as soon as their characters are complete."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        """prompt: the preceding tokens, whose text is not returned."""
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT:])
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that the token completes; empty within a character of several tokens."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_REPLACEMENT):
            return ""
        self._context, self._pending = (self._context + self._pending)[-CONTEXT:], []
        return text

    def end(self) -> str:
        """The text of tokens that never completed a character."""
        return self._text()

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context)
        whole = self._tokenizer.decode(self._context + self._pending)
        if not whole.startswith(before):  # the pending tokens complete a character that began in the prompt
            before = before.removesuffix(_REPLACEMENT)
        return whole[len(before) :]


class TokenBytes:
    """The bytes that each token stands for, which may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Tokens are decoded after another one, since some tokenizers drop a space at the start of a text.
        self._before = tokenizer.encode("a")[-1:]
        self._text_before = tokenizer.decode(self._before)

    def of(self, token: int) -> bytes:
        """The bytes of a token; those of a special token are its name's."""
        if token == self._tokenizer.eod:
            return self._tokenizer.eod_text.encode()
        if token == self._tokenizer.bos:
            return (self._piece(token) or "").encode()
        text = self._tokenizer.decode([*self._before, token])
        if not text.startswith(self._text_before):
            text = self._tokenizer.decode([token])
        else:
            text = text[len(self._text_before) :]
        if _REPLACEMENT not in text:
            return text.encode()
        return self._part(token) or text.encode()

    def in_text(self, token: int) -> bytes:
        """What a token adds to a text: nothing if it ends or begins one."""
        return b"" if token in (self._tokenizer.eod, self._tokenizer.bos) else self.of(token)

    def _part(self, token: int) -> bytes | None:
        """The bytes of a token without text of its own; None if the tokenizer does not say them."""
        if self._tokenizer.kind == "byte":
            return bytes([token])
        piece = self._piece(token) or ""
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # SentencePiece's byte fallback
            return bytes.fromhex(byte[1])
        if piece and all(character in self._bytes_of_characters for character in piece):
            return bytes(self._bytes_of_characters[character] for character in piece)
        return None

    def _piece(self, token: int) -> str | None:
        """The name of a token in the vocabulary."""
        return self._tokenizer.for_transformers().convert_ids_to_tokens(token)

    @cached_property
    def _bytes_of_characters(self) -> Mapping[str, int]:
        """The characters by which byte-level BPEs name bytes."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {character: byte for byte, character in bytes_to_unicode().items()}


class StopStrings:
    """Passes text on up to the first stop string; holds back what may be the start of one."""

    def __init__(self, strings: Sequence[str]):
        """strings: none of them empty."""
        self._strings = strings
        self._held = ""
        self.matched = False
        """Whether a stop string has occurred."""

    def add(self, text: str) -> str:
        """The new text that is certain to precede any stop string."""
        if not self._strings:
            return text
        self._held += text
        starts = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        if starts:
            self.matched = True
            return self._release(min(starts))
        longest = max(map(len, self._strings)) - 1
        ends = (self._held[-count:] for count in range(min(longest, len(self._held)), 0, -1))
        may_be_stop = (end for end in ends if any(string.startswith(end) for string in self._strings))
        return self._release(len(self._held) - len(next(may_be_stop, "")))

    def end(self) -> str:
        """The text held back, unless a stop string occurred."""
        return "" if self.matched else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
