"""Responses in OpenAI's format: complete, or streamed."""

import codecs
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ..engine import Chosen, Finish
from ..text import TokenBytes
from .protocol import Body, ChatBody
from .worker import Piece


class Reply:
    """The response to one request."""

    def __init__(self, body: Body, model: str, fingerprint: str, token_bytes: TokenBytes):
        self._is_chat = isinstance(body, ChatBody)
        self._logprobs = body.num_top_tokens is not None
        self._token_bytes = token_bytes
        self._texts: dict[int, _Length] = {}
        self._common = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{fingerprint[:16]}",
        }

    def first_chunks(self, choices: int) -> list[dict[str, Any]]:
        """The first chunks of a chat stream, with the role."""
        start = {"role": "assistant", "content": ""}
        spoken = range(choices if self._is_chat else 0)
        return [self._body(".chunk", [self._choice(choice, {"delta": start})]) for choice in spoken]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a stream for a piece; none if it has no text and nothing else to report."""
        choices = []
        if piece.text or piece.chosen:
            part: dict[str, Any] = (
                {"delta": {"content": piece.text}} if self._is_chat else {"text": piece.text}
            )
            choices.append(self._choice(piece.choice, part, piece.chosen))
        if piece.finish is not None:
            part = {"delta": {}} if self._is_chat else {"text": ""}
            choices.append(self._choice(piece.choice, part, finish=piece.finish))
        return [self._body(".chunk", [choice]) for choice in choices]

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream with include_usage."""
        return self._body(".chunk", [], usage=usage)

    def complete(self, pieces: Sequence[Piece], choices: int, usage: dict[str, Any]) -> dict[str, Any]:
        """The complete response, with all choices."""
        finished = []
        by_choice: list[list[Piece]] = [[] for _ in range(choices)]
        for piece in pieces:
            by_choice[piece.choice].append(piece)
        for choice, choice_pieces in enumerate(by_choice):
            text = "".join(piece.text for piece in choice_pieces)
            message = {"role": "assistant", "content": text, "refusal": None}
            part = {"message": message} if self._is_chat else {"text": text}
            chosen = [one for piece in choice_pieces for one in piece.chosen]
            finished.append(self._choice(choice, part, chosen, choice_pieces[-1].finish))
        return self._body("", finished, usage=usage)

    def _body(self, chunk: str, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        name = f"chat.completion{chunk}" if self._is_chat else "text_completion"
        return {**self._common, "object": name, "choices": choices, **more}

    def _choice(
        self, choice: int, part: dict[str, Any], chosen: Sequence[Chosen] = (), finish: Finish | None = None
    ) -> dict[str, Any]:
        logprobs = None
        if self._logprobs and (chosen or finish is not None):
            logprobs = (
                {"content": [self._token_logprobs(one) for one in chosen]}
                if self._is_chat
                else self._completion_logprobs(choice, chosen)
            )
        return {"index": choice, **part, "logprobs": logprobs, "finish_reason": finish}

    def _token_logprobs(self, chosen: Chosen) -> dict[str, Any]:
        pairs = [(chosen.token, chosen.logprob), *chosen.top_tokens]
        entries = [
            {"token": _name(data, ""), "logprob": logprob, "bytes": list(data)}
            for token, logprob in pairs
            for data in [self._token_bytes.of(token)]
        ]
        return {**entries[0], "top_logprobs": entries[1:]}

    def _completion_logprobs(self, choice: int, chosen: Sequence[Chosen]) -> dict[str, Any]:
        """Log-probabilities of a completion; the chosen token is always among the most likely ones.

        The first token of a prompt has none of both.
        """
        length = self._texts.setdefault(choice, _Length())
        data = [self._token_bytes.of(one.token) for one in chosen]
        best = [
            None
            if one.logprob is None
            else {
                _name(self._token_bytes.of(token), "bytes:"): logprob
                for token, logprob in [*one.top_tokens, (one.token, one.logprob)]
            }
            for one in chosen
        ]
        return {
            "tokens": [_name(one, "bytes:") for one in data],
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": best,
            "text_offset": [length.before(self._token_bytes.in_text(one.token)) for one in chosen],
        }


class _Length:
    """Counts the characters of a text whose bytes come token by token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def before(self, data: bytes) -> int:
        """The number of whole characters before these bytes, which are added."""
        characters = self._characters
        self._characters += len(self._decoder.decode(data))
        return characters


def _name(data: bytes, prefix: str) -> str:
    """A token as OpenAI writes it: its text, or its bytes as `\\xe2\\x82`, after the prefix, if it has none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
