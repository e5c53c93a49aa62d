"""events.jsonl: events of a run, one line each, written by whoever saw them: commands, batch scripts, processes."""

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

FILE = "events.jsonl"

JOB_VARIABLE = "MEGAKERNEL_JOB"
RESTART_VARIABLE = "MEGAKERNEL_RESTART"
"""A submitted job's id, and how often it had been started before, for the processes in it."""


def record(run: Path, event: str, env: Mapping[str, str] = os.environ, **facts: Any) -> None:
    """Append one event: its time (UTC), its name, the job and restart it happened in, and what else is known.

    A line goes out in one write, so that writers on several hosts do not mix. Facts that are None are left out.
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
    file = os.open(run / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def is_first(run: Path, event: str, env: Mapping[str, str] = os.environ) -> bool:
    """Whether no other process of this start of a job has asked; true without a job, and where its logs are not.

    Thousands of processes fail of one cause, at once, and one line tells it.
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
    """The events of a run in the order in which they were written; a line cut short by a full disk is left out."""
    try:
        lines = (run / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    """The event of a line; behind one that was cut short, without an end of line, the next one."""
    try:
        event = json.loads(line[max(0, line.rfind('{"time": ')) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"time", "event"} <= event.keys() else None
