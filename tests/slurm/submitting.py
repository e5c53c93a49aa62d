"""Helpers that run commands on the cluster and wait for their effects."""

import contextlib
import io
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from launch.cli import main
from launch.slurm.job_folder import JobFolder
from tests.distributed import training_run


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


def megakernel(*words: str) -> CommandResult:
    """Run a command in this process; each of `words` is split at spaces."""
    out, err = io.StringIO(), io.StringIO()
    typed = [part for word in words for part in word.split()]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(typed)
        except SystemExit as left:
            status = int(left.code or 0)
    return CommandResult(status, out.getvalue(), err.getvalue())


def submit(*words: str) -> list[str]:
    """Submit, and return the ids of the jobs."""
    said = megakernel("submit --json", *words)
    assert said.status == 0, said.err
    return json.loads(said.out)["jobs"]


def status(run: str) -> dict:
    """The output of `megakernel status RUN --json`."""
    said = megakernel("status", run, "--json")
    assert said.status == 0, said.err
    return json.loads(said.out)


def until(what, seconds: float = 400.0):
    """Call `what` until its result is true, and return that."""
    deadline = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)
    return answer


def until_state(run: str, *states: str, seconds: float = 400.0) -> dict:
    """Wait until the run's job is in one of these states; return the status."""
    seen = []

    def there():
        seen.append(status(run))
        return seen[-1] if seen[-1]["state"] in states else None

    try:
        return until(there, seconds)
    except AssertionError:
        raise AssertionError(f"{run} never was {' or '.join(states)}\n{_whole_story(run)}") from None


def until_step(run: str, step: int) -> None:
    """Wait until the run has logged a step."""
    try:
        until(lambda: any(line["step"] >= step for line in metrics(run)))
    except AssertionError:
        raise AssertionError(f"{run} never reached step {step}\n{_whole_story(run)}") from None


def _whole_story(run: str) -> str:
    """The run's status and logs, and the state of the cluster."""
    nodes = subprocess.run(["sinfo", "--Node", "--long"], capture_output=True, text=True).stdout
    queue = subprocess.run(["squeue"], capture_output=True, text=True).stdout
    cluster = Path(os.environ["SLURM_CONF"]).parent / "log"
    files = [*Path("runs", run).glob("logs/**/*.*"), *cluster.glob("slurm*.log")]
    logs = "\n".join(f"== {file}\n{file.read_text(errors='replace')[-1500:]}" for file in files)
    return f"{status(run)}\n{nodes}{queue}{logs}"


def metrics(run: str) -> list[dict]:
    """The complete lines of a run's metrics.jsonl."""
    folder = Path("runs", run)
    return training_run.metrics(folder) if (folder / "metrics.jsonl").exists() else []


def losses(run: str) -> dict[int, float]:
    """Step -> loss."""
    return {line["step"]: line["train/loss"] for line in metrics(run) if "train/loss" in line}


def story(run: str, job: str | None = None) -> list[str]:
    """The names of a run's events, without `saved`."""
    return [name for event in JobFolder(Path("runs", run)).events(job) if (name := event["event"]) != "saved"]


def last(run: str, event: str) -> dict:
    """The newest event of this name."""
    return [one for one in JobFolder(Path("runs", run)).events() if one["event"] == event][-1]


def scontrol(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True, capture_output=True)


def process_of(job: str, rank: int) -> int:
    """Process id of a rank of a job."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()}
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_rank = wanted <= set((folder / "environ").read_bytes().split(b"\0"))
            if is_rank and b"pretrain" in (folder / "cmdline").read_bytes().split(b"\0"):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    # Its data workers have the same environment and command.
    found = [process for process, parent in parents.items() if parent not in parents]
    assert len(found) == 1, f"rank {rank} of job {job}: processes {found}"
    return found[0]


def kill(job: str, rank: int, number: int) -> None:
    """Signal one rank of a job."""
    os.kill(process_of(job, rank), number)


def start_slurmd(node: str) -> None:
    subprocess.run(["slurmd", "-N", node], check=True)


def node_states() -> dict[str, str]:
    """Node -> its state, and the reason that an administrator or Slurm gave for it."""
    words = ["sinfo", "--noheader", "--Node", "--format=%N %T (%E)"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return dict(line.split(maxsplit=1) for line in shown.splitlines())


def take_jobs_again(node: str) -> None:
    """Kill all that is left of the node, start its slurmd again, and return the node to service."""
    crash(node)
    start_slurmd(node)
    until(lambda: "*" not in node_states()[node], seconds=60)
    if not takes_jobs(node_states()[node]):
        scontrol("update", f"NodeName={node}", "State=RESUME")
    until(lambda: takes_jobs(node_states()[node]), seconds=60)


def takes_jobs(state: str) -> bool:
    """Whether a node in this state answers and takes jobs; `planned` and a trailing - mean that a job waits for it."""
    return state.partition(" ")[0].rstrip("-") in ("idle", "mixed", "allocated", "completing", "planned")


def crash(node: str) -> None:
    """Simulate a power cut of a node: end its slurmd, its slurmstepds and all their processes at once."""
    gone: set[int] = set()
    # Stop all first: a process that sees another one killed could otherwise report it before it is killed itself.
    while new := {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _is_on(node, folder)} - gone:
        _signal(new, signal.SIGSTOP)
        gone |= new
    _signal(gone, signal.SIGKILL)


def _is_on(node: str, process: Path) -> bool:
    """Whether a process belongs to a node: by its environment, as slurmd by its command, as slurmstepd by its log."""
    with contextlib.suppress(OSError):
        if f"SLURMD_NODENAME={node}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
        words = (process / "cmdline").read_bytes().split(b"\0")
        if words[0].endswith(b"slurmd") and node.encode() in words:
            return True
        return any(
            os.path.realpath(file).endswith(f"/slurmd.{node}.log") for file in (process / "fd").iterdir()
        )
    return False


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
