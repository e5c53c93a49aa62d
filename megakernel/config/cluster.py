"""The cluster file: resources that a job requests and the cluster's Slurm settings."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from .errors import Problem
from .load import interpolate, merged, read_composed
from .notify import Notify
from .section import Section
from .validation import all_texts, validate_section


class Container(Section):
    """Container that a job's processes run in."""

    runtime: Literal["pyxis", "enroot", "apptainer"] = "pyxis"
    """`pyxis`: srun --container-image; `enroot`: `enroot start`, without pyxis; `apptainer`: `apptainer exec --nv`."""

    image: str
    """Image as the runtime takes it: a file, a registry address (pyxis, apptainer), a container's name (enroot)."""

    mounts: list[str] = Field(default=[])
    """Bind mounts, SOURCE:TARGET[:FLAGS]; include the submission folder and the run folder."""

    def problems(self) -> Iterator[Problem]:
        """Images that enroot does not start."""
        if self.runtime == "enroot" and "://" in self.image:
            reason = "is an address, and enroot starts only files and containers"
            remedy = "make a file of it with `enroot import -o FILE.sqsh ADDRESS`, and name that"
            yield self.problem("image", reason, remedy)


_OTHER_OPTIONS = ("array", "dependency", "no-requeue")
"""sbatch options that `megakernel submit` has as well, but a cluster file does not."""


class Cluster(Section):
    """Defaults of a cluster; options of `megakernel submit` override them."""

    executor: Literal["slurm", "local", "debug"] = "slurm"
    """`slurm`: submit with sbatch; `local`: background processes on this machine; `debug`: foreground processes."""

    nodes: int = Field(default=1, ge=1, le=1_000_000)
    """Nodes to train on; several numbers, as 2-4 or 4,8,16: as many of them as there are, also after a loss."""

    fewer_nodes: list[int] = Field(default=[])
    """Smaller numbers of nodes to train on if there are not `nodes`; those of `nodes: 4,8,16` are 4 and 8."""

    spares: int = Field(default=0, ge=0, le=1_000)
    """Extra nodes to allocate. If a node is lost, the job restarts on a spare instead of returning to the queue."""

    gpus_per_node: int = Field(default=1, ge=0, le=1_000)
    """GPUs per node, with one process each; 0: one CPU process per node."""

    gpu_type: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """GPU type as Slurm names it; `--gpus-per-node h100:8` sets both."""

    time: str | int | None = None
    """Time limit in Slurm's format: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""

    partition: str | None = None
    """Partition, or several separated by commas."""

    account: str | None = None
    """Account to charge."""

    qos: str | None = None
    """Quality of service."""

    constraint: str | None = None
    """Node features that the job requires."""

    exclude: str | None = None
    """Nodes that the job must not use."""

    nodelist: str | None = None
    """Nodes that the allocation must include."""

    reservation: str | None = None
    """Reservation to run in."""

    mem: str | None = Field(default=None, pattern=r"^[0-9]+([KMGTkmgt][Bb]?)?$")
    """Memory per node, such as 200G; 0: all of it."""

    requeue: bool | None = None
    """Restart an interrupted job automatically; null: unless the next job of a chain continues the run."""

    max_restarts: int = Field(default=10, ge=0, le=1_000_000)
    """Most consecutive restarts after failures, without a new checkpoint; time limits and preemptions do not count."""

    restart_on: list[int] = Field(default=[])
    """Further exit statuses after which the job restarts, such as those of a wrapper in `setup`."""

    signal_delay: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which processes are signaled to save; raise it if a checkpoint takes longer."""

    preflight_mib: int = Field(default=64, ge=0, le=1_000_000)
    """MiB of the all-reduces that look for slow nodes before training; 0 skips them."""

    preflight_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """Longest that such an all-reduce may take within a node, and between two nodes."""

    container: Container | None = None
    """Container to run in; null: none."""

    stage: str | None = Field(default=None, pattern=r"^[/$][A-Za-z0-9_./$-]*$")
    """Folder on each node's own disk, such as /tmp or $TMPDIR, to which a training job copies Python, its packages and
    the code once per node, and which its processes start from; null: every process reads them where they are."""

    notify: Notify | None = None
    """Messages about the events of the job; null: none. A run's own logging.notify goes before it."""

    environment: dict[str, str] = Field(default={})
    """Environment variables of the job, such as NCCL_SOCKET_IFNAME."""

    sbatch: dict[str, str | int | float | bool | None] = Field(default={})
    """Other sbatch options by long name; true: an option without a value, null: drop one that Megakernel would set."""

    setup: list[str] = Field(default=[])
    """Shell lines that run before the processes start, such as `module load cuda`."""

    @model_validator(mode="before")
    @classmethod
    def _split_numbers(cls, value: Any) -> Any:
        """The tree with the numbers of `nodes: 2-4` or `nodes: 4,8,16` in their places."""
        text = value.get("nodes") if isinstance(value, Mapping) else None
        if not isinstance(text, str) or not re.fullmatch(_NUMBERS, text.replace(" ", ""), re.ASCII):
            return value
        numbers: set[int] = set()
        for part in text.replace(" ", "").split(","):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
            if not numbers or max(numbers) > _MOST_NODES or (last and int(first) > int(last)):
                return value
        *fewer, most = sorted(numbers)
        return {**value, "nodes": most, "fewer_nodes": fewer}

    @property
    def node_counts(self) -> list[int]:
        """The numbers of nodes that the run may train on, ascending."""
        return sorted({*self.fewer_nodes, self.nodes})

    @property
    def node_range(self) -> str:
        """The same as text, such as 8, 2-4 or 4,8,16."""
        return number_ranges(self.node_counts, ",")

    @property
    def requested_nodes(self) -> str:
        """What the job asks Slurm for: one number, or MIN-MAX."""
        if self.spares or not self.fewer_nodes:
            return str(self.nodes + self.spares)
        return f"{self.node_counts[0]}-{self.nodes}"

    @property
    def survives_losses(self) -> bool:
        """Whether the job goes on when it has lost a node."""
        return self.spares > 0 or bool(self.fewer_nodes)

    @property
    def gpus(self) -> str | int:
        """GPUs per node as a Slurm option: `TYPE:COUNT` or a count."""
        return f"{self.gpu_type}:{self.gpus_per_node}" if self.gpu_type else self.gpus_per_node

    @property
    def tasks_per_node(self) -> int:
        """Processes per node."""
        return int(self.sbatch.get("ntasks-per-node") or max(1, self.gpus_per_node))

    @property
    def world_size(self) -> int:
        """Processes of the job, at most."""
        return self.nodes * self.tasks_per_node

    def requeues(self, chain: int) -> bool:
        """Whether an interrupted job restarts, as one of `chain` jobs that continue a run one after another."""
        return chain == 1 if self.requeue is None else self.requeue

    @property
    def minutes(self) -> float | None:
        """The time limit in minutes; None if there is none."""
        return None if self.time is None else slurm_minutes(str(self.time))

    def problems(self) -> Iterator[Problem]:
        """Values that Slurm or the executor would reject or ignore."""
        if self.time is not None and not self.minutes:
            remedy = "write minutes, hours:minutes:seconds or days-hours:minutes:seconds"
            yield self.problem("time", "is not a time limit", remedy)
        elif (
            self.minutes is not None and self.requeue is not False and 60 * self.minutes <= self.signal_delay
        ):
            reason = (
                f"is not longer than signal_delay={self.signal_delay} s, so the job would only start and save"
            )
            yield self.problem("time", reason, "raise it or lower signal_delay")
        tasks = self.sbatch.get("ntasks-per-node")
        if tasks is not None and not re.fullmatch("[1-9][0-9]{0,3}", str(tasks)):
            reason, remedy = "is not a number of processes", "write one of 1 to 9999"
            yield Problem("sbatch.ntasks-per-node", tasks, reason, remedy)
        for name, value in self.sbatch.items():
            has_option = name.replace("-", "_") in type(self).model_fields or name in _OTHER_OPTIONS
            if has_option and value is not None:
                yield Problem(f"sbatch.{name}", value, "has an option of its own", f"give --{name}")
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
                yield Problem("sbatch", repr(name), "is not an option name", "write its long name without --")
        for key, text in all_texts(self.model_dump(exclude={"setup"})):
            if not text.isprintable():
                reason = "has an unprintable character, which would break the job script"
                yield Problem(key, repr(text), reason, "write it on one plain line")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                yield Problem("environment", name, "is not a variable name", "write NAME=VALUE")
        if not all(1 <= number < self.nodes for number in self.fewer_nodes):
            reason = f"has a number that is not from 1 to nodes - 1 = {self.nodes - 1}"
            yield self.problem("fewer_nodes", reason, "write nodes: 2-4 or nodes: 4,8,16, and leave it out")
        if self.spares and self.fewer_nodes:
            reason = f"is beside nodes={self.node_range}, which goes on with fewer nodes by itself"
            yield self.problem("spares", reason, "leave it out, or give one number of nodes")
        if self.stage is not None and self.container is not None:
            yield self.problem(
                "stage", "is beside a container, whose image has Python", "leave one of them out"
            )
        if self.executor != "slurm" and self.nodes > 1:
            reason = f"exceeds the one machine of executor={self.executor}"
            yield self.problem("nodes", reason, "set nodes to 1 or executor to slurm")
        if self.executor != "slurm":
            reason = (
                f"would be ignored by executor={self.executor}, which starts processes as this shell would"
            )
            image = self.container and self.container.image
            ignored = {"container": image, "setup": self.setup, "spares": self.spares, "stage": self.stage}
            for key, given in ignored.items():
                if given:
                    yield Problem(key, given, reason, "leave it out or set executor to slurm")


_NUMBERS = r"[1-9]\d{0,6}(-\d{1,7})?(,[1-9]\d{0,6}(-\d{1,7})?)*"
_MOST_NODES = 100_000
_MOST_RANGES = 12
"""Ranges that a text names."""


def number_ranges(numbers: Sequence[int], separator: str = ", ") -> str:
    """Ascending numbers as `1-2, 4, 8`; of many ranges the last ones."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return separator.join(["..."] * (len(texts) > _MOST_RANGES) + texts[-_MOST_RANGES:])


def load_cluster(path: Path, changes: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster file at `path` with `changes` merged over it; ConfigError lists every problem."""
    tree = read_composed(path)
    setup = tree.pop("setup", [])  # not interpolated: the job's shell expands its variables
    plain, unset = interpolate(tree, env)
    return validate_section(Cluster, merged({**plain, "setup": setup}, changes), known_problems=unset)


def slurm_minutes(text: str) -> float | None:
    """Minutes of a time limit in Slurm's format; None for any other text."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text, re.ASCII)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] or match[4]:  # with days, or with three parts, the first part is hours
        return 1440 * days + 60 * first + second + third / 60
    return first + second / 60
