"""What a batch script does besides starting processes: `python -m launch.slurm.attempt begin|end SUBMISSION`."""

import argparse
import os
import signal
import sys
from pathlib import Path

from launch.exit_status import ExitStatus
from launch.messages import print_error
from megakernel.training import events

from .errors import SlurmRefused
from .job_folder import JobFolder, read_settings
from .programs import ask
from .restarting import Decision, decide


def begin(submission: Path, nodes: str) -> None:
    """Say that a start of the job has begun, and on which nodes; for the log, what will steer NCCL."""
    run = JobFolder(submission.parents[1])
    events.record(run.path, "started", nodes=nodes, submission=submission.name)
    print(f"== job {os.environ[events.JOB_VARIABLE]}, restart {restart()}, on {nodes}", flush=True)
    for name in sorted(os.environ):
        if name.startswith(("NCCL_", "GLOO_", "MASTER_")):
            print(f"{name}={os.environ[name]}", flush=True)


def end(submission: Path, status: int) -> Decision:
    """Say how the processes ended, and decide whether the job starts again."""
    run = JobFolder(submission.parents[1])
    cluster = read_settings(submission).resources
    step = run.saved_step()
    earlier = [e["step"] for e in run.events(os.environ[events.JOB_VARIABLE]) if e["event"] == "ended"]
    allowed = cluster.max_restarts if cluster.requeue else 0
    decision = decide(status, restart(), allowed, [*earlier, step])
    why = decision.why
    if status == ExitStatus.FAILED:
        why = failure(run) or why
    events.record(run.path, "ended", status=status, why=why, step=step)
    print(f"== {why}; saved up to step {step}", flush=True)
    return Decision(decision.restart, why)


def failure(run: JobFolder) -> str | None:
    """What the first process that failed in this start of the job said."""
    job, number = os.environ[events.JOB_VARIABLE], restart()
    for event in run.events(job):
        if event["event"] == "failed" and event.get("restart") == number:
            return f"rank {event['rank']} on {event['host']}: {event['why']}"
    return None


def restart() -> int:
    """How often this job had been started before."""
    return int(os.environ.get(events.RESTART_VARIABLE, "0"))


def _requeue(run: Path) -> bool:
    """Put the job back into the queue; Slurm then ends this script."""
    # It does so at once, and the event should still be written.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ask("scontrol", "requeue", os.environ[events.JOB_VARIABLE])
    except SlurmRefused as error:
        print_error(f"the job could not be requeued ({error}); megakernel resume {run} goes on with the run")
        events.record(run, "not requeued", why=str(error))
        return False
    events.record(run, "requeued")
    return True


def main() -> int:
    """Exit status: that of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("moment", choices=("begin", "end"))
    parser.add_argument("submission", type=Path)
    parser.add_argument("--status", type=int, default=0)
    args = parser.parse_args()
    if args.moment == "begin":
        begin(args.submission, os.environ["SLURM_JOB_NODELIST"])
        return ExitStatus.DONE
    if end(args.submission, args.status).restart:
        _requeue(args.submission.parents[1])
    return args.status


if __name__ == "__main__":
    sys.exit(main())
