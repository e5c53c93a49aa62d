"""Pictures for TensorBoard, in files that an analysis done again replaces."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter


def show(tensorboard: Path, figures: Mapping[str, Figure], step: int, name: str) -> None:
    """Put figures into a folder of event files at a step, by tag, in place of what `name` has shown there before.

    A folder of its own: in that of the training, TensorBoard without its data server would go over to the newer file
    and read no more of one that a run still writes to. Files appear whole.
    """
    tensorboard.mkdir(parents=True, exist_ok=True)
    ending = f".analysis.{name}.step_{step}"
    with tempfile.TemporaryDirectory() as staged:
        with SummaryWriter(staged, filename_suffix=ending) as writer:
            for tag, figure in figures.items():
                writer.add_figure(tag, figure, step, close=False)
        (file,) = Path(staged).iterdir()
        before = list(tensorboard.glob(f"events.out.*{ending}"))
        # Under a name that TensorBoard does not take for events, until it is whole.
        partial = shutil.copyfile(file, tensorboard / f"{name}.partial")
        os.replace(partial, tensorboard / file.name)
    for path in before:
        path.unlink()
