"""TensorBoard event files: adding images, replacing files, and dropping steps that a restarted run repeats."""

import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megakernel.training.run_folder import EVENT_FILES

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_HEADER = struct.Struct("<QI")
"""Length of a record's body, and the checksum of these eight bytes."""

_CHECKSUM_BYTES = 4
"""The body's own checksum follows it."""


def drop_later_steps(folder: Path, last_kept: int) -> None:
    """Remove all records of steps after `last_kept`: scalars, histograms, plots and texts.

    TensorBoard's Python reader hides later steps after a restart marker; its default data server ignores the marker and
    shows them until the same tag is written at an earlier step. Removed records are hidden from both. Files without
    later steps are not touched, files with nothing else are deleted. A truncated or damaged record ends its file, as it
    does for TensorBoard.
    """
    for file in sorted(folder.glob(EVENT_FILES)):
        with file.open("rb") as stream:
            steps = [step for _, step in _records(stream)]
        if all(step is None or step <= last_kept for step in steps):
            continue
        if all(step is None or step > last_kept for step in steps):
            file.unlink()
            continue
        # TensorBoard reads any file with `tfevents` in its name as events.
        kept = folder / ".kept.partial"
        with file.open("rb") as stream, kept.open("wb") as new:
            for record, step in _records(stream):
                if step is None or step <= last_kept:
                    new.write(record)
        kept.replace(file)


@contextmanager
def replaced_events(folder: Path, ending: str = "") -> Iterator["SummaryWriter"]:
    """A writer whose file atomically replaces those with the same ending in `folder` when the block ends.

    Not for the folder of a training run: TensorBoard without its data server would switch to the newer file and stop
    reading the one that the run writes.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(parents=True, exist_ok=True)
    before = list(folder.glob(f"{EVENT_FILES}{ending}"))
    with tempfile.TemporaryDirectory() as staged:
        with SummaryWriter(staged, filename_suffix=ending) as writer:
            yield writer
        (file,) = Path(staged).iterdir()
        # Until it is complete, under a name that TensorBoard does not read.
        partial = shutil.copyfile(file, folder / file.name.replace("tfevents", "partial"))
        partial.replace(folder / file.name)
    for path in before:
        path.unlink()


def add_png(writer: "SummaryWriter", tag: str, png: bytes, step: int) -> None:
    """Add a PNG image."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[16:24])  # in the file's first chunk
    image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def _records(stream: BinaryIO) -> Iterator[tuple[bytes, int | None]]:
    """(record, step) up to the first damaged record; step is None for the header records of a file."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import masked_crc32c

    while len(header := stream.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            return
        rest = stream.read(length + _CHECKSUM_BYTES)
        if len(rest) < length + _CHECKSUM_BYTES:
            return
        try:
            event = Event.FromString(rest[:length])
        except DecodeError:
            return
        yield header + rest, event.step if event.HasField("summary") else None
