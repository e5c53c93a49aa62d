"""Text as tokens come, and where it ends."""

from collections.abc import Sequence

from data_pipeline.tokenizers import Tokenizer

_CUT = "\ufffd"
"""What a tokenizer decodes a character to of which bytes are missing."""

CONTEXT = 8
"""Tokens before the new ones that are decoded with them: some tokenizers drop a space at the start of a text."""


class TextStream:
    """Turns tokens into text as soon as their characters are whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        """prompt: the tokens before; their text is not repeated."""
        self._tokenizer = tokenizer
        self._said = list(prompt[-CONTEXT:])
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that the token completes; empty inside a character of several tokens."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_CUT):
            return ""
        self._said, self._pending = (self._said + self._pending)[-CONTEXT:], []
        return text

    def end(self) -> str:
        """The text of tokens that never made a whole character."""
        return self._text()

    def _text(self) -> str:
        before = self._tokenizer.decode(self._said)
        return self._tokenizer.decode(self._said + self._pending)[len(before) :]


class StopStrings:
    """Lets text pass up to the first of some strings, which does not; holds back what may be the start of one."""

    def __init__(self, strings: Sequence[str]):
        """strings: none of them empty."""
        self._strings = strings
        self._held = ""
        self.met = False
        """Whether one has come."""

    def add(self, text: str) -> str:
        """The part of the text so far that is certain to stay, without what was returned before."""
        if not self._strings:
            return text
        self._held += text
        found = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        if found:
            self.met = True
            return self._release(min(found))
        longest = max(map(len, self._strings)) - 1
        kept = next(
            (count for count in range(min(longest, len(self._held)), 0, -1) if self._may_begin(count)), 0
        )
        return self._release(len(self._held) - kept)

    def end(self) -> str:
        """What was held back, where no string came."""
        return "" if self.met else self._release(len(self._held))

    def _may_begin(self, count: int) -> bool:
        return any(string.startswith(self._held[-count:]) for string in self._strings)

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
