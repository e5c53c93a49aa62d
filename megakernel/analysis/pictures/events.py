"""Pictures for TensorBoard, in files that an analysis done again replaces."""

import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter


def show(tensorboard: Path, pictures: Mapping[str, Path], step: int, name: str) -> None:
    """Put PNG files into a folder of event files at a step, by tag, in place of what `name` has shown there before.

    A folder of its own: in that of the training, TensorBoard without its data server would go over to the newer file
    and read no more of one that a run still writes to. Files appear whole.
    """
    tensorboard.mkdir(parents=True, exist_ok=True)
    ending = f".analysis.{name}.step_{step}"
    with tempfile.TemporaryDirectory() as staged:
        with SummaryWriter(staged, filename_suffix=ending) as writer:
            for tag, path in pictures.items():
                value = Summary.Value(tag=tag, image=_image(path.read_bytes()))
                writer.file_writer.add_summary(Summary(value=[value]), step)
        (file,) = Path(staged).iterdir()
        before = list(tensorboard.glob(f"events.out.*{ending}"))
        # Under a name that TensorBoard does not take for events, until it is whole.
        partial = shutil.copyfile(file, tensorboard / f"{name}.partial")
        os.replace(partial, tensorboard / file.name)
    for path in before:
        path.unlink()


def _image(png: bytes) -> Summary.Image:
    width, height = struct.unpack(">II", png[16:24])  # of a PNG's first chunk
    return Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
