"""Sends the messages of `notify`: one per event, by the one process that watches a start of a run.

That is a job's batch script, `megakernel pretrain` on this machine, or under torchrun rank 0. A message that cannot be
delivered is a line of the log; it never fails a run, nor holds it up for longer than TIMEOUT.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from launch.messages import printable
from launch.run_progress import UNREADABLE, RunProgress
from megakernel.config import UserError
from megakernel.config.notify import Event, Notify
from megakernel.training.environment import RECORDED_VARIABLES
from megakernel.training.observing.console import decimal

TIMEOUT = 5.0
"""Seconds after which a message is given up."""

WATCHED = "MEGAKERNEL_WATCHED"
"""Variable of processes whose parent sends the messages in their place."""

_SUBJECTS: Mapping[Event, str] = {
    "end": "has ended",
    "failure": "has failed",
    "restart": "restarts after a failure",
    "preemption": "was stopped to make room",
}

_MOST_REASON = 500
"""Characters of a reason; what failed may have printed pages."""


@dataclass(frozen=True)
class Notification:
    """What is told of one event."""

    event: Event

    run: str
    """Name of the run."""

    reason: str
    """How it ended, and what comes next."""

    log: str
    """Folder with the logs of its processes."""

    step: int | None = None
    """Last logged step; of the current stage of an up-training."""

    steps: int | None = None
    """Steps of the whole run."""

    loss: float | None = None
    """Last logged training loss."""

    job: str | None = None
    restart: int | None = None

    @classmethod
    def of(
        cls, event: Event, folder: Path, training: Path, reason: str, log: Path, **job: Any
    ) -> "Notification":
        """The message of a run by its folder; training: that with the newest steps. job: `job` and `restart`."""
        try:
            now = RunProgress.read(training)
            progress: dict[str, Any] = {"step": now.step, "steps": now.steps, "loss": now.loss}
        except UNREADABLE:
            progress = {}
        reason = " ".join(printable(reason).split())[:_MOST_REASON]
        return cls(event, folder.name, reason, str(log.absolute()), **progress, **job)

    @property
    def subject(self) -> str:
        """The event in a few words."""
        return f"{self.run} {_SUBJECTS[self.event]}"

    @property
    def text(self) -> str:
        """The whole message on one line."""
        parts = [self.subject]
        if self.step is not None:
            parts.append(f"step {self.step}{'' if self.steps is None else f' of {self.steps}'}")
        if self.loss is not None:
            parts.append(f"loss {decimal(self.loss)}")
        return f"{', '.join(parts)}: {self.reason}. Logs: {self.log} on {socket.gethostname()}"


def check(notify: Notify | None, key: str, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that sending needs, with their values; key: of `notify`, for errors.

    Raises UserError for a webhook's variable that is not set, holds no URL, or would be written to logs.
    """
    if notify is None or notify.webhook is None:
        return {}
    name = notify.webhook
    if name in RECORDED_VARIABLES:
        raise UserError(f"{key}.webhook={name} is a variable that logs show; put the URL into another one")
    if not env.get(name):
        raise UserError(f"{key}.webhook={name} is not set; export {name} with the URL, or leave out the key")
    if not _is_url(env[name]):
        raise UserError(
            f"{key}.webhook={name} holds no URL (its value is not shown); export it as https://..."
        )
    return {name: env[name]}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_complete and text.isascii() and text.isprintable() and " " not in text


@contextmanager
def sending(
    notify: Notify | None,
    message: Notification,
    note: Callable[[str], object],
    env: Mapping[str, str] = os.environ,
) -> Iterator[None]:
    """Send a message while the block runs, if it is to be told; afterwards at most TIMEOUT passes.

    note: prints a line about a message that could not be delivered.
    """
    if notify is None or message.event not in notify.events:
        yield
        return
    began = time.monotonic()
    ways = {**({"webhook": _post} if notify.webhook else {}), **({"mail": _mail} if notify.mail else {})}
    failures: dict[str, str] = {}
    threads = {
        name: threading.Thread(target=_deliver, args=(name, way, notify, message, env, failures), daemon=True)
        for name, way in ways.items()
    }
    for thread in threads.values():
        thread.start()
    try:
        yield
    finally:
        for name, thread in threads.items():
            # Looking up a name has no timeout of its own.
            thread.join(max(0.0, began + TIMEOUT - time.monotonic()))
            why = f"no answer within {TIMEOUT:g} s" if thread.is_alive() else failures.get(name)
            if why is not None:
                note(
                    f"notify: {message.subject!r} was not told by {name} ({why}); the run goes on without it"
                )


def send(notify: Notify | None, message: Notification, note: Callable[[str], object] = print) -> None:
    """The same, waiting at most TIMEOUT."""
    with sending(notify, message, note):
        pass


def _deliver(
    name: str,
    way: Callable[[Notify, Notification, Mapping[str, str]], None],
    notify: Notify,
    message: Notification,
    env: Mapping[str, str],
    failures: dict[str, str],
) -> None:
    try:
        way(notify, message, env)
    except Exception as error:  # whatever a server answers, the run goes on
        failures[name] = _why(error)


def _why(error: Exception) -> str:
    """The reason without the URL, which may be a secret."""
    if isinstance(error, HTTPError):
        return f"the server answers {error.code} {error.reason}"
    if isinstance(error, URLError) and isinstance(error.reason, Exception):
        error = error.reason
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(printable(text).split())[:_MOST_REASON]


def _post(notify: Notify, message: Notification, env: Mapping[str, str]) -> None:
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        """A redirected POST would arrive as a GET without its message."""

        def redirect_request(self, *_: Any) -> None:
            return None

    assert notify.webhook is not None
    url = env.get(notify.webhook, "")
    if not _is_url(url):
        raise ValueError(f"the variable {notify.webhook} holds no URL here")
    facts = {name: value for name, value in asdict(message).items() if value is not None}
    body = json.dumps({"text": message.text, **facts, "host": socket.gethostname()})
    headers = {"Content-Type": "application/json", "User-Agent": "megakernel"}
    request = Request(url, body.encode(), headers, method="POST")
    with build_opener(NoRedirects).open(request, timeout=TIMEOUT) as answer:
        answer.read(1 << 10)


def _mail(notify: Notify, message: Notification, env: Mapping[str, str]) -> None:
    from email.message import EmailMessage
    from smtplib import SMTP

    mail = EmailMessage()
    mail["Subject"] = message.subject
    mail["From"] = f"megakernel@{socket.gethostname()}"
    mail["To"] = ", ".join(notify.mail)
    mail.set_content(message.text + "\n")
    host, _, port = notify.mail_server.partition(":")
    with SMTP(host, int(port or 25), timeout=TIMEOUT) as server:
        if refused := server.send_message(mail):
            raise ValueError(f"{notify.mail_server} refuses {', '.join(refused)}")
