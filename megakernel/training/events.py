"""events.jsonl: the events of a run, one line each, written by commands, batch scripts and ranks."""

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

FILE = "events.jsonl"

JOB_VARIABLE = "MEGAKERNEL_JOB"
RESTART_VARIABLE = "MEGAKERNEL_RESTART"
"""Environment variables of a job's processes: its id, and the number of earlier starts."""


def record(run: Path, event: str, env: Mapping[str, str] = os.environ, **facts: Any) -> None:
    """Append one event: UTC time, name, job, restart and `facts` that are not None.

    The line is one write, so that lines of several hosts do not mix.
    """
    restart = env.get(RESTART_VARIABLE, "")
    line = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "event": event,
        "job": env.get(JOB_VARIABLE),
        "restart": int(restart) if restart.isdecimal() else None,
        **facts,
    }
    text = json.dumps({name: value for name, value in line.items() if value is not None}) + "\n"
    file = os.open(run / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def is_first(run: Path, event: str, env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the first of this start of a job to ask; true outside of jobs or without a log folder.

    If thousands of ranks fail for one reason at once, one event is enough.
    """
    if not in_job(env):
        return True
    logs = run / "logs" / env[JOB_VARIABLE] / env.get(RESTART_VARIABLE, "0")
    try:
        os.close(os.open(logs / f"first_{event}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


def in_job(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a submitted job."""
    return JOB_VARIABLE in env


def read(run: Path) -> list[dict[str, Any]]:
    """The events of a run as written, without lines that a full disk cut short."""
    try:
        lines = (run / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    """The event of a line; if a truncated event without a newline precedes it there, the event after that."""
    try:
        event = json.loads(line[max(0, line.rfind('{"time": ')) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"time", "event"} <= event.keys() else None
