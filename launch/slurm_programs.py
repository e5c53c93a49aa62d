"""Slurm's programs, run with an environment in which nothing but their arguments counts."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from megakernel.config import UserError

_FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_")
"""Variables that change what the programs do: those of a surrounding job, and a user's own defaults."""


class SlurmRefused(UserError):
    """Slurm does not take the job, or does not answer."""


UNREACHABLE = "Unable to contact slurm controller|Connection refused|configuration source"
"""In what programs write that have found no cluster."""


def foreign_variables(env: Mapping[str, str] = os.environ) -> list[str]:
    """What is taken out of the environment before a program is run; SLURM_CONF says where the cluster is and stays."""
    return [name for name in env if name.startswith(_FOREIGN) and name != "SLURM_CONF"]


def require(program: str) -> None:
    """Raise SlurmRefused where a program is not installed, or has no cluster to talk to."""
    configuration = os.environ.get("SLURM_CONF")
    if configuration is not None and not os.path.exists(configuration):
        # The program itself would look for the file for a minute.
        raise SlurmRefused(f"SLURM_CONF={configuration} is not there; unset it, or start that cluster")
    if shutil.which(program) is None:
        raise SlurmRefused(
            f"{program} is not on this machine; submit from a login node, or give --cluster local"
        )


def call(command: Sequence[str], input_text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's programs to its end; its output is text. Raises SlurmRefused where it is not installed."""
    require(command[0])
    foreign = set(foreign_variables())
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    return subprocess.run(
        command, input=input_text, capture_output=True, text=True, env=environment, check=False
    )


def ask(*command: str) -> str:
    """What a program prints; SlurmRefused with its complaint where it fails."""
    done = call(command)
    if done.returncode:
        raise SlurmRefused(complaint(done.stderr, command[0]))
    return done.stdout


def complaint(stderr: str, program: str) -> str:
    """One line of what a program wrote on stderr."""
    lines = [
        re.split("error: |fatal: ", line, maxsplit=1)[-1].strip()
        for line in stderr.splitlines()
        if line.strip()
    ]
    text = "; ".join(dict.fromkeys(lines)) or "it gave no reason"
    if re.search(UNREACHABLE, text):
        return f"{program} cannot reach Slurm ({lines[-1]}); see `scontrol ping`, or try again later"
    return f"{program}: {text}"
