"""This process's rank and world, from the variables of torchrun or srun."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from launch.slurm_programs import SlurmRefused, check_output
from megakernel.config import UserError
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.training.events import in_job

_LAST_PORT = 65_535

FIRST_PORT, PORTS = 20_000, 12_000
"""First rendezvous port and how many there are: all below Linux's ephemeral ports, which start at 32768."""


def free_port(number: int) -> int:
    """A free rendezvous port of this machine, searched from a place that depends on the number of a job or process.

    Nothing else is given it by chance until it is used.
    """
    for port in (FIRST_PORT + (7 * number + offset) % PORTS for offset in range(PORTS)):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise UserError(f"every port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is taken on this machine")


_BACKENDS = ("chunked", "reference", "triton", "composed")


def check_backend(env: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if no op has the backend in MEGAKERNEL_BACKEND, before any heavy import."""
    name = env.get("MEGAKERNEL_BACKEND")
    if name and name not in _BACKENDS:
        raise UserError(
            f"MEGAKERNEL_BACKEND={name} is no backend; set it to {', '.join(_BACKENDS)}, or unset it"
        )


def launched_process(env: Mapping[str, str] = os.environ) -> ProcessEnvironment | None:
    """The rank and world that torchrun or srun gave this process; None if neither started it."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    # A batch script has SLURM_PROCID too; only a step that srun started has SLURM_STEP_ID. A step of one task
    # is an interactive shell, which starts its own processes, unless `megakernel submit` made the job.
    if "SLURM_STEP_ID" in env and (
        _number({"SLURM_STEP_NUM_TASKS": "1", **env}, "SLURM_STEP_NUM_TASKS", 1) > 1 or in_job(env)
    ):
        return _from_slurm(env)
    return None


def _from_torchrun(env: Mapping[str, str]) -> ProcessEnvironment:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} is not; start with torchrun or srun"
        )
    size = _number(env, "WORLD_SIZE", 1)
    rank = _number(env, "RANK", 0, size - 1)
    return ProcessEnvironment(
        rank=rank,
        world_size=size,
        local_rank=_number(env, "LOCAL_RANK", 0) if "LOCAL_RANK" in env else rank,
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in env else size,
        master_address=env["MASTER_ADDR"],
        master_port=_number(env, "MASTER_PORT", 1, _LAST_PORT),
    )


def _number(env: Mapping[str, str], name: str, minimum: int, maximum: int | None = None) -> int:
    text = env[name]
    if not text.isdecimal() or int(text) < minimum or (maximum is not None and int(text) > maximum):
        valid = f"{minimum} up" if maximum is None else f"{minimum} to {maximum}"
        raise UserError(f"{name}={text} is no number from {valid}; unset it, or start with torchrun or srun")
    return int(text)


def _from_slurm(env: Mapping[str, str]) -> ProcessEnvironment:
    # Steps of one job may run at the same time, so each step needs its own port.
    port = FIRST_PORT + (int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])) % PORTS
    return ProcessEnvironment(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(env["SLURM_LOCALID"]),
        local_world_size=_tasks_on_node(env["SLURM_STEP_TASKS_PER_NODE"], int(env["SLURM_NODEID"])),
        master_address=env.get("MASTER_ADDR") or _address_of_first_node(env),
        master_port=_number(env, "MASTER_PORT", 1, _LAST_PORT) if env.get("MASTER_PORT") else port,
    )


def _tasks_on_node(counts: str, node: int) -> int:
    """Tasks on the node with index `node`; counts: Slurm's run lengths, `2(x3),1` for 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in counts.split(","):
        count, _, times = part.partition("(x")
        tasks += [int(count)] * int(times.rstrip(")") or 1)
    return tasks[node]


def _address_of_first_node(env: Mapping[str, str]) -> str:
    """The address that Slurm uses for the step's first node, whose name may not resolve."""
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    try:
        first = check_output("scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]).split()[0]
        node = check_output("scontrol", "show", "node", "-o", first)
    except SlurmRefused as error:
        raise UserError(f"{error}, or export MASTER_ADDR with the address of the first node") from None
    return dict(field.split("=", 1) for field in node.split() if "=" in field).get("NodeAddr", first)
