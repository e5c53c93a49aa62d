"""What a job asks of the cluster it is submitted to, and how a cluster wants to be asked."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from .errors import Problem
from .load import interpolate, merged, read_composed
from .section import Section
from .validation import texts_of, validate_section


class Container(Section):
    """The container that the processes of a job run in."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: srun's own --container-image; apptainer: `apptainer exec --nv`."""

    image: str
    """What the runtime takes: a registry's address or a file."""

    mounts: list[str] = Field(default=[])
    """Folders as SOURCE:TARGET[:FLAGS]; the folder of submission and that of the run belong among them."""


_OTHER_OPTIONS = ("array", "dependency", "no-requeue")
"""Options of `megakernel submit` that are sbatch's too, and no keys of a cluster."""


class Cluster(Section):
    """The defaults of a cluster; options of `megakernel submit` are laid over them."""

    executor: Literal["slurm", "local", "debug"] = "slurm"
    """slurm: sbatch; local: processes in the background of this machine; debug: in the foreground."""

    nodes: int = Field(default=1, ge=1, le=1_000_000)
    """Machines."""

    spares: int = Field(default=0, ge=0, le=1_000)
    """Further machines that the job holds. It starts again there, not in the queue, when one of its nodes is lost."""

    gpus_per_node: int = Field(default=1, ge=0, le=1_000)
    """GPUs on each, and as many processes; with 0 one process that computes on the CPU."""

    gpu_type: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Type of these GPUs, as Slurm calls it; `--gpus-per-node h100:8` gives both."""

    time: str | int | None = None
    """Limit as Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""

    partition: str | None = None
    """Partition, or several with commas."""

    account: str | None = None
    """Account to charge."""

    qos: str | None = None
    """Quality of service."""

    constraint: str | None = None
    """Features that the nodes must have."""

    exclude: str | None = None
    """Nodes to keep off."""

    nodelist: str | None = None
    """Nodes that must be among those of the job."""

    reservation: str | None = None
    """Reservation to run in."""

    mem: str | None = Field(default=None, pattern=r"^[0-9]+([KMGTkmgt][Bb]?)?$")
    """Memory of each node, such as 200G; 0 is all of it."""

    requeue: bool = True
    """Whether a job that was interrupted may start again by itself."""

    max_restarts: int = Field(default=10, ge=0, le=1_000_000)
    """Failures in a row after which it may, each without a step saved; time limits and preemptions do not count."""

    restart_on: list[int] = Field(default=[])
    """Further exit statuses after which it starts again, such as those of a wrapper in `setup`."""

    signal_delay: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which the processes are told to save."""

    preflight_mib: int = Field(default=64, ge=0, le=1_000_000)
    """MiB that the processes sum up with each other before they train, to find slow nodes; 0 leaves it out."""

    preflight_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """What such an all-reduce may take within a node, and between two nodes."""

    container: Container | None = None
    """Container to run in."""

    environment: dict[str, str] = Field(default={})
    """Variables of the job, such as NCCL_SOCKET_IFNAME."""

    sbatch: dict[str, str | int | float | bool | None] = Field(default={})
    """Any other option of sbatch by its long name; true for one without a value, null to leave ours out."""

    setup: list[str] = Field(default=[])
    """Lines of shell that run before the processes start, such as `module load cuda`."""

    @property
    def gpus(self) -> str | int:
        """GPUs of a node as Slurm is asked for them."""
        return f"{self.gpu_type}:{self.gpus_per_node}" if self.gpu_type else self.gpus_per_node

    @property
    def tasks_per_node(self) -> int:
        """Processes on each node."""
        return int(self.sbatch.get("ntasks-per-node") or max(1, self.gpus_per_node))

    @property
    def world_size(self) -> int:
        """Processes of a job."""
        return self.nodes * self.tasks_per_node

    @property
    def minutes(self) -> float | None:
        """The time limit; None where there is none."""
        return None if self.time is None else slurm_minutes(str(self.time))

    def problems(self) -> Iterator[Problem]:
        """What Slurm could not read."""
        if self.time is not None and not self.minutes:
            remedy = "write minutes, hours:minutes:seconds or days-hours:minutes:seconds"
            yield self.problem("time", "is no time limit", remedy)
        elif self.minutes is not None and self.requeue and 60 * self.minutes <= self.signal_delay:
            reason = (
                f"is not longer than signal_delay={self.signal_delay} s, so the job would only start and save"
            )
            yield self.problem("time", reason, "raise it or lower signal_delay")
        tasks = self.sbatch.get("ntasks-per-node")
        if tasks is not None and not re.fullmatch("[1-9][0-9]{0,3}", str(tasks)):
            reason, remedy = "is no number of processes", "write one of 1 to 9999"
            yield Problem("sbatch.ntasks-per-node", tasks, reason, remedy)
        for name, value in self.sbatch.items():
            has_option = name.replace("-", "_") in type(self).model_fields or name in _OTHER_OPTIONS
            if has_option and value is not None:
                yield Problem(f"sbatch.{name}", value, "has an option of its own", f"give --{name}")
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
                yield Problem(
                    "sbatch", repr(name), "is no name of an option", "write its long name without --"
                )
        for key, text in texts_of(self.model_dump(exclude={"setup"})):
            if not text.isprintable():
                reason = "has a character that cannot be printed, where a script would break"
                yield Problem(key, repr(text), reason, "write it on one plain line")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                yield Problem("environment", name, "is no name of a variable", "write NAME=VALUE")
        if self.executor != "slurm" and self.nodes > 1:
            reason = f"with executor={self.executor} is more than this machine"
            yield self.problem("nodes", reason, "set nodes to 1 or executor to slurm")
        if self.executor != "slurm":
            reason = (
                f"would be ignored by executor={self.executor}, which starts processes as this shell would"
            )
            image = self.container and self.container.image
            ignored = {"container": image, "setup": self.setup, "spares": self.spares}
            for key, given in ignored.items():
                if given:
                    yield Problem(key, given, reason, "leave it out or set executor to slurm")


def load_cluster(path: Path, changes: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster file at `path` with `changes` laid over it; ConfigError with every problem."""
    tree = read_composed(path)
    setup = tree.pop("setup", [])  # the shell of the job knows its own variables
    plain, unset = interpolate(tree, env)
    return validate_section(Cluster, merged({**plain, "setup": setup}, changes), known_problems=unset)


def slurm_minutes(text: str) -> float | None:
    """Minutes of a time limit in one of Slurm's forms; None for any other text."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text, re.ASCII)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] or match[4]:  # then hours come first
        return 1440 * days + 60 * first + second + third / 60
    return first + second / 60
