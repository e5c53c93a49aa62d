import shlex
from pathlib import Path
from types import SimpleNamespace

from megakernel.training.trainer import Trainer

from ..config import trees


def test_the_commands_at_the_end_of_a_run_can_be_pasted_into_a_shell():
    run = SimpleNamespace(folder=SimpleNamespace(path=Path("/data/my runs/a")), config=trees.config())
    assert [shlex.split(command) for command in Trainer._next_commands(run)] == [
        ["megakernel", "evaluate", "/data/my runs/a"],
        ["megakernel", "generate", "/data/my runs/a", "--prompt", "TEXT"],
        ["megakernel", "monitor", "--root", "/data/my runs"],
    ]
