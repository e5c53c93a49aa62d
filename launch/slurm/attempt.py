"""The steps of a batch script besides starting processes: `python -m launch.slurm.attempt begin|end|port`."""

import argparse
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from launch import local
from launch.environment import FIRST_PORT, PORTS
from launch.exit_status import ExitStatus
from launch.messages import error_lines, print_error
from launch.slurm_programs import SlurmRefused, ask
from megakernel.training import events
from megakernel.training.environment import recorded_variables

from .job_folder import JobFolder, read_settings
from .preflight import judge, read_timings
from .restarting import FAILED_NODE, GOES_ON, SILENT_NODE, Start, TaskEnds, decide, task_ends
from .slow_nodes import summary

_ASKED: dict[int, ExitStatus] = {
    signal.SIGTERM: ExitStatus.TERMINATED,
    signal.SIGUSR1: ExitStatus.STOPPED,
    signal.SIGUSR2: ExitStatus.STOPPED,
}
"""Requests that end the nodes' look at themselves, before there is anything to save -> what the job ends with."""


class Attempt:
    """One start of a job, told by the variables of the process that this is."""

    def __init__(self, submission: Path):
        """submission: folder of what was submitted, in that of the run."""
        self.submission = submission
        self.run = JobFolder(submission.parents[1])
        self.cluster = read_settings(submission).resources
        self.job = os.environ[events.JOB_VARIABLE]
        self.restart = int(os.environ.get(events.RESTART_VARIABLE, "0"))
        """How often the job had been started before."""
        self.logs = self.run.logs(self.job, self.restart)

    def begin(self, nodes: str) -> None:
        """Say that the start has begun, and on which nodes; for the log, what will steer NCCL."""
        step = self.run.saved_steps()
        events.record(self.run.path, "started", nodes=nodes, submission=self.submission.name, step=step)
        print(f"== job {self.job}, restart {self.restart}, on {nodes}", flush=True)
        for name, value in recorded_variables(os.environ).items():
            if name.startswith(("NCCL_", "GLOO_", "MASTER_")):
                print(f"{name}={value}", flush=True)

    def end(self, status: int) -> tuple[int, bool]:
        """Say how the processes ended: what they ended with, and whether the job starts again. status: of srun."""
        step = self.run.saved_steps()
        allowed = self.cluster.max_restarts if self.cluster.requeue else 0
        ends = self._ends(status)
        said = ends.death or self._failure()
        decision = decide(self._starts(ends.status, step), allowed, said, self.cluster.restart_on)
        events.record(self.run.path, "ended", status=ends.status, why=decision.why, step=step)
        print(f"== {decision.why}; saved up to step {step}", flush=True)
        return ends.status, decision.restart

    def enter(self, status: int, looked: str) -> int:
        """Begin, and write down the nodes of this start: of those that `looked` at themselves the fit ones."""
        self.begin(ask("scontrol", "show", "hostlist", looked).strip())
        if (asked := _ASKED.get(status - 128)) is not None:
            return asked
        nodes = looked.split(",")
        bad = self._unfit_nodes(nodes)
        fit = [node for node in nodes if node not in bad]
        if len(fit) >= self.cluster.nodes:
            if self.cluster.spares:
                # Slurm ends the job with the node of this script. Any other can be replaced: this one is used last.
                fit.sort(key=os.environ["SLURMD_NODENAME"].__eq__)
            (self.logs / NODES).write_text(",".join(fit), encoding="utf-8")
            return ExitStatus.DONE
        # What happens to most of several nodes is not the nodes' fault, and without them there may be nowhere to run.
        return ExitStatus.UNFIT if len(nodes) == 1 or 2 * len(bad) <= len(nodes) else ExitStatus.FAILED

    def leave(self, status: int) -> int:
        """End, and put the job back into the queue where that is due; the script's exit status.

        0 too where the run was saved and is left as somebody wanted it: ended on request, or to the next job of its
        chain. Slurm then calls the job COMPLETED, tells that by mail, and starts what waits for it with afterok.
        """
        ended, starts_again = self.end(status)
        if starts_again:
            with suppress(SlurmRefused):  # which does not say then how its nodes are
                if ended != ExitStatus.STOPPED and self._goes_on():
                    return GOES_ON
                if SILENT_NODE in self._srun_said():
                    await_silent_nodes(self.run.path)
            requeue(self.run.path, self.job, self._kept_off() if ended == ExitStatus.UNFIT else ())
        chain = [job.id for job in self.run.jobs() if job.submission == self.submission.name]
        goes_on = ended == ExitStatus.STOPPED and chain[-1] != self.job
        return ExitStatus.DONE if goes_on or ended == ExitStatus.TERMINATED else status

    def _unfit_nodes(self, nodes: Sequence[str]) -> dict[str, str]:
        """The nodes that the run should not start on, by what they have found -> why; each of them is an event."""
        preflight = self.logs / "preflight.jsonl"
        lines = (
            preflight.read_text(encoding="utf-8", errors="replace").splitlines() if preflight.exists() else []
        )
        for line in summary(read_timings(lines)):
            print(f"== {line}", flush=True)
        bad = judge(lines, nodes, self.cluster.gpus_per_node, self.cluster.preflight_seconds)
        for node, why in bad.items():
            events.record(self.run.path, "unfit", node=node, why=why)
            print(f"== node {node} is not fit: {why}", flush=True)
        return bad

    def _kept_off(self) -> list[str]:
        """The nodes that the job was not to have from the beginning, and those that were not fit in any start."""
        found = [event["node"] for event in self.run.events(self.job) if event["event"] == "unfit"]
        return list(dict.fromkeys([*filter(None, [self.cluster.exclude]), *found]))

    def _starts(self, status: int, step: int) -> list[Start]:
        """The starts of this job; the last one has just ended with `status`, with `step` steps saved."""
        found, before = [], 0
        for event in self.run.events(self.job):
            if event["event"] == "started":
                before = event.get("step", before)  # earlier versions did not record it
            elif event["event"] == "ended":
                found.append(Start(event["status"], event["step"] > before))
                before = event["step"]
        return [*found, Start(status, step > before)]

    def _ends(self, status: int) -> TaskEnds:
        last_words = "".join(self._tails()) if status == 128 + signal.SIGKILL else ""
        return task_ends(self._srun_said(), status, last_words)

    def _srun_said(self) -> str:
        saw = self.logs / "srun.err"
        return saw.read_text(errors="replace") if saw.exists() else ""

    def _tails(self) -> Iterator[str]:
        """The last 4 KiB that each process has written on stderr."""
        for log in sorted(self.logs.glob("rank_*.err")):
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - 4096))
                yield file.read().decode(errors="replace")

    def _failure(self) -> str | None:
        """Why this start failed: unfit nodes, else the error of the first process that failed.

        Of a command that trains nothing the line that it ended with.
        """
        told = [event for event in self.run.events(self.job) if event.get("restart") == self.restart]
        if unfit := [f"{event['node']}: {event['why']}" for event in told if event["event"] == "unfit"]:
            return "; ".join(unfit)
        for event in told:
            if event["event"] == "failed":
                return f"rank {event['rank']} on {event['host']}: {event['why']}"
        said = [line for tail in self._tails() for line in tail.splitlines() if line.startswith(_ERROR)]
        return said[-1].removeprefix(_ERROR) if said else None

    def _goes_on(self) -> bool:
        """Whether the job has enough nodes left, which are then written down for its next start."""
        used = self.logs / NODES
        if not self.cluster.spares or not used.exists():
            return False
        said = self._srun_said()
        lost = _silent_nodes() if SILENT_NODE in said or FAILED_NODE in said else []
        left = [node for node in used.read_text(encoding="utf-8").split(",") if node not in lost]
        if lost:
            events.record(self.run.path, "lost", nodes=lost)
            print(f"== {', '.join(lost)} does not answer; nodes left: {len(left)}", flush=True)
        used.write_text(",".join(left), encoding="utf-8")
        return len(left) >= self.cluster.nodes


_ERROR = error_lines(" ")[0].rstrip() + " "
"""Prefix of lines that say why a command ended."""


def free_port(job: int) -> int:
    """A port of this node, the job's first, that nobody listens on: below Linux's ephemeral ports, jobs apart."""
    for port in (FIRST_PORT + (7 * job + offset) % PORTS for offset in range(PORTS)):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise SlurmRefused("every port from 20000 to 31999 is taken on this node")


def requeue(run: Path, job: str, without: Sequence[str] = ()) -> None:
    """Put the job back into the queue, to start on other nodes than `without`; Slurm then ends this script.

    without: all that the job is to keep off, for it replaces what the job was submitted with.
    """
    # It does so at once, and what follows should still be done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if without:
            _insist("requeuehold", job)
            _insist("update", f"JobId={job}", f"ExcNodeList={','.join(without)}")
            _insist("release", job)
        else:
            _insist("requeue", job)
    except SlurmRefused as error:
        print_error(f"the job could not be requeued ({error}); megakernel resume {run} goes on with the run")
        events.record(run, "not requeued", why=str(error))
    else:
        events.record(run, "requeued", without=list(without) or None)


def _insist(*words: str) -> None:
    """Have scontrol do it, for two minutes and more: while its controller is restarted, Slurm refuses everything."""
    for _ in range(0, _INSIST_SECONDS, _LOOK_SECONDS):
        try:
            ask("scontrol", *words)
            return
        except SlurmRefused as error:
            print(f"== {error}; tries again", flush=True)
            time.sleep(_LOOK_SECONDS)
    ask("scontrol", *words)


def await_silent_nodes(run: Path) -> None:
    """Wait until Slurm has given up the job's nodes that do not answer, and starts the job again by itself.

    A job that is put back sooner starts no sooner, for it holds those nodes until then. But Slurm 22.05 then starts it
    without its GPUs, and takes them from all jobs until slurmctld restarts. Returns where the nodes answer.
    """
    silent = _silent_nodes()
    if not silent:
        return
    print(f"== waits until Slurm gives up {', '.join(silent)}, then starts again", flush=True)
    events.record(run, "waits", nodes=silent)
    # Its patience begins when it has noticed.
    for _ in range(0, 3 * _patience(), _LOOK_SECONDS):
        states = _dead_nodes()
        if all(state.startswith("down") for state in states.values()):
            # Slurm puts the job back now, and ends this script; but not a job of spare nodes.
            time.sleep(3 * _LOOK_SECONDS if states else 0)
            return
        time.sleep(_LOOK_SECONDS)


def _silent_nodes() -> list[str]:
    """The job's nodes that do not answer, which Slurm may take some time to notice."""
    # It asks each node three times before it gives it up.
    for _ in range(0, _patience() // 2, _LOOK_SECONDS):
        if dead := sorted(_dead_nodes()):
            return dead
        time.sleep(_LOOK_SECONDS)
    return []


def _dead_nodes() -> dict[str, str]:
    """State of those that do not answer: `down*` where Slurm has given them up, else what it was."""
    lines = ask(*_DEAD, "--nodes", os.environ["SLURM_JOB_NODELIST"]).splitlines()
    return dict(line.split() for line in lines)


def _patience() -> int:
    """Seconds after which Slurm gives up a node that does not answer; 0: never."""
    shown = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return int(shown[1]) if shown is not None else 0


_DEAD = ("sinfo", "--noheader", "--dead", "--Node", "--format=%N %T")
_LOOK_SECONDS = 5
_INSIST_SECONDS = 120


NODES = "nodes"
"""File of a start with the nodes that can be used, those of the run first, separated by commas."""


def run_here(submission: Path) -> int:
    """Run a job without Slurm, under the same rules: what submitit's local and debug executors pickle and call.

    Starts the processes, and again while they are interrupted; the exit status of the last start.
    submission: folder of the submission, absolute.
    """
    from submitit import JobEnvironment  # which takes its time to import

    settings = read_settings(submission)
    command = [word.replace("$submission", str(submission)) for word in settings.command]
    os.environ.update(settings.resources.environment)
    path = [str(submission / "code"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, path)), PYTHONSAFEPATH="1")
    os.environ[events.JOB_VARIABLE] = JobEnvironment().job_id
    number = 0
    while True:
        os.environ[events.RESTART_VARIABLE] = str(number)
        attempt = Attempt(submission)
        attempt.begin("this machine")
        nproc = attempt.cluster.tasks_per_node if settings.trains else 1
        status = local.run_ranks([sys.executable, "-m", "launch.cli", *command], nproc, attempt.logs)
        if not attempt.end(status)[1]:
            return status
        events.record(attempt.run.path, "requeued")
        number += 1


def main() -> int:
    """Exit status: that of the script; of `begin` 0 where the processes can start, else what `end` is to be told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("moment", choices=("begin", "end", "port"))
    parser.add_argument("submission", type=Path, nargs="?")
    parser.add_argument("--nodes", default="", help="that have looked at themselves, separated by commas")
    parser.add_argument("--status", type=int, default=0, help="of srun, or of `begin`")
    args = parser.parse_args()
    if args.moment == "port":
        print(free_port(int(os.environ["SLURM_JOB_ID"])))
        return ExitStatus.DONE
    attempt = Attempt(args.submission)
    if args.moment == "end":
        return attempt.leave(args.status)
    if args.nodes:
        return attempt.enter(args.status, args.nodes)
    attempt.begin(os.environ["SLURM_JOB_NODELIST"])
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
