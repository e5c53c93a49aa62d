"""ARCHITECTURE.md lists the functions on the stack between `Trainer._step` and FLuRKA's op."""

import re
import sys
from pathlib import Path

import pytest

from megakernel.config import load
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.training_run import write_config

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.second
def test_architecture_md_lists_the_functions_between_a_step_and_flurkas_op(corpus, tmp_path):
    (functions,) = run_ranks(functions_on_the_stack, 1, write_config(tmp_path, corpus))
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    (paragraph,) = [part for part in text.split("\n\n") if "lead from `Trainer._step` to FLuRKA's op" in part]
    names, files = (
        re.findall(r"`([\w.]+)`", paragraph.partition(":")[2]),
        re.findall(r"`([\w/]+\.py)`", paragraph),
    )
    assert [name for name, _ in functions] == [name for name in names if not name.endswith(".py")]
    assert list(dict.fromkeys(file for _, file in functions)) == files
    assert len(functions) <= 12
    assert len(files) <= 8


def functions_on_the_stack(config: Path) -> list[tuple[str, str]]:
    """Name and file of Megakernel's functions on the stack of the op's first call in training, outermost first."""
    from launch.training import providers
    from megakernel.attention import flurka
    from megakernel.training.trainer import Trainer

    op, frames = flurka.flurka_attention, []

    def called(*arguments, **options):
        stack, frame = [], sys._getframe(1)
        while frame is not None and "Trainer._step" not in [name for name, _ in stack]:
            stack.append((frame.f_code.co_qualname, frame.f_code.co_filename))
            frame = frame.f_back
        if frame is not None and not frames:  # not called from an evaluation
            frames.extend(stack)
        return op(*arguments, **options)

    flurka.flurka_attention = called
    loaded = load(config, ["training.steps=1", "model.attention=flurka"])
    with cpu_mesh(**loaded.parallel.model_dump()) as mesh:
        Trainer(loaded, mesh, providers()).run()
    package = str(REPOSITORY / "megakernel") + "/"
    own = [(name, file.removeprefix(package)) for name, file in reversed(frames) if file.startswith(package)]
    return [*own, (op.__qualname__, op.__code__.co_filename.removeprefix(package))]
