"""TensorBoard's event files: plots for them, and rewritten without what a run has gone back behind."""

import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PATTERN = "events.out.tfevents.*"

_LENGTH = struct.Struct("<Q")
_CHECKSUM_BYTES = 4


def drop_later_steps(folder: Path, last_kept: int) -> None:
    """Remove every record of a step behind `last_kept`: scalars, histograms, plots, texts alike.

    Readers disagree about what a restart hides. TensorBoard's Python reader hides later steps of all kinds when it
    meets the mark of a restart; its default data server knows no such mark, and shows them until the same tag is
    written at an earlier step. What is not in the files is hidden from all. Files in which nothing is to be removed
    stay as they are, and those of which nothing is left go. A record that a kill cut short ends its file.
    """
    for file in sorted(folder.glob(PATTERN)):
        with file.open("rb") as stream:
            steps = [_step(body) for _, body in _records(stream)]
        if all(step is None or step <= last_kept for step in steps):
            continue
        if all(step is None or step > last_kept for step in steps):
            file.unlink()
            continue
        # Not beside the file: TensorBoard would take a name with `tfevents` in it for one more file of events.
        kept = folder / ".kept.partial"
        with file.open("rb") as stream, kept.open("wb") as new:
            for step, (frame, _) in zip(steps, _records(stream)):
                if step is None or step <= last_kept:
                    new.write(frame)
        kept.replace(file)


@contextmanager
def replaced_events(folder: Path, ending: str = "") -> Iterator["SummaryWriter"]:
    """A writer whose file takes the place of those in `folder` of the same ending when the block ends, whole.

    The folder is not that of a training: there TensorBoard without its data server would go over to the newer file and
    read no more of one that a run still writes to.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(parents=True, exist_ok=True)
    before = list(folder.glob(f"{PATTERN}{ending}"))
    with tempfile.TemporaryDirectory() as staged:
        with SummaryWriter(staged, filename_suffix=ending) as writer:
            yield writer
        (file,) = Path(staged).iterdir()
        # Under a name that TensorBoard does not take for events, until it is whole.
        partial = shutil.copyfile(file, folder / file.name.replace("tfevents", "partial"))
        partial.replace(folder / file.name)
    for path in before:
        path.unlink()


def add_png(writer: "SummaryWriter", tag: str, png: bytes, step: int) -> None:
    """Add a plot that is a PNG file already."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[16:24])  # of the file's first chunk
    image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def _records(stream: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Each whole record with its frame (length, checksums), and its body alone."""
    header_bytes = _LENGTH.size + _CHECKSUM_BYTES
    while len(header := stream.read(header_bytes)) == header_bytes:
        (length,) = _LENGTH.unpack(header[: _LENGTH.size])
        rest = stream.read(length + _CHECKSUM_BYTES)
        if len(rest) < length + _CHECKSUM_BYTES:
            return
        yield header + rest, rest[:length]


def _step(body: bytes) -> int | None:
    """The step that a record tells of; None for the marks at the beginning of a file."""
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event.FromString(body)
    return event.step if event.HasField("summary") else None
