"""Chat templates, rendered by a process that ends if they take too long or too much memory.

A template is a foreign program. Jinja's sandbox keeps it from files and modules, but not from loops without an end or
texts without a bound, and nothing else ends a native call inside this process. The process starts with the first
conversation of a thread and serves all later ones. It runs this file, which then imports `transformers` alone.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

CPU_SECONDS = 10
"""CPU time for one conversation; a template of a published model takes milliseconds."""

MEMORY = 2**30
"""Bytes that one conversation may take, besides what the process has after its imports."""

CHARACTERS, GROWTH = 2**24, 16
"""A rendered conversation may have this many characters, and this many more for each byte of the conversation."""

_LENGTH = 8
"""Bytes of a message's length."""


class Unrenderable(Exception):
    """A conversation that the template rejects, or with which it exceeds a limit; the text says which."""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tagged: bool, variables: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and the spans that the template tags as the assistant's.

    tagged: whether the template has such tags. variables: further variables of the template.
    Raises Unrenderable.
    """
    renderer = getattr(_of_thread, "renderer", None)
    if renderer is None or not renderer.is_usable:
        renderer = _of_thread.renderer = _Renderer()
    question = json.dumps(
        (template, [dict(message) for message in messages], tagged, variables), default=_plain
    )
    answer = renderer.ask(question.encode(), CPU_SECONDS)
    if "error" in answer:
        raise Unrenderable(answer["error"])
    return answer["text"], [(start, end) for start, end in answer["spans"]]


def _plain(value: Any) -> Any:
    """What a template sees of a value that is not JSON, as in `transformers`."""
    return value.item() if isinstance(value, np.generic) else f"<{type(value).__name__}>"


_of_thread = threading.local()


class _Renderer:
    """The process of one thread."""

    def __init__(self) -> None:
        # Without torch, `transformers` loads in a second.
        environment = {**os.environ, "USE_TORCH": "0", "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._owner = os.getpid()
        weakref.finalize(self, _end, self._process, self._owner)

    @property
    def is_usable(self) -> bool:
        """Whether the process runs, and belongs to this one and not to the one that this was forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, question: bytes, seconds: int) -> dict[str, Any]:
        """The answer to one message, within CPU time. Raises Unrenderable if the process ended instead."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, bytes([seconds]))
            _send(process.stdin, question)
            return json.loads(_receive(process.stdout))
        except (EOFError, BrokenPipeError):
            status = process.wait()
        if status == -signal.SIGPROF:
            raise Unrenderable(f"it takes more than {seconds} s of CPU time")
        raise Unrenderable(f"its process ended with status {status}")


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        process.wait()


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH, "little"))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    length = stream.read(_LENGTH)
    data = stream.read(int.from_bytes(length, "little"))
    if len(length) < _LENGTH or len(data) < int.from_bytes(length, "little"):
        raise EOFError
    return data


def _serve() -> None:
    """Answer messages on stdin until it ends."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; stdin ends with its other end
    from transformers.utils.chat_template_utils import render_jinja_template

    with suppress(OSError, ValueError):  # there is no such file or limit outside of Linux
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with suppress(EOFError):
        while True:
            (seconds,), question = _receive(questions), _receive(questions)
            signal.setitimer(
                signal.ITIMER_PROF, seconds
            )  # its signal ends the process, even in a native call
            answer = json.dumps(_rendered(render_jinja_template, question)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(answers, answer)


def _rendered(render_jinja_template: Any, question: bytes) -> dict[str, Any]:
    template, messages, tagged, variables = json.loads(question)
    try:
        texts, spans = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            return_assistant_tokens_mask=tagged,
            **variables,
        )
    except MemoryError:
        return {"error": f"it takes more than {MEMORY:,} bytes of memory"}
    # A template can raise any exception, of Jinja or of Python.
    except Exception as error:
        return {"error": next(filter(None, str(error).splitlines()), type(error).__name__)}
    most = CHARACTERS + GROWTH * len(question)
    if len(texts[0]) > most:
        return {"error": f"it becomes {len(texts[0]):,} characters, and {most:,} are the most for its length"}
    return {"text": texts[0], "spans": spans[0] if spans else []}


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose `tokenizers` is not the library
    _serve()
