"""Runs Slurm's programs, without the variables that would override their arguments."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from megakernel.config import UserError

_FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_")
"""Prefixes of variables that change what the programs do: of a surrounding job, or a user's defaults."""


class SlurmRefused(UserError):
    """Slurm refuses the job, or does not answer."""


UNREACHABLE = "Unable to contact slurm controller|Connection refused|configuration source"
"""Pattern in the errors of programs that found no cluster."""


def foreign_variables(env: Mapping[str, str] = os.environ) -> list[str]:
    """The variables that programs do not get; SLURM_CONF, which names the cluster, is kept."""
    return [name for name in env if name.startswith(_FOREIGN) and name != "SLURM_CONF"]


def require(program: str) -> None:
    """Raise SlurmRefused if a program is not installed, or SLURM_CONF names no file."""
    configuration = os.environ.get("SLURM_CONF")
    if configuration is not None and not os.path.exists(configuration):
        # The program itself would retry for a minute.
        raise SlurmRefused(f"SLURM_CONF={configuration} does not exist; unset it, or start that cluster")
    if shutil.which(program) is None:
        raise SlurmRefused(
            f"{program} is not on this machine; submit from a login node, or give --cluster local"
        )


def call(command: Sequence[str], input_text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's programs and capture its output. Raises SlurmRefused if it is not installed."""
    require(command[0])
    foreign = set(foreign_variables())
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    return subprocess.run(
        command, input=input_text, capture_output=True, text=True, env=environment, check=False
    )


def check_output(*command: str) -> str:
    """The output of a program. Raises SlurmRefused with its error if it fails."""
    done = call(command)
    if done.returncode:
        raise SlurmRefused(error_line(done.stderr, command[0]))
    return done.stdout


def error_line(stderr: str, program: str) -> str:
    """The stderr of a failed program as one line."""
    lines = [
        re.split("error: |fatal: ", line, maxsplit=1)[-1].strip()
        for line in stderr.splitlines()
        if line.strip()
    ]
    text = "; ".join(dict.fromkeys(lines)) or "it gave no reason"
    if re.search(UNREACHABLE, text):
        return f"{program} cannot reach Slurm ({lines[-1]}); see `scontrol ping`, or try again later"
    return f"{program}: {text}"
