"""What a batch script does before and after srun: `python -m launch.slurm.attempt begin|end|port`."""

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launch import local, notifications
from launch.environment import free_port
from launch.exit_status import ExitStatus
from launch.messages import error_lines, print_error
from launch.slurm_programs import SlurmRefused, check_output
from megakernel.config.notify import Event
from megakernel.training import events
from megakernel.training.environment import recorded_variables

from .job_folder import JobFolder, read_settings
from .preflight import read_timings, unfit_nodes
from .restarting import FAILED_NODE, RESTART_IN_JOB, SILENT_NODE, Start, decide, task_ends
from .slow_nodes import summary

_STOP_SIGNALS: dict[int, ExitStatus] = {
    signal.SIGTERM: ExitStatus.TERMINATED,
    signal.SIGUSR1: ExitStatus.STOPPED,
    signal.SIGUSR2: ExitStatus.STOPPED,
}
"""Signal that ended the preflight, before there was anything to save -> exit status of the start."""

NODES = "nodes"
"""File in a start's log folder: the usable nodes, comma-separated; the first ones run the processes."""

TRAINING_NODES = "training_nodes"
"""File next to it: those that run the processes."""

_ERROR = error_lines(" ")[0].rstrip() + " "
"""Prefix of a command's error lines."""

_POLL_SECONDS = 5
_RETRY_SECONDS = 120


@dataclass(frozen=True)
class End:
    """How a start ended."""

    status: int
    """Exit status of the processes."""

    restarts: bool
    """Whether the job restarts."""

    why: str
    """How the processes ended, and why a job that could restart does not."""


class Attempt:
    """One start of a job, identified by this process's environment variables."""

    def __init__(self, submission: Path):
        """submission: folder of the submission, inside the run's folder."""
        self.submission = submission
        self.run = JobFolder(submission.parents[1])
        settings = read_settings(submission)
        self.cluster = settings.resources
        self.max_restarts = self.cluster.max_restarts if self.cluster.requeues(settings.chain) else 0
        self.job = os.environ[events.JOB_VARIABLE]
        self.restart = int(os.environ.get(events.RESTART_VARIABLE, "0"))
        """How many starts of the job came before this one."""
        self.logs = self.run.logs(self.job, self.restart)

    def record_start(self, nodes: str) -> None:
        """Record that this start has begun and on which nodes; print the NCCL_, GLOO_ and MASTER_ variables.

        If Slurm has started the job again by itself, that is told now.
        """
        step = self.run.saved_steps()
        if self._was_restarted_by_slurm():
            why = "Slurm started it again, after the loss of a node, a preemption without grace or a request"
            with self.telling("restart", f"{why}; it continues after step {step}"):
                pass
        events.record(self.run.path, "started", nodes=nodes, submission=self.submission.name, step=step)
        print(f"== job {self.job}, restart {self.restart}, on {nodes}", flush=True)
        for name, value in recorded_variables(os.environ).items():
            if name.startswith(("NCCL_", "GLOO_", "MASTER_")):
                print(f"{name}={value}", flush=True)

    def telling(self, event: Event, reason: str) -> AbstractContextManager[None]:
        """Tell an event as the job's `notify` says, while the block runs."""
        message = notifications.Notification.of(
            event, self.run.path, self.run.training, reason, self.logs, job=self.job, restart=self.restart
        )
        return notifications.sending(
            self.cluster.notify, message, lambda line: print(f"== {line}", flush=True)
        )

    def telling_end(self, end: End) -> AbstractContextManager[None]:
        """Tell how this start ended, and what comes next."""
        next_in_chain = end.status == ExitStatus.STOPPED and self._chain_continues()
        if end.restarts or next_in_chain:
            event: Event = "preemption" if end.status == ExitStatus.STOPPED else "restart"
            then = "the next job of the chain continues" if next_in_chain else "the job restarts"
            return self.telling(event, f"{end.why}; {then} after step {self.run.saved_steps()}")
        ended = end.status in (ExitStatus.DONE, ExitStatus.TERMINATED)
        return self.telling("end" if ended else "failure", end.why)

    def record_end(self, status: int, preempted: bool = False) -> End:
        """Record how the processes ended, and decide whether the job restarts.

        status: that of srun. preempted: whether another job needs the nodes, so that TERM did not come from the user.
        """
        step = self.run.saved_steps()
        # Slurm writes that a job exceeded its memory into the logs of the processes that it kills.
        step_stderr = "".join(self._stderr_tails()) if status == 128 + signal.SIGKILL else ""
        ends = task_ends(self._srun_errors(), status, step_stderr)
        if preempted and ends.status == ExitStatus.TERMINATED:
            ends = replace(ends, status=ExitStatus.STOPPED)
        error_text = ends.death or self._first_error()
        decision = decide(
            self._starts(ends.status, step), self.max_restarts, error_text, self.cluster.restart_on
        )
        events.record(
            *(self.run.path, "ended"),
            status=ends.status,
            why=decision.why,
            step=step,
            restarts=decision.restart or None,
        )
        print(f"== {decision.why}; saved up to step {step}", flush=True)
        return End(ends.status, decision.restart, decision.why)

    def begin_start(self, status: int, checked_nodes: str) -> int:
        """Record the start, and write the fit nodes to the file NODES; returns 0 if they are enough.

        status: exit status of the preflight. checked_nodes: the nodes that it ran on, comma-separated.
        """
        self.record_start(check_output("scontrol", "show", "hostlist", checked_nodes).strip())
        if (requested := _STOP_SIGNALS.get(status - 128)) is not None:
            return requested
        nodes = checked_nodes.split(",")
        unfit = self._unfit_nodes(nodes)
        fit = [node for node in nodes if node not in unfit]
        possible = [count for count in self.cluster.node_counts if count <= len(fit)]
        if possible:
            if self.cluster.survives_losses:
                # The job survives the loss of any node but this script's, which is therefore used last.
                fit.sort(key=os.environ["SLURMD_NODENAME"].__eq__)
            if self.cluster.fewer_nodes:
                idle = f"; {len(fit) - possible[-1]} more are idle" if len(fit) > possible[-1] else ""
                print(f"== nodes that train: {possible[-1]} (of {self.cluster.node_range}){idle}", flush=True)
            (self.logs / NODES).write_text(",".join(fit), encoding="utf-8")
            (self.logs / TRAINING_NODES).write_text(",".join(fit[: possible[-1]]), encoding="utf-8")
            return ExitStatus.DONE
        # If most of several nodes are unfit, the cause is elsewhere, and excluding them may leave no node to run on.
        return ExitStatus.UNFIT if len(nodes) == 1 or 2 * len(unfit) <= len(nodes) else ExitStatus.FAILED

    def finish_start(self, status: int) -> int:
        """Record the end of this start, requeue the job if it should restart, and return the script's exit status.

        Also 0 if the run was saved and ended on request, or for the next job of its chain: Slurm then calls the job
        COMPLETED, in its mail too, and starts jobs that wait for it with afterok.
        """
        end = self.record_end(status, self._is_preempted())
        with self.telling_end(end):  # meanwhile the job is requeued, which may have to be quick
            if end.restarts and self._restarts_in_job(end):
                return RESTART_IN_JOB
        chain_continues = end.status == ExitStatus.STOPPED and self._chain_continues()
        return ExitStatus.DONE if chain_continues or end.status == ExitStatus.TERMINATED else status

    def _restarts_in_job(self, end: End) -> bool:
        """Whether the script starts the run again; otherwise the job has been requeued, if Slurm lets it."""
        with suppress(SlurmRefused):  # Slurm cannot be asked for the nodes' states
            if end.status != ExitStatus.STOPPED and self._has_enough_nodes():
                return True
            if SILENT_NODE in self._srun_errors():
                await_silent_nodes(self.run.path)
        excluded = self._excluded_nodes() if end.status == ExitStatus.UNFIT else ()
        if (refusal := requeue(self.run.path, self.job, excluded)) is not None:
            with self.telling("failure", refusal):
                pass
        return False

    def _chain_continues(self) -> bool:
        """Whether another job of the submission continues the run after this one."""
        chain = [job.id for job in self.run.jobs() if job.submission == self.submission.name]
        return bool(chain) and chain[-1] != self.job

    def _was_restarted_by_slurm(self) -> bool:
        """Whether an earlier start of the job did not say that it restarts."""
        names = ("started", "ended")
        earlier = [event for event in self.run.events(self.job) if event["event"] in names]
        return bool(earlier) and not (earlier[-1]["event"] == "ended" and earlier[-1].get("restarts"))

    def _is_preempted(self) -> bool:
        """Whether Slurm is ending this job for another one, and the user has not asked to end it too.

        With `PreemptMode=CANCEL` it sends TERM, as for a cancelled job, and calls both COMPLETING; only a preempted one
        has a time of preemption. Slurm requeues it when asked to before KillWait has passed.
        """
        names = [event["event"] for event in self.run.events(self.job)]
        begun = max((index for index, name in enumerate(names) if name == "started"), default=0)
        if "cancelled" in names[begun:]:
            return False
        with suppress(SlurmRefused):  # then it is as if the user had cancelled the job
            shown = check_output("scontrol", "show", "job", self.job)
            return re.search(r"\bPreemptTime=\d", shown) is not None
        return False

    def _unfit_nodes(self, nodes: Sequence[str]) -> dict[str, str]:
        """The nodes that the preflight found unfit -> why; each is recorded as an event."""
        preflight = self.logs / "preflight.jsonl"
        lines = (
            preflight.read_text(encoding="utf-8", errors="replace").splitlines() if preflight.exists() else []
        )
        for line in summary(read_timings(lines)):
            print(f"== {line}", flush=True)
        unfit = unfit_nodes(lines, nodes, self.cluster.gpus_per_node, self.cluster.preflight_seconds)
        for node, why in unfit.items():
            events.record(self.run.path, "unfit", node=node, why=why)
            print(f"== node {node} is not fit: {why}", flush=True)
        return unfit

    def _excluded_nodes(self) -> list[str]:
        """The nodes that the submission excludes and those that were unfit in any start."""
        unfit = [event["node"] for event in self.run.events(self.job) if event["event"] == "unfit"]
        return list(dict.fromkeys([*filter(None, [self.cluster.exclude]), *unfit]))

    def _starts(self, status: int, step: int) -> list[Start]:
        """All starts of this job; the last one has just ended with `status` and `step` saved steps."""
        starts, before = [], 0
        for event in self.run.events(self.job):
            if event["event"] == "started":
                before = event.get("step", before)  # earlier versions did not record it
            elif event["event"] == "ended":
                starts.append(Start(event["status"], event["step"] > before))
                before = event["step"]
        return [*starts, Start(status, step > before)]

    def _srun_errors(self) -> str:
        log = self.logs / "srun.err"
        return log.read_text(errors="replace") if log.exists() else ""

    def _stderr_tails(self) -> Iterator[str]:
        """The last 4 KiB of each process's stderr; without Slurm, of all its output."""
        for log in sorted(self.logs.glob("rank_*.err")) or sorted(self.logs.glob("rank_*.log")):
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - 4096))
                yield file.read().decode(errors="replace")

    def _first_error(self) -> str | None:
        """Why this start failed: unfit nodes, else the first failed rank, else the last error line on stderr."""
        own_events = [event for event in self.run.events(self.job) if event.get("restart") == self.restart]
        if unfit := [f"{event['node']}: {event['why']}" for event in own_events if event["event"] == "unfit"]:
            return "; ".join(unfit)
        for event in own_events:
            if event["event"] == "failed":
                return f"rank {event['rank']} on {event['host']}: {event['why']}"
        errors = [
            line for tail in self._stderr_tails() for line in tail.splitlines() if line.startswith(_ERROR)
        ]
        return errors[-1].removeprefix(_ERROR) if errors else None

    def _has_enough_nodes(self) -> bool:
        """Whether enough nodes are left to restart within the job; writes them to NODES for the next start."""
        nodes_file = self.logs / NODES
        if not self.cluster.survives_losses or not nodes_file.exists():
            return False
        srun_errors = self._srun_errors()
        lost = _silent_nodes() if SILENT_NODE in srun_errors or FAILED_NODE in srun_errors else []
        left = [node for node in nodes_file.read_text(encoding="utf-8").split(",") if node not in lost]
        if lost:
            events.record(self.run.path, "lost", nodes=lost)
            print(f"== {', '.join(lost)} does not answer; nodes left: {len(left)}", flush=True)
        nodes_file.write_text(",".join(left), encoding="utf-8")
        return len(left) >= self.cluster.node_counts[0]


def requeue(run: Path, job: str, excluded: Sequence[str] = ()) -> str | None:
    """Requeue the job; Slurm then ends this script. Returns why it cannot be requeued, or None.

    excluded: all nodes to exclude; if not empty, it replaces the exclusions of the submission.
    """
    # Slurm ends this script at once, but the event below should still be recorded.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if excluded:
            _retry_scontrol("requeuehold", job)
            _retry_scontrol("update", f"JobId={job}", f"ExcNodeList={','.join(excluded)}")
            _retry_scontrol("release", job)
        else:
            _retry_scontrol("requeue", job)
    except SlurmRefused as error:
        refusal = f"the job could not be requeued ({error}); megakernel resume {run} continues the run"
        print_error(refusal)
        events.record(run, "not requeued", why=str(error))
        return refusal
    events.record(run, "requeued", without=list(excluded) or None)
    return None


def _retry_scontrol(*words: str) -> None:
    """Retry scontrol for two minutes: while its controller restarts, Slurm refuses everything."""
    for _ in range(0, _RETRY_SECONDS, _POLL_SECONDS):
        try:
            check_output("scontrol", *words)
            return
        except SlurmRefused as error:
            print(f"== {error}; retrying", flush=True)
            time.sleep(_POLL_SECONDS)
    check_output("scontrol", *words)


def await_silent_nodes(run: Path) -> None:
    """Wait until Slurm marks the job's unresponsive nodes as down and requeues the job by itself.

    Requeuing the job sooner gains nothing, as the job holds those nodes until then. And Slurm 22.05 would start it
    without its GPUs, and lose them for all jobs until slurmctld restarts. Returns early if the nodes answer.
    """
    silent = _silent_nodes()
    if not silent:
        return
    print(f"== waiting until Slurm gives up {', '.join(silent)} and restarts the job", flush=True)
    events.record(run, "waits", nodes=silent)
    # SlurmdTimeout counts from when Slurm has noticed.
    for _ in range(0, 3 * _slurmd_timeout(), _POLL_SECONDS):
        states = _dead_nodes()
        if all(state.startswith("down") for state in states.values()):
            # Slurm requeues the job now and ends this script, but not for a job with spare nodes (--no-kill).
            time.sleep(3 * _POLL_SECONDS if states else 0)
            return
        time.sleep(_POLL_SECONDS)


def _silent_nodes() -> list[str]:
    """The job's nodes that do not answer; waits for a while, as Slurm may not have noticed yet."""
    # Slurm pings each node three times within SlurmdTimeout.
    for _ in range(0, _slurmd_timeout() // 2, _POLL_SECONDS):
        if dead := sorted(_dead_nodes()):
            return dead
        time.sleep(_POLL_SECONDS)
    return []


def _dead_nodes() -> dict[str, str]:
    """Node that does not answer -> state: `down*` once Slurm has given it up, until then its last one."""
    command = ("sinfo", "--noheader", "--dead", "--Node", "--format=%N %T", "--nodes")
    lines = check_output(*command, os.environ["SLURM_JOB_NODELIST"]).splitlines()
    return dict(line.split() for line in lines)


def _slurmd_timeout() -> int:
    """SlurmdTimeout: seconds after which Slurm marks a node that does not answer as down; 0: never."""
    match = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", check_output("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match is not None else 0


def run_here(submission: Path, gpus: str | None = None) -> int:
    """Run a job without Slurm under the same rules; submitit's local and debug executors call it.

    Starts the processes, again if they should restart, and returns the exit status of the last start.
    submission: folder of the submission, absolute. gpus: CUDA_VISIBLE_DEVICES for the job; None: as it is.
    """
    from submitit import JobEnvironment  # slow to import

    settings = read_settings(submission)
    command = [word.replace("$submission", str(submission)) for word in settings.command]
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    os.environ.update(settings.resources.environment)
    path = [str(submission / "code"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, path)), PYTHONSAFEPATH="1")
    os.environ[events.JOB_VARIABLE] = JobEnvironment().job_id
    number = 0
    while True:
        os.environ[events.RESTART_VARIABLE] = str(number)
        attempt = Attempt(submission)
        attempt.record_start("this machine")
        nproc = attempt.cluster.tasks_per_node if settings.trains else 1
        try:
            with _time_limit(attempt.cluster.minutes, attempt.cluster.signal_delay):
                status = local.run_ranks([sys.executable, "-m", "launch.cli", *command], nproc, attempt.logs)
        except TimeoutError as error:
            step, failed = attempt.run.saved_steps(), ExitStatus.FAILED
            events.record(attempt.run.path, "ended", status=failed, why=str(error), step=step)
            with attempt.telling("failure", str(error)):
                return failed
        end = attempt.record_end(status)
        with attempt.telling_end(end):
            pass
        if not end.restarts:
            return status
        events.record(attempt.run.path, "requeued")
        number += 1


@contextmanager
def _time_limit(minutes: float | None, delay: float) -> Iterator[None]:
    """Act as Slurm at the time limit of a start: `delay` seconds before, USR2; at the limit, raise TimeoutError.

    A limit that is not longer than the delay sends no USR2: at the start it would end processes that cannot save yet.
    """
    if minutes is None:
        yield
        return
    limit = 60 * minutes
    is_signaled = limit <= delay

    def on_alarm(_number: int, _frame: object) -> None:
        nonlocal is_signaled
        if is_signaled:
            raise TimeoutError("did not end before its time limit")
        is_signaled = True
        os.kill(os.getpid(), signal.SIGUSR2)

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit if is_signaled else limit - delay, delay)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def main() -> int:
    """`end` returns the script's exit status; `begin` returns 0 if processes can start, else the --status for `end`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("begin", "end", "port"))
    parser.add_argument("submission", type=Path, nargs="?")
    parser.add_argument("--nodes", default="", help="nodes that the preflight ran on, comma-separated")
    parser.add_argument("--status", type=int, default=0, help="exit status of the preflight, srun or `begin`")
    args = parser.parse_args()
    if args.action == "port":
        print(free_port(int(os.environ["SLURM_JOB_ID"])))
        return ExitStatus.DONE
    attempt = Attempt(args.submission)
    if args.action == "end":
        return attempt.finish_start(args.status)
    if args.nodes:
        return attempt.begin_start(args.status, args.nodes)
    attempt.record_start(os.environ["SLURM_JOB_NODELIST"])
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
