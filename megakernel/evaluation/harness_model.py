"""A run as a model of lm-evaluation-harness."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows
from torch.nn.utils.rnn import pad_sequence

from megakernel.config import UserError

from .perplexity import predict
from .subject import ContinueTexts, LoadedRun, OnPass, sequences_per_pass

_DEFAULT_NEW_TOKENS = 256
"""The harness's own default."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

Scored = tuple[float, bool]
"""Sum of a continuation's log-probabilities, and whether each of its tokens is the most likely one."""


class ScoringModel(TemplateLM):
    """Scores continuations in batches, and has texts continued.

    Texts may have any length, as the state of kernelized layers has one size; only learned positions limit them.
    """

    def __init__(self, subject: LoadedRun, progress: OnPass, continue_texts: ContinueTexts | None):
        """progress: called with the requests done, and all of one kind."""
        super().__init__()
        self._subject, self._progress, self._continue_texts = subject, progress, continue_texts
        self._limit = subject.config.most_positions
        self.requests = 0
        """Texts so far."""

        self.shortened = 0
        """Those whose beginning was cut off."""

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._subject.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context follows: BOS if documents begin with it, else the end of a document."""
        return next(iter(self._subject.tokenizer.prefix), self.eot_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, after BOS if documents begin with it, unless add_special_tokens is false."""
        tokenizer = self._subject.tokenizer
        ids = tokenizer.encode(string)
        return ids if add_special_tokens is False else [*tokenizer.prefix, *ids]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Scored]:
        """Log-probabilities of continuations (arguments: context, continuation)."""
        scored: list[Scored] = super().loglikelihood(requests, disable_tqdm=True)
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-probabilities of whole texts; beyond learned positions in windows that predict each token once."""
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            size = self._limit or max(len(ids), 1)
            for context, continuation in get_rolling_token_windows(ids, self.prefix_token_id, size, 1):
                own = len(context) - len(continuation) + 1  # the window repeats what it predicts
                windows.append((("", ""), context[:own], continuation))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows)):
            sums[owner] += value
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[Scored]:
        """Scores of (texts, ids of the context, ids of the continuation), longest first to find too little memory."""
        pairs = [self._shortened(context, continuation) for _, context, continuation in requests]
        left = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]))
        found: dict[int, Scored] = {}
        while left:
            size = sequences_per_pass(self._subject.config, len(pairs[left[0]][0]))
            batch, left = left[:size], left[size:]
            found |= zip(batch, self._score([pairs[index] for index in batch]))
            self._progress(len(found), len(pairs))
        self.requests += len(pairs)
        return [found[index] for index in range(len(pairs))]

    def _shortened(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """The ids of both, as many of the last ones as fit learned positions, and how many of them are scored."""
        ids, scored = [*context, *continuation], len(continuation)
        if self._limit is not None and len(ids) > self._limit + 1:
            self.shortened += 1
            ids, scored = ids[-self._limit - 1 :], min(scored, self._limit)
        return ids, scored

    def _score(self, pairs: Sequence[tuple[list[int], int]]) -> list[Scored]:
        """Scores of one batch."""
        subject = self._subject
        tokens = [torch.tensor(ids[:-1]) for ids, _ in pairs]
        labels = [torch.tensor(ids[1:]) for ids, _ in pairs]
        chosen = [torch.arange(len(ids) - 1) >= len(ids) - 1 - scored for ids, scored in pairs]
        positions = [torch.tensor(self._positions(ids[:-1])) for ids, _ in pairs]
        inputs = [pad_sequence(part, batch_first=True) for part in (tokens, positions, labels, chosen)]
        vocab_size = subject.tokenizer.vocab_size
        losses, right = predict(subject.model, vocab_size, *(part.to(subject.device) for part in inputs))
        counts = [scored for _, scored in pairs]
        return [
            (-float(loss.double().sum()), bool(greedy.all()))
            for loss, greedy in zip(losses.split(counts), right.split(counts))
        ]

    def _positions(self, ids: Sequence[int]) -> list[int]:
        """Positions as in training: they start again after the end of a document, if documents are isolated."""
        isolated = self._subject.config.data.isolate_documents
        positions, position = [], 0
        for token in ids:
            positions.append(position)
            position = 0 if isolated and token == self.eot_token_id else position + 1
        return positions

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Continuations (arguments: context, options), up to their stop strings."""
        assert self._continue_texts is not None
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        done = 0
        for indices in groups.values():
            options = self._generation_options(requests[indices[0]].args[1])
            room = None if self._limit is None else self._limit + 1 - options["max_new_tokens"]
            prompts = [self._prompt(requests[index].args[0], room) for index in indices]
            for place, text in self._continue_texts(self._subject, self._subject.model, prompts, **options):
                texts[indices[place]] = text
                done += 1
                self._progress(done, len(requests))
        self.requests += len(requests)
        return texts

    def _prompt(self, context: str, room: int | None) -> list[int]:
        ids = self.tok_encode(context) or [self.prefix_token_id]
        if room is not None and len(ids) > room:
            self.shortened += 1
            ids = ids[-max(room, 1) :]
        return ids

    def _generation_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `continue_texts`. UserError for options of a task that it does not have."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), _DEFAULT_NEW_TOKENS))
        if not options.pop("do_sample"):
            options["temperature"] = 0.0
        stop = tuple(text for text in options.pop("until") if text)
        new = options.pop("max_gen_toks")
        if self._limit is not None and new > self._limit:
            raise UserError(
                f"the task asks for {new} new tokens, and the model has {self._limit} learned positions"
            )
        sampling = {name: options.pop(name) for name in _SAMPLING if options.get(name) is not None}
        if unknown := {name: value for name, value in options.items() if value not in (None, False, 1)}:
            raise UserError(
                f"the task's generation_kwargs {unknown} are not supported; leave them out of its YAML"
            )
        return {"max_new_tokens": new, "stop": stop, "sampling": sampling}
