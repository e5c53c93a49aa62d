"""`megakernel submit`: run a training or another command as a job of the cluster."""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch import notifications
from launch.arguments import RUNS, Number, add_allow_change, add_config_arguments, allow_change_options
from launch.slurm.options import add_cluster_options, cluster_of, cores_per_task
from launch.slurm.script import INDEX
from launch.slurm.staging import is_local
from launch.slurm_programs import require
from megakernel.config import Config, UserError, check_recorded_run, data_parallel_size, load, to_yaml
from megakernel.config.cluster import Cluster, number_ranges

if TYPE_CHECKING:
    from launch.slurm.job_folder import Job
    from launch.slurm.submission import Request

HELP = "train or up-train a configuration as a job of a Slurm cluster, or run another command there"
EXAMPLE = "megakernel submit configs/demo.yaml training.steps=100 -N 2 -G 8 -t 12:00:00"
NEEDS = ("submitit",)

COMMANDS = ("prepare", "evaluate", "generate", "reshape", "export", "import", "bench", "merge")
"""Commands that can be submitted besides training: `megakernel submit [options] -- evaluate runs/demo`."""

_OWN_TEMPLATE = ("prepare", "evaluate")
"""Commands with a template of their own name in slurm/."""

MAX_ARRAY_SIZE = 1000
"""Most runs of one array: what Slurm's default MaxArraySize allows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_config_arguments(
        parser,
        "YAML file to train, in stages if it has an uptrain section, or after `--` another command with its "
        "arguments: " + ", ".join(COMMANDS),
        f"keys to change, or the other command's arguments; in an array %{INDEX} stands for the member's index",
    )
    parser.add_argument("--name", help="name of the run and of the job")
    add_cluster_options(parser)
    add_chain_option(parser)
    add_allow_change(parser)
    parser.add_argument("--array", metavar="SPEC", help="a run for each index, such as 0-7 or 0-99%%4")
    add_job_options(parser)


def add_chain_option(parser: argparse.ArgumentParser) -> None:
    """Declare --chain, the number of jobs that continue a run one after another."""
    parser.add_argument(
        "--chain",
        type=Number(int, 1, MAX_ARRAY_SIZE),
        default=1,
        metavar="N",
        help="submit N jobs that continue the run one after another",
    )


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Declare when the job may start, whether it is submitted or only shown, and whether the command waits for it."""
    add = parser.add_argument
    add(
        "--dependency",
        metavar="TYPE:RUN",
        help="dependency of sbatch, with run names in place of job ids: afterok:demo",
    )
    add("--dry-run", action="store_true", help="print the batch script and submit nothing")
    add("--test-only", action="store_true", help="ask Slurm when the job could start; submit nothing")
    add("--wait", action="store_true", help="wait for the job's end; exit with 1 if it failed")
    add("--follow", action="store_true", help="like --wait, and show the log")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check all that can be checked on this machine, then submit."""
    if args.config == "dev" and args.overrides:  # `dev bench` is `bench`
        args.config, *args.overrides = args.overrides
    word = args.config
    if word in COMMANDS:
        return carry_out(_request_command(args), args)
    if word in ("pretrain", "uptrain"):
        raise UserError(f"submit {word}: leave out {word}; megakernel submit CONFIG trains it")
    if word in args.commands:
        raise UserError(f"submit {word} is not possible; give a YAML file, or one of {', '.join(COMMANDS)}")
    return carry_out(_request_training(args), args)


def carry_out(request: "Request", args: argparse.Namespace) -> int:
    """Show, test or submit the request, as the options say, and wait for it with --wait or --follow."""
    from launch.slurm import submission

    if args.json and (args.dry_run or args.test_only):
        shown = "--dry-run" if args.dry_run else "--test-only"
        raise UserError(f"--json has no effect with {shown}, which submits no job; leave one out")
    if args.dry_run:
        print(request.text(), end="")
        return 0
    _check_executor(request, args)
    if args.test_only:
        print(submission.test(request))
        return 0
    jobs = submission.submit(request)
    runs = list(dict.fromkeys(str(member.run) for member in request.members))
    if args.json:
        print(json.dumps({"runs": runs, "jobs": [job.id for job in jobs], "submission": request.submission}))
    else:
        _print_jobs(jobs, runs)
    if args.wait or args.follow or request.cluster.executor == "debug":
        return submission.wait(request, jobs, follow=args.follow)
    return 0


def _check_executor(request: "Request", args: argparse.Namespace) -> None:
    executor = request.cluster.executor
    if request.cluster.stage is not None and is_local(sys.prefix):
        raise UserError(
            f"stage={request.cluster.stage}: {sys.executable} is the system's Python, which nodes have on their disks; "
            "install Megakernel in an environment of its own, or leave stage out"
        )
    if executor == "slurm":
        require("sbatch")
        return
    slurm_options = {
        "--test-only": args.test_only,
        "--chain": request.chain > 1,
        "--array": request.array is not None,
        "--dependency": bool(args.dependency),
    }
    for option, is_used in slurm_options.items():
        if is_used:
            raise UserError(f"{option} needs Slurm, and this cluster's executor is {executor}; leave it out")


def _print_jobs(jobs: "list[Job]", runs: list[str]) -> None:
    ids = jobs[0].id if len(jobs) == 1 else f"{jobs[0].id} ... {jobs[-1].id}"
    print(f"submitted {ids}: {', '.join(runs[:3])}{' ...' if len(runs) > 3 else ''}")
    # The members of an array share the id before the underscore.
    name = runs[0] if len(runs) == 1 else jobs[0].id.partition("_")[0]
    print(f"  megakernel status {name}   megakernel logs -f {name}   megakernel cancel {name}")


def _request_training(args: argparse.Namespace) -> "Request":
    if args.chain > 1 and args.array:
        raise UserError(f"--chain {args.chain} and --array {args.array} exclude each other; leave one out")
    overrides = [*args.overrides, *([f"run.name={args.name}"] if args.name else [])]
    runs: dict[int | None, Config] = {}
    for index in [None] if args.array is None else indices(args.array):
        filled = overrides if index is None else [text.replace(INDEX, str(index)) for text in overrides]
        runs[index] = load(args.config, filled)
    return training_request(
        runs,
        cluster_of(args),
        args.array,
        dependency=args.dependency,
        chain=args.chain,
        allowed=args.allow_change,
    )


def training_request(
    runs: Mapping[int | None, Config],
    cluster: Cluster,
    array: str | None = None,
    *,
    dependency: str | None = None,
    root: Path = RUNS,
    chain: int = 1,
    allowed: Sequence[str] = (),
    done: int | None = None,
) -> "Request":
    """A request for one run, or for an array of runs by index, named NAME-INDEX after the first run's name.

    root: folder of the runs that `dependency` names.
    allowed: keys that may change if the run exists; restarts of the job find the changed ones recorded.
    done: the completed steps with which it resumes; None: those of its newest checkpoint.
    Raises UserError for a configuration that does not fit the number of processes, its data, or an existing run.
    """
    from launch.slurm.submission import Member, Request, new_submission_name

    first = next(iter(runs.values()))
    cluster = _with_webhook(cluster, first)
    members = []
    for index, config in runs.items():
        if index is not None:
            run = config.run.model_copy(update={"name": f"{first.run.name}-{index}"})
            config = config.model_copy(update={"run": run})
        _check(config, cluster, has_data=not dependency, allowed=allowed, done=done)
        members.append(Member(config.run.folder, to_yaml(config), index))
    command = "pretrain" if first.uptrain is None else "uptrain"
    return Request(
        command,
        cluster,
        first.run.folder.absolute(),
        new_submission_name(),
        [command, "$submission/config.yaml", *allow_change_options(allowed)],
        array,
        _dependency_option(dependency, root) | cores_per_task(cluster),
        chain,
        members,
    )


def _with_webhook(cluster: Cluster, config: Config | None = None) -> Cluster:
    """The settings with the run's own `notify`, if it has one, and the webhook's URL among the variables.

    Raises UserError if the URL's variable is not set.
    """
    key, notify = "notify", cluster.notify
    if config is not None and config.logging.notify is not None:
        key, notify = "logging.notify", config.logging.notify
    secret = notifications.check(notify, key, os.environ | cluster.environment)
    return cluster.model_copy(update={"notify": notify, "environment": {**cluster.environment, **secret}})


def _dependency_option(dependency: str | None, root: Path = RUNS) -> dict[str, str]:
    """sbatch's dependency option; empty if all dependencies are already fulfilled."""
    from launch.slurm.states import resolve_dependency

    jobs = resolve_dependency(dependency, root) if dependency else ""
    return {"dependency": jobs} if jobs else {}


def _check(
    config: Config, cluster: Cluster, has_data: bool, allowed: Sequence[str], done: int | None
) -> None:
    """Raise UserError for what would fail on the cluster: layout, stages, an existing run, the data.

    has_data: whether to check the data; the job that this one waits for may still have to make it.
    allowed, done: as for `check_same_run`.
    """
    from data_pipeline.corpus import Corpora

    if config.uptrain is not None and allowed:
        raise UserError(f"--allow-change {allowed[0]} is for runs without an uptrain section; leave it out")
    _check_numbers_of_nodes(config, cluster)
    check_recorded_run(config, allowed, done)
    # Login nodes should not read a large corpus: the job itself verifies the checksums.
    if has_data:
        Corpora(config.data, validation=config.training.eval_samples > 0, verify=False)


def _check_numbers_of_nodes(config: Config, cluster: Cluster) -> None:
    """Raise UserError if the run cannot be trained on each number of nodes that Slurm may give it."""
    problems: dict[int, UserError] = {}
    for nodes in cluster.node_counts:
        try:
            _check_processes(config, nodes * cluster.tasks_per_node)
        except UserError as error:
            problems[nodes] = error
    if not problems:
        return
    nodes, problem = next(iter(problems.items()))
    if len(cluster.node_counts) == 1:
        raise problem
    possible = [count for count in cluster.node_counts if count not in problems]
    several = "nodes" if nodes > 1 else "node"
    raise UserError(
        f"nodes={cluster.node_range}: {nodes} {several} cannot train this run ({str(problem).splitlines()[0]}); "
        + (f"give those that can: --nodes {number_ranges(possible, ',')}" if possible else "none of them can")
    )


def _check_processes(config: Config, world_size: int) -> None:
    data_parallel_size(config, world_size)
    if config.uptrain is not None:
        from megakernel.uptraining.stages import check_stages  # imports torch

        check_stages(config, world_size)


def indices(array: str) -> list[int]:
    """The indices of an array in Slurm's syntax, each once: `0-7`, `1,3,5` or `0-10:2`, optionally followed by `%K`."""
    numbers: list[int] = []
    parts, percent, limit = array.partition("%")
    for part in parts.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part)
        valid_limit = not percent or re.fullmatch("0*[1-9][0-9]{0,8}", limit)
        if (
            not match
            or not valid_limit
            or int(match[3] or 1) < 1
            or int(match[2] or match[1]) < int(match[1])
        ):
            raise UserError(f"--array {array} is no list of indices; write 0-7, 1,3,5 or 0-99%4")
        members = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        if (count := len(numbers) + len(members)) > MAX_ARRAY_SIZE:
            raise UserError(f"--array {array} asks for {count} jobs; give at most {MAX_ARRAY_SIZE} at once")
        numbers += members
    return list(dict.fromkeys(numbers))


def _request_command(args: argparse.Namespace) -> "Request":
    from launch.slurm.submission import Member, Request, new_submission_name

    command = [args.config, *args.overrides]
    if args.allow_change:
        raise UserError(f"--allow-change {args.allow_change[0]} is only for training; leave it out")
    numbers = indices(args.array) if args.array else []
    # Refuse an invalid command line now.
    args.parse([word.replace(INDEX, str(numbers[0])) for word in command] if numbers else command)
    cluster = cluster_of(args)
    name = args.name or f"{args.config}-{new_submission_name()}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"--name {name} cannot name a folder; write letters, digits, dots and dashes")
    if args.chain != 1:
        raise UserError(f"--chain is only for training; submit `{shlex.join(command)}` once for each job")
    if args.array and not any(INDEX in word for word in command):
        raise UserError(
            f"--array {args.array}: `{shlex.join(command)}` is the same for each index; write {INDEX} where they differ"
        )
    base = RUNS / name
    cluster = _with_webhook(cluster)
    single = cluster.model_copy(
        update={
            "nodes": 1,
            "fewer_nodes": [],
            "spares": 0,
            "sbatch": {**cluster.sbatch, "ntasks-per-node": 1},
        }
    )
    members = [Member(base.with_name(f"{name}-{number}"), index=number) for number in numbers] or [
        Member(base)
    ]
    options = _dependency_option(args.dependency) | cores_per_task(single)
    template = args.config if args.config in _OWN_TEMPLATE else "command"
    return Request(
        template,
        single,
        base.absolute(),
        new_submission_name(),
        command,
        args.array,
        options,
        members=members,
    )
