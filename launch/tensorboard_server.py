"""TensorBoard in this process, on the folders of some runs."""

from collections.abc import Sequence
from pathlib import Path

from megakernel.config import UserError


def start_tensorboard(root: Path, runs: Sequence[Path], host: str, port: int | None) -> str:
    """Serve in a thread until this process ends; returns the address.

    runs: the runs to show, by name; none: all under `root`, those to come too. port: None takes 6006, or the next one
    that is free; 0 any free one. Raises UserError where the port is taken or is none.
    """
    from tensorboard.program import TensorBoard, TensorBoardServerException

    shown = ["--logdir", str(root)]
    if len(runs) == 1:
        shown = ["--logdir", str(runs[0])]
    elif runs:
        shown = ["--logdir_spec", ",".join(f"{run.name}:{run}" for run in runs)]
    where = ["--host", host, "--port", "default" if port is None else str(port)]
    server = TensorBoard()
    server.configure(argv=["", *shown, *where])
    try:
        return server.launch()
    except TensorBoardServerException as error:
        raise UserError(f"--host {host} --port {port}: {error.msg}; leave --port out, or take 0") from None
