"""`megakernel submit`: what another command would do here, as a job of the cluster."""

import argparse
import json
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import Number, add_config_arguments
from launch.slurm.options import add_cluster_options, cluster_of, cores_per_task
from launch.slurm.script import INDEX
from launch.slurm_programs import require
from megakernel.config import (
    Config,
    UserError,
    check_recorded_run,
    data_parallel_size,
    load,
    to_yaml,
)
from megakernel.config.cluster import Cluster

if TYPE_CHECKING:
    from launch.slurm.job_folder import Job
    from launch.slurm.submission import Request

HELP = "train or up-train a configuration as a job of a Slurm cluster, or run another command there"
EXAMPLE = "megakernel submit configs/demo.yaml training.steps=100 -N 2 -G 8 -t 12:00:00"

COMMANDS = ("prepare", "evaluate", "generate", "reshape", "export", "import", "bench")
"""What can be submitted beside training: `megakernel submit [options] -- evaluate runs/demo`."""

_OWN_TEMPLATE = ("prepare", "evaluate")
"""Those that have a file in slurm/ of their own name."""

MOST_MEMBERS = 1000
"""Runs of one array: Slurm's own MaxArraySize where a cluster sets none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_config_arguments(
        parser,
        "YAML file to train, in stages where it has an uptrain section, or behind `--` another command with its "
        "arguments: " + ", ".join(COMMANDS),
        f"keys to change, or the other command's arguments; in an array %{INDEX} stands for the member's index",
    )
    parser.add_argument("--name", help="of the run, and of the job")
    add_cluster_options(parser)
    add_chain_option(parser)
    parser.add_argument("--array", metavar="SPEC", help="a run for each index, such as 0-7 or 0-99%%4")
    add_job_options(parser)


def add_chain_option(parser: argparse.ArgumentParser) -> None:
    """Declare how many jobs go on with a run."""
    parser.add_argument(
        "--chain",
        type=Number(int, 1, MOST_MEMBERS),
        default=1,
        metavar="N",
        help="N jobs that go on one after the other",
    )


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Declare when the job starts, what is done with it, and told about it."""
    parser.add_argument(
        "--dependency",
        metavar="TYPE:RUN",
        help="what has to happen before, as sbatch takes it, with a run's name where it takes a job: afterok:demo",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    parser.add_argument(
        "--test-only", action="store_true", help="ask Slurm when it could start; submit nothing"
    )
    parser.add_argument("--wait", action="store_true", help="come back when it has ended; 1 where it failed")
    parser.add_argument("--follow", action="store_true", help="the same, and show its log meanwhile")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked here, then submit."""
    if args.config == "dev" and args.overrides:  # `dev bench` is `bench`
        args.config, *args.overrides = args.overrides
    if args.config in COMMANDS:
        return carry_out(_other_command(args), args)
    _refuse_commands(args.config, args.commands)
    return carry_out(_training(args), args)


def _refuse_commands(word: str, every_command: Collection[str]) -> None:
    if word in ("pretrain", "uptrain"):
        raise UserError(
            f"submit {word}: it trains anyway; give the configuration alone, megakernel submit CONFIG"
        )
    if word in every_command:
        raise UserError(
            f"submit {word} cannot be; give a YAML file to train, or one of {', '.join(COMMANDS)}"
        )


def carry_out(request: "Request", args: argparse.Namespace) -> int:
    """Do with the request what the options say."""
    from launch.slurm import submission

    if args.dry_run:
        print(request.text(), end="")
        return 0
    _needs_slurm(request, args)
    if args.test_only:
        print(submission.test(request))
        return 0
    jobs = submission.submit(request)
    runs = list(dict.fromkeys(str(member.run) for member in request.members))
    if args.json:
        print(json.dumps({"runs": runs, "jobs": [job.id for job in jobs], "submission": request.submission}))
    else:
        _tell(jobs, runs)
    if args.wait or args.follow or request.cluster.executor == "debug":
        return submission.wait(request, jobs, follow=args.follow)
    return 0


def _needs_slurm(request: "Request", args: argparse.Namespace) -> None:
    executor = request.cluster.executor
    if executor == "slurm":
        require("sbatch")
        return
    wanted = {
        "--test-only": args.test_only,
        "--chain": request.chain > 1,
        "--array": request.array is not None,
        "--dependency": bool(args.dependency),
    }
    for option, given in wanted.items():
        if given:
            raise UserError(f"{option} needs Slurm, and this cluster's executor is {executor}; leave it out")


def _tell(jobs: "list[Job]", runs: list[str]) -> None:
    named = jobs[0].id if len(jobs) == 1 else f"{jobs[0].id} ... {jobs[-1].id}"
    print(f"submitted {named}: {', '.join(runs[:3])}{' ...' if len(runs) > 3 else ''}")
    one = runs[0] if len(runs) == 1 else jobs[0].id.partition("_")[0]  # which all members of an array have
    print(f"  megakernel status {one}   megakernel logs -f {one}   megakernel cancel {one}")


def _training(args: argparse.Namespace) -> "Request":
    if args.chain > 1 and args.array:
        raise UserError(f"--chain {args.chain} cannot be beside --array {args.array}; leave one of them out")
    if args.chain > 1 and args.requeue is None:
        args.requeue = False  # the next link goes on
    overrides = [*args.overrides, *([f"run.name={args.name}"] if args.name else [])]
    runs: dict[int | None, Config] = {}
    for index in [None] if args.array is None else indices(args.array):
        here = overrides if index is None else [text.replace(INDEX, str(index)) for text in overrides]
        runs[index] = load(args.config, here)
    return training_request(runs, cluster_of(args), args.array, dependency=args.dependency, chain=args.chain)


def training_request(
    runs: Mapping[int | None, Config],
    cluster: Cluster,
    array: str | None = None,
    *,
    dependency: str | None = None,
    chain: int = 1,
) -> "Request":
    """A request for a run, or for an array of them by index; its members' names are those of their runs and the index.

    Raises UserError for a configuration that does not fit the processes, its data, or a run that is there.
    """
    from launch.slurm.submission import Member, Request, new_name

    first = next(iter(runs.values()))
    members = []
    for index, config in runs.items():
        if index is not None:
            named = config.run.model_copy(update={"name": f"{first.run.name}-{index}"})
            config = config.model_copy(update={"run": named})
        _check(config, cluster.world_size, has_data=not dependency)
        members.append(Member(config.run.folder, to_yaml(config), index))
    command = "pretrain" if first.uptrain is None else "uptrain"
    return Request(
        command,
        cluster,
        first.run.folder.absolute(),
        new_name(),
        [command, "$submission/config.yaml"],
        array,
        _waits_for(dependency) | cores_per_task(cluster),
        members,
        chain,
    )


def _waits_for(dependency: str | None) -> dict[str, str]:
    """sbatch's option; none where all that was to happen has happened."""
    from launch.slurm.states import with_jobs

    jobs = with_jobs(dependency) if dependency else ""
    return {"dependency": jobs} if jobs else {}


def _check(config: Config, world_size: int, has_data: bool) -> None:
    """Refuse what would fail on the cluster: processes, stages, the run that is there, and the data.

    has_data: whether that is there; the job that this one waits for may be to make it.
    """
    from data_pipeline.corpus import Corpora

    data_parallel_size(config, world_size)
    if config.uptrain is not None:
        from megakernel.uptraining.stages import check_stages  # which imports torch

        check_stages(config, world_size)
    check_recorded_run(config)
    # A login node is not the place to read a large corpus: the job holds it against its checksums.
    if has_data:
        Corpora(config.data, validation=config.training.eval_samples > 0, verify=False)


def indices(array: str) -> list[int]:
    """The members of an array as Slurm counts them: `0-7`, `1,3,5`, `0-10:2`, each with `%K` behind it."""
    found: list[int] = []
    parts, percent, at_a_time = array.partition("%")
    for part in parts.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part)
        sound = not percent or re.fullmatch("0*[1-9][0-9]{0,8}", at_a_time)
        if not match or not sound or int(match[3] or 1) < 1 or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--array {array} is no list of indices; write 0-7, 1,3,5 or 0-99%4")
        members = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        if (number := len(found) + len(members)) > MOST_MEMBERS:
            raise UserError(f"--array {array} asks for {number} jobs; give at most {MOST_MEMBERS} at once")
        found += members
    return found


def _other_command(args: argparse.Namespace) -> "Request":
    from launch.slurm.submission import Member, Request, new_name

    command = [args.config, *args.overrides]
    numbers = indices(args.array) if args.array else []
    # A command line that makes no sense is told now.
    args.parse([word.replace(INDEX, str(numbers[0])) for word in command] if numbers else command)
    cluster = cluster_of(args)
    name = args.name or f"{args.config}-{new_name()}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"--name {name} is no name of a folder; write letters, digits, dots and dashes")
    if args.chain != 1:
        raise UserError(f"--chain is for training; submit `{shlex.join(command)}` once for each job")
    if args.array and not any(INDEX in word for word in command):
        raise UserError(
            f"--array {args.array}: `{shlex.join(command)}` is the same for each index; write {INDEX} where they differ"
        )
    base = Path("runs") / name
    single = cluster.model_copy(
        update={"nodes": 1, "spares": 0, "sbatch": {**cluster.sbatch, "ntasks-per-node": 1}}
    )
    members = [Member(base.with_name(f"{name}-{number}"), index=number) for number in numbers] or [
        Member(base)
    ]
    options = _waits_for(args.dependency) | cores_per_task(single)
    template = args.config if args.config in _OWN_TEMPLATE else "command"
    return Request(template, single, base.absolute(), new_name(), command, args.array, options, members)
