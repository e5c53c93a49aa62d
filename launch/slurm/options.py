"""The options of commands that submit, and the cluster's settings that follow from them."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.slurm_programs import SlurmRefused, ask
from megakernel.config import UserError, validate_section
from megakernel.config.cluster import Cluster, load_cluster
from megakernel.config.section import merged

from .script import REPOSITORY

CLUSTER_VARIABLE = "MEGAKERNEL_CLUSTER"

_OPTIONS = (
    *("nodes", "spares", "gpus_per_node", "time", "partition", "account", "qos", "constraint", "exclude"),
    *("nodelist", "reservation", "mem", "max_restarts", "signal_delay"),
)
"""Keys of the cluster's settings that have an option of their name; the help is the key's docstring."""

_LETTERS = {
    "nodes": "-N",
    "gpus_per_node": "-G",
    "time": "-t",
    "partition": "-p",
    "account": "-A",
    "qos": "-q",
    "constraint": "-C",
}
"""Those of sbatch."""


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Declare what is asked of the cluster."""
    group = parser.add_argument_group("what is asked of the cluster, over the defaults of --cluster")
    group.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help=f"defaults: a file of configs/cluster (slurm, local, debug ...) or your own; default ${CLUSTER_VARIABLE}, "
        "or slurm",
    )
    for key in _OPTIONS:
        names = filter(None, (_LETTERS.get(key), f"--{key.replace('_', '-')}"))
        group.add_argument(*names, dest=key, metavar=key.upper(), help=_help(key))
    group.add_argument(
        "--requeue", action=argparse.BooleanOptionalAction, default=None, help=_help("requeue")
    )
    group.add_argument(
        "--container", metavar="IMG", help="image to run in, with the file's runtime (default pyxis)"
    )
    group.add_argument("--mounts", metavar="SRC:DST[,...]", help="folders that the container sees")
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K[=V]",
        help="a variable of the job; without a value that of this shell, which no history keeps",
    )
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="K[=V]", help="any other option of sbatch"
    )
    group.add_argument(
        "--setup", action="append", default=[], metavar="CMD", help="line of shell to run before"
    )


def cluster_of(args: argparse.Namespace, recorded: dict[str, Any] | None = None) -> Cluster:
    """The cluster's settings: those of a file, or the ones `recorded` by an earlier submission, under the options."""
    changes = _changes(args)
    if recorded is not None and args.cluster is None:
        return validate_section(Cluster, merged(recorded, changes))
    return load_cluster(_file(args.cluster or os.environ.get(CLUSTER_VARIABLE, "slurm")), changes)


def cores_per_task(cluster: Cluster) -> dict[str, str]:
    """sbatch's cpus-per-task: each process's part of the cores that its node has for the GPUs that are asked for.

    Slurm's own default is one core. Empty where the cluster's settings say more, or Slurm does not know.
    """
    if cluster.executor != "slurm" or not cluster.gpus_per_node or _OWN_CORES & cluster.sbatch.keys():
        return {}
    try:
        lines = ask("sinfo", "--noheader", "--format=%P %c %G").splitlines()
    except SlurmRefused:
        return {}
    wanted = (cluster.partition or "").split(",")
    parts: list[int] = []
    for partition, cores, resources in map(str.split, lines):
        there = sum(map(int, re.findall(r"\bgpu:(?:[^:,()]+:)?(\d+)", resources)))
        is_meant = partition.rstrip("*") in wanted if cluster.partition else partition.endswith("*")
        if is_meant and there >= cluster.gpus_per_node:
            parts.append(int(cores.rstrip("+")) * cluster.gpus_per_node // there // cluster.tasks_per_node)
    least = min(parts, default=0)
    return {"cpus-per-task": str(least)} if least else {}


_OWN_CORES = {"cpus-per-task", "cpus-per-gpu", "threads-per-core"}


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {
        key: value for key in (*_OPTIONS, "requeue") if (value := getattr(args, key)) is not None
    }
    kind, typed, count = changes.get("gpus_per_node", "").rpartition(":")
    if typed:
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
    if args.setup:
        changes["setup"] = args.setup
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


def _file(name: str) -> Path:
    """A file by its path, or by its name in configs/cluster of this folder or of the checkout."""
    folders: Sequence[Path] = (Path("configs/cluster"), REPOSITORY / "configs" / "cluster")
    candidates = [Path(name), *(folder / f"{name}.yaml" for folder in folders)]
    for path in candidates:
        if path.is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise UserError(f"--cluster {name} is no file and none of {', '.join(known)}; name a YAML file")


def _help(key: str) -> str:
    return (Cluster.model_fields[key].description or "").rstrip(".").replace("%", "%%")
