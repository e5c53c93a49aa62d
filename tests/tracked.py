"""What wandb and Trackio have of a run, read from the files that the libraries write without a server."""

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DATABASES = tempfile.TemporaryDirectory()
DATABASES = _DATABASES.name
"""Where Trackio keeps the projects of this process's tests."""

os.environ["TRACKIO_DIR"] = DATABASES  # Trackio reads it when it is imported

_HEADER, _BLOCK = struct.Struct("<IHB"), 32768
"""Of a part of a record in a .wandb file: checksum, bytes, kind (1 whole, 2 first, 3 middle, 4 last); of a block."""


def wandb_records(folder: Path) -> Iterator[Any]:
    """Every record of the offline runs in a folder, in the order in which they were started."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # the library's process may still have records in memory
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, place, record = file.read_bytes(), 7, b""
        while place + _HEADER.size <= len(data):
            if (room := _BLOCK - place % _BLOCK) < _HEADER.size:
                place += room
                continue
            _, size, kind = _HEADER.unpack_from(data, place)
            start = place + _HEADER.size
            place, record = start + size, record + data[start : start + size]
            if kind in (1, 4):
                yield Record.FromString(record)
                record = b""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """What each call logged; nested values as `tag.key`."""
    return [
        {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
            if not (item.key or item.nested_key[0]).startswith("_")
        }
        for record in wandb_records(folder)
        if record.HasField("history")
    ]


def wandb_runs(folder: Path) -> list[Any]:
    """What each start said of its run."""
    return [record.run for record in wandb_records(folder) if record.HasField("run")]


def trackio_runs(project: str) -> set[str]:
    """Names of the runs of a project."""
    from trackio.sqlite_storage import SQLiteStorage

    return {record["name"] for record in SQLiteStorage.get_run_records(project)}


def trackio_history(project: str, run: str) -> list[dict[str, Any]]:
    """What each call logged; `step` is the step."""
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs(project, run)
    return [{key: value for key, value in log.items() if key != "timestamp"} for log in logs]
