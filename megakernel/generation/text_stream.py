"""Text from tokens as they come."""

from collections.abc import Sequence

from data_pipeline.tokenizers import Tokenizer

_CUT = "\ufffd"
"""What a tokenizer decodes a character to of which bytes are missing."""

_CONTEXT = 8
"""Tokens before the new ones that are decoded with them: some tokenizers drop a space at the start of a text."""


class TextStream:
    """Turns tokens into text as soon as their characters are whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        """prompt: the tokens before; their text is not repeated."""
        self._tokenizer = tokenizer
        self._said = list(prompt[-_CONTEXT:])
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that the token completes; empty inside a character of several tokens."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_CUT):
            return ""
        self._said, self._pending = (self._said + self._pending)[-_CONTEXT:], []
        return text

    def end(self) -> str:
        """The text of tokens that never made a whole character."""
        return self._text()

    def _text(self) -> str:
        before = self._tokenizer.decode(self._said)
        return self._tokenizer.decode(self._said + self._pending)[len(before) :]
