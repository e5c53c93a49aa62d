"""ARCHITECTURE.md lists the functions on the stack between `Trainer._step`, FLuRKA's op and the launch of a kernel."""

import re
import sys
from pathlib import Path

import pytest

from megakernel.config import load
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.training_run import write_config

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.second
def test_architecture_md_lists_the_functions_between_a_step_and_a_launch(corpus, tmp_path):
    (functions,) = run_ranks(functions_on_the_stack, 1, write_config(tmp_path, corpus))
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    to_op = listed(text, "lead from `Trainer._step` to FLuRKA's op")
    to_launch = listed(text, "lead to the launch of a kernel")
    assert functions == [*to_op, *to_launch]
    assert len(to_op) <= 11
    assert len(functions) <= 19
    assert len({file for _, file in functions}) <= 13


def listed(text: str, sentence: str) -> list[tuple[str, str]]:
    """Functions and their files in the paragraph of ARCHITECTURE.md with this sentence."""
    (paragraph,) = [part for part in text.split("\n\n") if sentence in part]
    found = []
    for names, file in re.findall(r"((?:`[\w.]+`,?\s+)+)\(`([\w/]+\.py)`\)", paragraph.partition(":")[2]):
        found += [(name, file) for name in re.findall(r"`([\w.]+)`", names)]
    return found


class LaunchedError(Exception):
    """Ends the run at its first launch of the kernel."""


def functions_on_the_stack(config: Path) -> list[tuple[str, str]]:
    """Name and file of Megakernel's functions on the stack of a forward launch in training, outermost first."""
    from launch.training import providers
    from megakernel.ops.kernels import launcher
    from megakernel.ops.kernels.launch import record_launches
    from megakernel.training.trainer import Trainer

    launch, frames = launcher.launch, []

    def called(kernel, *arguments, **options):
        launch(kernel, *arguments, **options)
        if kernel.__name__ != "merge":
            return
        frame = sys._getframe(1)
        while frame is not None and "Trainer._step" not in [name for name, _ in frames]:
            frames.append((frame.f_code.co_qualname, frame.f_code.co_filename))
            frame = frame.f_back
        raise LaunchedError

    launcher.launch = called
    loaded = load(config, ["training.steps=1", "training.eval_samples=0", "model.attention=flurka"])
    with cpu_mesh(**loaded.parallel.model_dump()) as mesh, record_launches(), pytest.raises(LaunchedError):
        Trainer(loaded, mesh, providers()).run()
    package = str(REPOSITORY / "megakernel") + "/"
    own = [(name, file.removeprefix(package)) for name, file in reversed(frames) if file.startswith(package)]
    return [*own, (launch.__qualname__, launch.__code__.co_filename.removeprefix(package))]
