"""Plots for TensorBoard, in files that an analysis done again replaces."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megakernel.training.observing.event_files import PATTERN, add_png


def show(tensorboard: Path, plots: Mapping[str, Path], step: int, name: str) -> None:
    """Put PNG files into a folder of event files at a step, by tag, in place of what `name` has shown there before.

    A folder of its own: in that of the training, TensorBoard without its data server would go over to the newer file
    and read no more of one that a run still writes to. Files appear whole.
    """
    tensorboard.mkdir(parents=True, exist_ok=True)
    ending = f".analysis.{name}.step_{step}"
    with tempfile.TemporaryDirectory() as staged:
        with SummaryWriter(staged, filename_suffix=ending) as writer:
            for tag, path in plots.items():
                add_png(writer, tag, path.read_bytes(), step)
        (file,) = Path(staged).iterdir()
        before = list(tensorboard.glob(f"{PATTERN}{ending}"))
        # Under a name that TensorBoard does not take for events, until it is whole.
        partial = shutil.copyfile(file, tensorboard / f"{name}.partial")
        os.replace(partial, tensorboard / file.name)
    for path in before:
        path.unlink()
