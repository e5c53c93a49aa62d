"""Texts as OpenAI's clients read them: whole, or piece by piece."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from data_pipeline.tokenizers import Tokenizer

from ..engine import Chosen, Finish
from .protocol import Body, ChatBody
from .worker import Piece


class Reply:
    """The answer to one request."""

    def __init__(self, body: Body, model: str, fingerprint: str, tokenizer: Tokenizer):
        self._is_chat = isinstance(body, ChatBody)
        self._logprobs = body.likeliest is not None
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}
        self._same = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{fingerprint[:16]}",
        }

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """What a stream begins with: who speaks."""
        start = {"role": "assistant", "content": ""}
        spoken = range(choices if self._is_chat else 0)
        return [self._body(".chunk", [self._choice(choice, {"delta": start})]) for choice in spoken]

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """Parts of a stream; nothing where a step has only begun a character."""
        found, chosen = [], [] if piece.chosen is None else [piece.chosen]
        if piece.text or chosen:
            part: dict[str, Any] = (
                {"delta": {"content": piece.text}} if self._is_chat else {"text": piece.text}
            )
            found.append(self._choice(piece.choice, part, chosen))
        if piece.finish is not None:
            part = {"delta": {}} if self._is_chat else {"text": ""}
            found.append(self._choice(piece.choice, part, finish=piece.finish))
        return [self._body(".chunk", [choice]) for choice in found]

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last part of a stream that is to tell it."""
        return self._body(".chunk", [], usage=usage)

    def whole(self, pieces: Sequence[Piece], choices: int, usage: dict[str, Any]) -> dict[str, Any]:
        """All texts."""
        found = []
        of_choice: list[list[Piece]] = [[] for _ in range(choices)]
        for piece in pieces:
            of_choice[piece.choice].append(piece)
        for choice, own in enumerate(of_choice):
            text = "".join(piece.text for piece in own)
            message = {"role": "assistant", "content": text, "refusal": None}
            part = {"message": message} if self._is_chat else {"text": text}
            chosen = [piece.chosen for piece in own if piece.chosen is not None]
            found.append(self._choice(choice, part, chosen, own[-1].finish))
        return self._body("", found, usage=usage)

    def _body(self, chunk: str, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        name = f"chat.completion{chunk}" if self._is_chat else "text_completion"
        return {**self._same, "object": name, "choices": choices, **more}

    def _choice(
        self, choice: int, part: dict[str, Any], chosen: Sequence[Chosen] = (), finish: Finish | None = None
    ) -> dict[str, Any]:
        told = None
        if self._logprobs and (chosen or finish is not None):
            told = (
                {"content": [self._token(one) for one in chosen]}
                if self._is_chat
                else self._table(choice, chosen)
            )
        return {"index": choice, **part, "logprobs": told, "finish_reason": finish}

    def _token(self, chosen: Chosen) -> dict[str, Any]:
        pairs = [(chosen.token, chosen.logprob), *chosen.likeliest]
        told = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            for token, logprob in pairs
            for text in [self._tokenizer.decode([token])]
        ]
        return {**told[0], "top_logprobs": told[1:]}

    def _table(self, choice: int, chosen: Sequence[Chosen]) -> dict[str, Any]:
        """Of completions; offsets count characters of the tokens, one by one."""
        tokens = [self._tokenizer.decode([one.token]) for one in chosen]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.setdefault(choice, 0))
            self._offsets[choice] += len(token)
        best = [
            {self._tokenizer.decode([token]): logprob for token, logprob in one.likeliest} for one in chosen
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": best,
            "text_offset": offsets,
        }
