"""The functions that a batch passes on its way to FLuRKA's op are those that ARCHITECTURE.md lists."""

import re
import sys
from pathlib import Path

import pytest

from megakernel.config import load
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.training_run import write_config

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.second
def test_a_batch_passes_the_functions_that_architecture_lists(corpus, tmp_path):
    (found,) = run_ranks(path_of_a_batch, 1, write_config(tmp_path, corpus))
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    (paragraph,) = [part for part in text.split("\n\n") if "lead from `Trainer._step` to FLuRKA's op" in part]
    names, files = (
        re.findall(r"`([\w.]+)`", paragraph.partition(":")[2]),
        re.findall(r"`([\w/]+\.py)`", paragraph),
    )
    assert [name for name, _ in found] == [name for name in names if not name.endswith(".py")]
    assert list(dict.fromkeys(file for _, file in found)) == files
    assert len(found) <= 12
    assert len(files) <= 8


def path_of_a_batch(config: Path) -> list[tuple[str, str]]:
    """Name and file of our functions on the stack where the op is called, the outermost first."""
    from launch.training import providers
    from megakernel.attention import flurka
    from megakernel.training.trainer import Trainer

    op, frames = flurka.flurka_attention, []

    def called(*arguments, **options):
        passed, frame = [], sys._getframe(1)
        while frame is not None and "Trainer._step" not in [name for name, _ in passed]:
            passed.append((frame.f_code.co_qualname, frame.f_code.co_filename))
            frame = frame.f_back
        if frame is not None and not frames:  # and not of an evaluation
            frames.extend(passed)
        return op(*arguments, **options)

    flurka.flurka_attention = called
    loaded = load(config, ["training.steps=1", "model.attention=flurka"])
    with cpu_mesh(**loaded.parallel.model_dump()) as mesh:
        Trainer(loaded, mesh, providers()).run()
    here = str(REPOSITORY / "megakernel") + "/"
    own = [(name, file.removeprefix(here)) for name, file in reversed(frames) if file.startswith(here)]
    return [*own, (op.__qualname__, op.__code__.co_filename.removeprefix(here))]
