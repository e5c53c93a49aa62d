"""One-line explanations of why sbatch refused a job: the option, its value and a remedy."""

import re
from collections.abc import Callable

from launch.slurm_programs import UNREACHABLE, call, error_line
from megakernel.config.cluster import Cluster


def _list_values(what: str, *command: str) -> Callable[[], str]:
    """A remedy that lists the valid values, if Slurm answers."""

    def remedy() -> str:
        done = call(command)
        names = dict.fromkeys(word for line in done.stdout.split() for word in line.split(",") if word)
        known = ", ".join(name for name in names if name != "(null)")
        return f"choose {what}: {known}" if known and not done.returncode else "`sinfo` shows valid values"

    return remedy


_PARTITIONS = _list_values("one of the partitions", "sinfo", "-h", "-o", "%R")
_NODES = _list_values(
    "nodes of this cluster, none of them both wanted and excluded", "sinfo", "-h", "-N", "-o", "%N"
)

_REFUSALS: tuple[tuple[str, str, str | Callable[[], str]], ...] = (
    ("invalid partition", "partition", _PARTITIONS),
    ("Invalid account", "account", "see `sacctmgr show associations user=$USER`"),
    ("Invalid qos", "qos", "see `sacctmgr show qos`"),
    ("Invalid feature", "constraint", _list_values("features that nodes have", "sinfo", "-h", "-o", "%f")),
    ("reservation is invalid", "reservation", "see `scontrol show reservation`"),
    ("Invalid node name", "nodelist exclude", _NODES),
    (
        "QOS policy",  # followed by "and/or time limits" for any limit, so before "time limit"
        "account qos",
        "see the limits in `sacctmgr show qos` and `sacctmgr show associations user=$USER`",
    ),
    ("--time specification", "time", "write hours:minutes:seconds"),
    ("time limit", "time", _list_values("a limit within the partitions'", "sinfo", "-h", "-o", "%l")),
    ("--mem", "mem", "write a number and a unit, such as 200G"),
    ("dependency", "dependency", "write TYPE:RUN or TYPE:JOB, such as afterok:17"),
    (
        "generic resource|gres",
        "gpus_per_node gpu_type",
        _list_values("GPUs of a node", "sinfo", "-h", "-o", "%G"),
    ),
    ("job array", "array", "give fewer indices; `scontrol show config` has MaxArraySize"),
    (
        "[Nn]ode count|number of nodes|node configuration|Memory spec",
        "nodes gpus_per_node gpu_type mem nodelist constraint",
        "ask for less; `sinfo -o '%D %G %m'` shows nodes, GPUs and memory",
    ),
    ("unrecognized option|ambiguous", "", "see `sbatch --help` for its options"),
)
"""Pattern in sbatch's error, space-separated names of the options it is about, remedy."""


def explain_refusal(stderr: str, cluster: Cluster, more: dict[str, str | None]) -> str:
    """The explanation. stderr: that of sbatch. more: values of options that `cluster` lacks, by name."""
    text = error_line(stderr, "sbatch")
    if re.search(UNREACHABLE, stderr):
        return text
    values = cluster.model_dump() | {"nodes": cluster.node_range} | more
    for pattern, keys, remedy in _REFUSALS:
        if re.search(pattern, stderr):
            settings = [f"{key}={values[key]}" for key in keys.split() if values[key] is not None]
            prefix = f"{', '.join(settings)}: " if settings else ""
            reason = text.removeprefix("sbatch: ").replace("Batch job submission failed: ", "")
            return (
                f"{prefix}Slurm refuses the job ({reason}); {remedy if isinstance(remedy, str) else remedy()}"
            )
    return f"Slurm refuses the job ({text}); --dry-run shows the batch script"
