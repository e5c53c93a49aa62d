"""The cluster options of commands that submit, and the settings that result from them."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import shipped
from launch.slurm_programs import SlurmRefused, check_output
from megakernel.config import UserError, validate_section
from megakernel.config.cluster import Cluster, load_cluster
from megakernel.config.section import merged

CLUSTER_VARIABLE = "MEGAKERNEL_CLUSTER"

_OPTIONS = (
    *("nodes", "spares", "gpus_per_node", "time", "partition", "account", "qos", "constraint", "exclude"),
    *("nodelist", "reservation", "mem", "max_restarts", "signal_delay"),
)
"""Keys of `Cluster` that have an option of their name; the option's help is the key's docstring."""

_SHORT_OPTIONS = {
    "nodes": "-N",
    "gpus_per_node": "-G",
    "time": "-t",
    "partition": "-p",
    "account": "-A",
    "qos": "-q",
    "constraint": "-C",
}
"""Short options, as in sbatch."""


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Declare --cluster and the options that override its settings."""
    add = parser.add_argument_group("cluster options, over the defaults of --cluster").add_argument
    add(
        "--cluster",
        metavar="NAME|FILE",
        help=f"file with the defaults: one of configs/cluster (slurm, local, debug ...) or your own; default "
        f"${CLUSTER_VARIABLE}, or slurm",
    )
    for key in _OPTIONS:
        names = filter(None, (_SHORT_OPTIONS.get(key), f"--{key.replace('_', '-')}"))
        add(*names, dest=key, metavar=key.upper(), help=_help(key))
    add("--requeue", action=argparse.BooleanOptionalAction, default=None, help=_help("requeue"))
    add("--container", metavar="IMG", help="image to run in, with the file's runtime (default pyxis)")
    add("--mounts", metavar="SRC:DST[,...]", help="folders to mount in the container")
    add(
        "--env",
        action="append",
        default=[],
        metavar="K[=V]",
        help="environment variable of the job; without a value that of this shell, which keeps it out of shell history",
    )
    add("--sbatch", action="append", default=[], metavar="K[=V]", help="any other option of sbatch")
    add(
        "--setup",
        action="append",
        default=[],
        metavar="CMD",
        help="shell line to run before the processes, after those of the file",
    )


def cluster_of(args: argparse.Namespace, recorded: dict[str, Any] | None = None) -> Cluster:
    """The settings of --cluster's file, or those `recorded` by an earlier submission, with the options over them.

    Lines of --setup follow those of the file or the record.
    """
    changes = _changes(args)
    if recorded is not None and args.cluster is None:
        cluster = validate_section(Cluster, merged(recorded, changes))
    else:
        file = _cluster_file(args.cluster or os.environ.get(CLUSTER_VARIABLE, "slurm"))
        cluster = load_cluster(file, changes)
    return cluster.model_copy(update={"setup": cluster.setup + args.setup})


def cores_per_task(cluster: Cluster) -> dict[str, str]:
    """sbatch's cpus-per-task: the node's cores in proportion to the requested GPUs, divided by tasks per node.

    Slurm's own default is one core. Empty if the settings request no GPUs or set the cores, or if Slurm cannot tell.
    """
    if cluster.executor != "slurm" or not cluster.gpus_per_node or _CORE_OPTIONS & cluster.sbatch.keys():
        return {}
    try:
        lines = check_output("sinfo", "--noheader", "--format=%P %c %G").splitlines()
    except SlurmRefused:
        return {}
    wanted = (cluster.partition or "").split(",")
    per_task: list[int] = []
    for partition, cores, resources in map(str.split, lines):
        counts = [(kind, int(n)) for kind, n in re.findall(r"\bgpu:(?:([^:,()]+):)?(\d+)", resources)]
        gpus = sum(count for _, count in counts)
        usable = sum(count for kind, count in counts if cluster.gpu_type in (None, kind))
        is_wanted = partition.rstrip("*") in wanted if cluster.partition else partition.endswith("*")
        if is_wanted and usable >= cluster.gpus_per_node:
            per_task.append(int(cores.rstrip("+")) * cluster.gpus_per_node // gpus // cluster.tasks_per_node)
    least = min(per_task, default=0)
    return {"cpus-per-task": str(least)} if least else {}


_CORE_OPTIONS = {"cpus-per-task", "cpus-per-gpu", "threads-per-core"}


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {
        key: value for key in (*_OPTIONS, "requeue") if (value := getattr(args, key)) is not None
    }
    if "nodes" in changes:
        changes = {"fewer_nodes": [], **changes}  # one number means that number, whatever the file has
    kind, colon, count = changes.get("gpus_per_node", "").rpartition(":")
    if colon:
        changes |= {"gpu_type": kind, "gpus_per_node": count}
    container = {"image": args.container} if args.container else {}
    if args.mounts:
        container["mounts"] = args.mounts.split(",")
    if container:
        changes["container"] = container
    if args.env:
        changes["environment"] = dict(_variable(item) for item in args.env)
    if args.sbatch:
        changes["sbatch"] = dict(_sbatch_option(item) for item in args.sbatch)
    return changes


def _variable(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals and name not in os.environ:
        raise UserError(f"--env {item} is not set in this shell; export it, or write --env NAME=VALUE")
    return name, value if equals else os.environ[name]


def _sbatch_option(item: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not key:
        raise UserError(f"--sbatch {item} is no option; write --sbatch NAME or --sbatch NAME=VALUE")
    return key.lstrip("-"), value if equals else True


def _cluster_file(name: str) -> Path:
    """A cluster file by its path, or by its name in configs/cluster of the working folder or of the package."""
    folders: Sequence[Path] = (Path("configs/cluster"), shipped.folder("configs") / "cluster")
    candidates = [Path(shipped.config_file(name)), *(folder / f"{name}.yaml" for folder in folders)]
    for path in candidates:
        if path.is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise UserError(f"--cluster {name} is no file and none of {', '.join(known)}; name a YAML file")


def _help(key: str) -> str:
    return (Cluster.model_fields[key].description or "").rstrip(".").replace("%", "%%")
