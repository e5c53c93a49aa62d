"""Compile the kernels of a test module for GPUs that are not there.

The module's LAUNCHES names functions that run an op. They run in a process of their own, without the interpreter, and
their launches are noted down instead of made.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def resources(module: str, capability: int) -> dict[str, dict[str, int]]:
    """Registers, spilled bytes and shared memory of every kernel that the LAUNCHES of `module` start."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time", module, str(capability)]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def assert_fits(module: str, capability: int) -> None:
    """No kernel of `module` spills registers or takes more shared memory than the chip has."""
    from megakernel.ops.kernels.compiling import SHARED_LIMIT

    taken = resources(module, capability)
    assert taken
    spilling = {name: kernel for name, kernel in taken.items() if kernel["spilled"]}
    large = {name: kernel for name, kernel in taken.items() if kernel["shared"] > SHARED_LIMIT[capability]}
    assert not spilling
    assert not large


def _compile(module: str, capability: int) -> dict[str, dict[str, int]]:
    from megakernel.ops.kernels.compiling import compile_launch
    from megakernel.ops.kernels.launch import noting

    taken = {}
    for case, run in importlib.import_module(module).LAUNCHES.items():
        with noting() as launches:
            run()
        for launch in launches:
            name = f"{case}: {launch.kernel.fn.__name__}"
            taken[name] = compile_launch(launch, capability)._asdict()
    return taken


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], int(sys.argv[2]))))
