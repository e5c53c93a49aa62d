"""Documents to tokens in worker processes, in order. Every worker imports this file, so its imports are light."""

import ctypes
import os
import signal
import sys
import threading
from collections import Counter, deque
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


def parallel_map(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`work(item)` of every item, in order; a few items per worker are in flight at a time.

    An error of `items` is raised after the results before it. Raises UserError if a worker is killed.
    """
    pool = ProcessPoolExecutor(
        workers,
        # A forked child could inherit a lock held by a thread of pyarrow or tokenizers.
        mp_context=get_context("spawn"),
        initializer=_initialize_worker,
    )
    pending: deque[Future[Result]] = deque()
    iterator, failure = iter(items), None
    try:
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * workers:
                yield _wait_for_result(pending.popleft(), pool)
        while pending:
            yield _wait_for_result(pending.popleft(), pool)
        if failure is not None:
            raise failure
    except BrokenProcessPool:
        raise UserError(
            f"one of --workers {workers} was killed, most likely out of memory; set fewer, or give "
            "shorter documents"
        ) from None
    except BaseException:  # a signal, too: what workers do now may take long, and nobody wants it any more
        _kill(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _wait_for_result(future: "Future[Result]", pool: Any) -> Result:
    """The future's result. CPython 3.11's pool hangs if a worker is killed while it sends a result."""
    while not wait([future], timeout=1).done:
        if any(worker.exitcode for worker in pool._processes.values()):
            _kill(pool)
            break
    return future.result()


def _kill(pool: Any) -> None:
    """End the workers of a pool."""
    for worker in list((pool._processes or {}).values()):
        worker.kill()
    # Closes the last writer of the pipe that the pool reads, which makes it report BrokenProcessPool.
    pool._result_queue._writer.close()


_PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent ends."""


def _initialize_worker() -> None:
    # Ctrl-C reaches the whole process group; the parent ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If the parent is killed, workers would otherwise wait for work forever, or end what nobody wants any more.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if (
        sys.platform == "linux"
    ):  # a thread does not run during a native call that holds the lock of the interpreter
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class AnsweredTokens(NamedTuple):
    """A text's tokens."""

    tokens: list[int]
    """With the tokenizer's prefix, without the end-of-document token."""

    answers: list[tuple[int, int]]
    """Token range of each answer."""

    def scored(self) -> np.ndarray:
        """(tokens + 1,) uint8: 1 for tokens of answers, 0 for others and the end-of-document token."""
        flags = np.zeros(len(self.tokens) + 1, dtype=np.uint8)
        for start, end in self.answers:
            flags[start:end] = 1
        return flags


def encode_answered(tokenizer: Tokenizer, text: str, answers: Sequence[tuple[int, int]]) -> AnsweredTokens:
    """The tokens of a text and the token ranges of its answers; answers: ascending character ranges.

    Answers and the text between them are encoded separately, so no token crosses an answer's edge.
    """
    parts, is_answer, previous_end = [], [], 0
    for start, end in answers:
        parts += [text[previous_end:start], text[start:end]]
        is_answer += [False, True]
        previous_end = end
    parts.append(text[previous_end:])
    is_answer.append(False)
    tokens = tokenizer.prefix
    answer_ranges = []
    for ids, scored in zip(tokenizer.encode_batch(parts), is_answer):
        if scored:
            answer_ranges.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    return AnsweredTokens(tokens, answer_ranges)


@dataclass
class Encoded:
    """Consecutive documents of one split."""

    tokens: list[np.ndarray] = field(default_factory=list)
    """One array per token sequence: BOS if the tokenizer adds it, then a text, or joined texts, each with its end.

    Of a conversation, the rendered template and end-of-document.
    """

    labels: list[Label | float] = field(default_factory=list)
    """One per example, if labeled."""

    scored: list[np.ndarray] = field(default_factory=list)
    """One array per text (`AnsweredTokens.scored`, `ChatTokens.scored`), if answers are known."""

    bytes: int = 0
    """UTF-8 bytes of their texts."""

    special_tokens: Counter[str] = field(default_factory=Counter)
    """Special tokens that their texts name, if these are parsed."""

    rejected: list[tuple[tuple[str, int], str]] = field(default_factory=list)
    """Place of each conversation that the chat template rejects, and why; all are in the split `train`."""


HASHES = 2**64
"""Number of values of `content_hash`."""


def content_hash(content: bytes, seed: int) -> int:
    """A uniform number in [0, HASHES), the same for copies of a document, so that they are in the same split."""
    return int.from_bytes(
        blake2b(content, digest_size=8, salt=seed.to_bytes(16, "little")).digest(), "little"
    )


class Encoder:
    """Encodes batches of documents; one lives in each worker."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        dtype: str,
        seed: int,
        validation_bound: float,
        parse_special: bool = False,
    ):
        """dtype: numpy name of the integer type of the token files.

        validation_bound: documents whose `content_hash` with `seed` is smaller are for validation. parse_special:
        whether a special token's name in a text is that token; one that begins or ends a text as the tokenizer itself
        does is not doubled.
        """
        self._tokenizer = tokenizer
        self._tokenizer.parse_special = parse_special
        self._dtype = np.dtype(dtype)
        self._seed = seed
        self._validation_bound = validation_bound

    def encode(self, documents: list[Document]) -> dict[str, Encoded]:
        """The documents' tokens by split, in order."""
        splits = {"train": Encoded(), "validation": Encoded()}
        plain = [document for document in documents if document.answers is None and document.messages is None]
        ids = iter(self._tokenizer.encode_batch([text for document in plain for text in document.texts]))
        for document in documents:
            content = document.content
            split = splits.setdefault(document.split or self._drawn_split(content), Encoded())
            sequences: list[np.ndarray] = []
            for text in document.texts:
                if document.messages is not None:
                    try:
                        tokens, scored = self._template.encode(document.messages)
                    except UserError as error:
                        assert document.place is not None
                        splits["train"].rejected.append((document.place, str(error)))
                        break
                    split.scored.append(scored)
                elif document.answers is not None:
                    answered = encode_answered(self._tokenizer, text, document.answers)
                    tokens = [*answered.tokens, self._tokenizer.eod]
                    split.scored.append(answered.scored())
                    split.special_tokens += self._special_in(answered.tokens)
                else:
                    prefix = [] if document.joined and sequences else self._tokenizer.prefix
                    tokens = self._bounded(prefix, next(ids))
                    split.special_tokens += self._special_in(tokens[len(prefix) : -1])
                sequences.append(np.array(tokens, dtype=self._dtype))
            if not sequences:
                continue
            split.tokens += [np.concatenate(sequences)] if document.joined else sequences
            if document.label is not None:
                split.labels.append(document.label)
            split.bytes += len(content)
        return splits

    def _bounded(self, prefix: list[int], ids: list[int]) -> list[int]:
        """The ids of a text behind the prefix and before the end of the document."""
        if self._tokenizer.parse_special:
            ids = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
            ids = ids[:-1] if ids[-1:] == [self._tokenizer.eod] else ids
        return [*prefix, *ids, self._tokenizer.eod]

    @cached_property
    def _special(self) -> dict[int, str]:
        """The special tokens that are counted: those that are parsed."""
        return self._tokenizer.special_tokens if self._tokenizer.parse_special else {}

    def _special_in(self, ids: list[int]) -> Counter[str]:
        names = self._special
        # Without any to count, no token is looked at.
        return Counter(names[i] for i in ids if i in names) if names else Counter()

    def _drawn_split(self, content: bytes) -> str:
        return "validation" if content_hash(content, self._seed) < self._validation_bound else "train"

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)


@cache
def cached_encoder(tokenizer: Path, *options: Any) -> Encoder:
    """This process's encoder. tokenizer: the tokenizer's folder; options: further arguments of `Encoder`."""
    # Processes already use all cores; the tokenizer's own threads would oversubscribe them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return Encoder(tokenizers.load(tokenizer), *options)


def encode(encoder_arguments: tuple[Any, ...], documents: list[Document]) -> dict[str, Encoded]:
    """`Encoder.encode` in a worker process. encoder_arguments: those of `cached_encoder`."""
    return cached_encoder(*encoder_arguments).encode(documents)
