"""Documents to tokens in worker processes, whose results come in order; every worker imports it, so it stays light."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import blake2b
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data_pipeline import tokenizers
from data_pipeline.chat import ChatTemplate
from data_pipeline.document import Document, Label
from data_pipeline.tokenizers import Tokenizer
from megakernel.config.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`work(item)` of every item, in order, with a few items per worker under way at a time.

    Raises UserError where a worker is killed.
    """
    pool = ProcessPoolExecutor(
        workers,
        # A forked child could inherit a lock that a reader thread of pyarrow or tokenizers holds.
        mp_context=get_context("spawn"),
        initializer=_begin,
    )
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * workers:
                yield _result(pending.popleft(), pool)
        while pending:
            yield _result(pending.popleft(), pool)
    except BrokenProcessPool:
        raise UserError(
            f"one of --workers {workers} was killed, most likely for want of memory; set fewer, or give "
            "shorter documents"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _result(future: "Future[Result]", pool: Any) -> Result:
    """Its result. CPython 3.11's pool waits for ever for what a worker was handing over when it was killed."""
    while not wait([future], timeout=1).done:
        workers = list(pool._processes.values())
        if any(worker.exitcode for worker in workers):
            for worker in workers:
                worker.kill()
            # The last end of the pipe that the pool reads: it says then that it is broken.
            pool._result_queue._writer.close()
            break
    return future.result()


def _begin() -> None:
    # Ctrl-C reaches the whole process group; the parent ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A pool whose parent is killed would wait for work for ever.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class AnsweredTokens(NamedTuple):
    """A text's tokens."""

    tokens: list[int]
    """With what documents begin with, without the end."""

    answers: list[tuple[int, int]]
    """First token and end of each answer."""

    def scored(self) -> np.ndarray:
        """(tokens + 1,) uint8: 1 for the tokens of answers, 0 for the others and the document's end."""
        flags = np.zeros(len(self.tokens) + 1, dtype=np.uint8)
        for start, end in self.answers:
            flags[start:end] = 1
        return flags


def encode_answered(tokenizer: Tokenizer, text: str, answers: Sequence[tuple[int, int]]) -> AnsweredTokens:
    """The tokens of a text and of the answers in it, which are stretches of characters in order.

    Answers and what stands between them are encoded apart, so no token lies across an answer's edge.
    """
    parts, is_answer, begun = [], [], 0
    for start, end in answers:
        parts += [text[begun:start], text[start:end]]
        is_answer += [False, True]
        begun = end
    parts.append(text[begun:])
    is_answer.append(False)
    tokens = tokenizer.prefix
    places = []
    for ids, scored in zip(tokenizer.encode_batch(parts), is_answer):
        if scored:
            places.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    return AnsweredTokens(tokens, places)


# Large enough that pickling costs little beside encoding, small enough that a worker's share fits in memory.
_BATCH_CHARACTERS = 1_000_000


@dataclass
class Encoded:
    """Consecutive documents of one split."""

    tokens: list[np.ndarray] = field(default_factory=list)
    """One array per sequence: BOS where documents begin with it, a text, or several that are joined, an end behind
    each.

    Of a conversation what its template makes of it, with an end behind it.
    """

    labels: list[Label | float] = field(default_factory=list)
    """One per example, if they are labelled."""

    scored: list[np.ndarray] = field(default_factory=list)
    """One array per text, as `AnsweredTokens.scored` and `ChatTokens.scored`, if answers are known."""

    bytes: int = 0
    """UTF-8 bytes of their texts."""


def split_of(text: bytes, seed: int, validation_fraction: float) -> str:
    """The split of a document: a function of its content, so copies of it never straddle the splits."""
    digest = blake2b(text, digest_size=8, salt=seed.to_bytes(16, "little")).digest()
    return "validation" if int.from_bytes(digest, "little") < validation_fraction * 2**64 else "train"


class Encoder:
    """Encodes batches of documents; one lives in each worker."""

    def __init__(self, tokenizer: Tokenizer, dtype: str, seed: int, validation_fraction: float):
        """dtype: numpy name of the integer type of the token files."""
        self._tokenizer = tokenizer
        self._dtype = np.dtype(dtype)
        self._seed = seed
        self._validation_fraction = validation_fraction

    def encode(self, documents: list[Document]) -> dict[str, Encoded]:
        """The documents' tokens by split, in order."""
        splits = {"train": Encoded(), "validation": Encoded()}
        plain = [document for document in documents if document.answers is None and document.messages is None]
        ids = iter(self._tokenizer.encode_batch([text for document in plain for text in document.texts]))
        for document in documents:
            content = "".join(document.texts).encode()
            name = document.split or split_of(content, self._seed, self._validation_fraction)
            split = splits.setdefault(name, Encoded())
            rows: list[np.ndarray] = []
            for text in document.texts:
                if document.messages is not None:
                    tokens, scored = self._template.encode(document.messages)
                    split.scored.append(scored)
                elif document.answers is not None:
                    answered = encode_answered(self._tokenizer, text, document.answers)
                    tokens = [*answered.tokens, self._tokenizer.eod]
                    split.scored.append(answered.scored())
                else:
                    is_within = document.joined and rows
                    tokens = [*([] if is_within else self._tokenizer.prefix), *next(ids), self._tokenizer.eod]
                rows.append(np.array(tokens, dtype=self._dtype))
            split.tokens += [np.concatenate(rows)] if document.joined else rows
            if document.label is not None:
                split.labels.append(document.label)
            split.bytes += len(content)
        return splits

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)


def batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Consecutive documents in lists of about a million characters."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += sum(map(len, document.texts))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@cache
def encoder_of(tokenizer: Path, *options: Any) -> Encoder:
    """This process's encoder. tokenizer: folder that it loads its own from; options: the rest, as of `Encoder`."""
    # The processes are the parallelism; threads of the tokenizer's own in each would fight over the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return Encoder(tokenizers.load(tokenizer), *options)


def encode(how: tuple[Any, ...], documents: list[Document]) -> dict[str, Encoded]:
    """`Encoder.encode` in a process of its own. how: as of `encoder_of`."""
    return encoder_of(*how).encode(documents)
