"""What a batch script does besides starting processes: `python -m launch.slurm.attempt begin|end|port`."""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from launch import local
from launch.environment import FIRST_PORT, PORTS
from launch.exit_status import ExitStatus
from launch.messages import print_error
from launch.slurm_programs import SlurmRefused, ask
from megakernel.training import events
from megakernel.training.environment import recorded_variables

from .job_folder import JobFolder, read_settings
from .preflight import judge, read_timings
from .restarting import Decision, Start, TaskEnds, decide, task_ends
from .slow_nodes import summary

_ASKED = {
    signal.SIGTERM: ExitStatus.TERMINATED,
    signal.SIGUSR1: ExitStatus.STOPPED,
    signal.SIGUSR2: ExitStatus.STOPPED,
}
"""Requests that end the nodes' look at themselves, before there is anything to save -> what the job ends with."""


def begin(submission: Path, nodes: str) -> None:
    """Say that a start of the job has begun, and on which nodes; for the log, what will steer NCCL."""
    run = JobFolder(submission.parents[1])
    events.record(run.path, "started", nodes=nodes, submission=submission.name, step=run.saved_steps())
    print(f"== job {os.environ[events.JOB_VARIABLE]}, restart {restart()}, on {nodes}", flush=True)
    for name, value in recorded_variables(os.environ).items():
        if name.startswith(("NCCL_", "GLOO_", "MASTER_")):
            print(f"{name}={value}", flush=True)


def unfit_nodes(submission: Path, preflight: Path, nodes: str) -> dict[str, str]:
    """The nodes that the run should not start on -> why; each of them is an event."""
    run = JobFolder(submission.parents[1])
    names = ask("scontrol", "show", "hostnames", nodes).split()
    cluster = read_settings(submission).resources
    lines = preflight.read_text(encoding="utf-8").splitlines() if preflight.exists() else []
    for line in summary(read_timings(lines)):
        print(f"== {line}", flush=True)
    bad = judge(lines, names, cluster.gpus_per_node, cluster.preflight_seconds)
    for node, why in bad.items():
        events.record(run.path, "unfit", node=node, why=why)
        print(f"== node {node} is not fit: {why}", flush=True)
    return bad


def end(submission: Path, status: int, why: str | None = None) -> Decision:
    """Say how the processes ended, and decide whether the job starts again. why: where that is known."""
    run = JobFolder(submission.parents[1])
    cluster = read_settings(submission).resources
    step = run.saved_steps()
    allowed = cluster.max_restarts if cluster.requeue else 0
    ends = _ends(run, status)
    said = why or ends.death or _failure(run)
    decision = decide(_starts(run, ends.status, step), allowed, said, cluster.restart_on)
    events.record(run.path, "ended", status=ends.status, why=decision.why, step=step)
    print(f"== {decision.why}; saved up to step {step}", flush=True)
    return decision


def _starts(run: JobFolder, status: int, step: int) -> list[Start]:
    """Those of this job, the last of which has just ended with `status`, with `step` steps saved."""
    found, before = [], 0
    for event in run.events(os.environ[events.JOB_VARIABLE]):
        if event["event"] == "started":
            before = event.get("step", before)  # earlier versions did not record it
        elif event["event"] == "ended":
            found.append(Start(event["status"], event["step"] > before))
            before = event["step"]
    return [*found, Start(status, step > before)]


def _ends(run: JobFolder, status: int) -> TaskEnds:
    logs = run.logs(os.environ[events.JOB_VARIABLE], restart())
    saw = logs / "srun.err"
    killed = status == 128 + signal.SIGKILL
    last_words = "".join(map(_tail, sorted(logs.glob("rank_*.err")))) if killed else ""
    return task_ends(saw.read_text(errors="replace") if saw.exists() else "", status, last_words)


def _tail(log: Path) -> str:
    """The last 4 KiB."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        return file.read().decode(errors="replace")


def _failure(run: JobFolder) -> str | None:
    """What the first process that failed in this start of the job said."""
    number = restart()
    for event in run.events(os.environ[events.JOB_VARIABLE]):
        if event["event"] == "failed" and event.get("restart") == number:
            return f"rank {event['rank']} on {event['host']}: {event['why']}"
    return None


def _kept_off(submission: Path) -> list[str]:
    """The nodes that the job was not to have from the beginning, and those that were not fit in any of its starts."""
    job = os.environ[events.JOB_VARIABLE]
    found = [
        event["node"] for event in JobFolder(submission.parents[1]).events(job) if event["event"] == "unfit"
    ]
    given = read_settings(submission).resources.exclude
    return list(dict.fromkeys([*([given] if given else []), *found]))


def free_port(job: int) -> int:
    """A port of this node, the job's first, that nobody listens on: below Linux's ephemeral ports, jobs apart."""
    for port in (FIRST_PORT + (7 * job + offset) % PORTS for offset in range(PORTS)):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise SlurmRefused("every port from 20000 to 31999 is taken on this node")


def restart() -> int:
    """How often this job had been started before."""
    return int(os.environ.get(events.RESTART_VARIABLE, "0"))


def requeue(run: Path, without: Sequence[str] = ()) -> None:
    """Put the job back into the queue, to start on other nodes than `without`; Slurm then ends this script.

    without: all that the job is to keep off, for it replaces what the job was submitted with.
    """
    # It does so at once, and what follows should still be done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = os.environ[events.JOB_VARIABLE]
    try:
        if without:
            ask("scontrol", "requeuehold", job)
            ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(without)}")
            ask("scontrol", "release", job)
        else:
            ask("scontrol", "requeue", job)
    except SlurmRefused as error:
        print_error(f"the job could not be requeued ({error}); megakernel resume {run} goes on with the run")
        events.record(run, "not requeued", why=str(error))
    else:
        events.record(run, "requeued", without=list(without) or None)


@dataclass(frozen=True)
class HereJob:
    """A job without Slurm, under the same rules: what submitit's local and debug executors pickle and call.

    Starts the processes, and again while they are interrupted.
    """

    submission: Path
    """Folder of the submission, absolute."""

    def __call__(self) -> int:
        """Exit status of the last start."""
        from submitit import JobEnvironment  # which takes its time to import

        settings = read_settings(self.submission)
        run, cluster = self.submission.parents[1], settings.resources
        command = [word.replace("$submission", str(self.submission)) for word in settings.command]
        os.environ.update(cluster.environment)
        os.environ[events.JOB_VARIABLE] = JobEnvironment().job_id
        for number in count():
            os.environ[events.RESTART_VARIABLE] = str(number)
            begin(self.submission, "this machine")
            logs = JobFolder(run).logs(os.environ[events.JOB_VARIABLE], number)
            nproc = cluster.tasks_per_node if settings.trains else 1
            status = local.run_ranks([sys.executable, "-m", "launch.cli", *command], nproc, logs)
            if not end(self.submission, status).restart:
                break
            events.record(run, "requeued")
        return status


def main() -> int:
    """Exit status: that of the processes; of `begin` 0 where they can start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("moment", choices=("begin", "end", "port"))
    parser.add_argument("submission", type=Path, nargs="?")
    parser.add_argument("--preflight", type=Path, help="what the nodes found")
    parser.add_argument("--status", type=int, default=0, help="of srun")
    args = parser.parse_args()
    if args.moment == "port":
        print(free_port(int(os.environ["SLURM_JOB_ID"])))
        return ExitStatus.DONE
    run = args.submission.parents[1]
    if args.moment == "end":
        if end(args.submission, args.status).restart:
            requeue(run)
        return args.status
    nodes = os.environ["SLURM_JOB_NODELIST"]
    begin(args.submission, nodes)
    if (asked := _ASKED.get(args.status - 128)) is not None:
        if end(args.submission, asked).restart:
            requeue(run)
        return asked
    bad = unfit_nodes(args.submission, args.preflight, nodes) if args.preflight else {}
    if not bad:
        return ExitStatus.DONE
    # What happens to most of several nodes is not the nodes' fault, and without them there may be nowhere to run.
    all_nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    is_theirs = all_nodes == 1 or 2 * len(bad) <= all_nodes
    status = ExitStatus.UNFIT if is_theirs else ExitStatus.FAILED
    if end(args.submission, status, "; ".join(f"{node}: {why}" for node, why in bad.items())).restart:
        requeue(run, without=_kept_off(args.submission))
    return status


if __name__ == "__main__":
    sys.exit(main())
