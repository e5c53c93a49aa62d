"""Writes a page about what each event does to a run: `python -m tests.slurm.scenarios [--only WORD] [--out PAGE]`.

Each event happens to a job of two nodes on the local cluster, with the shipped settings. It needs the programs that
tests/slurm needs.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.page import machine_description, page_parser, write_page
from tests.slurm.conftest import CONFIG, LOCAL_CLUSTER, REPOSITORY
from tests.slurm.submitting import (
    crash,
    kill,
    last,
    losses,
    megakernel,
    scontrol,
    start_slurmd,
    status,
    story,
    submit,
    until,
    until_state,
    until_step,
)

STEPS = 900
HAPPENS_AT = 15
"""Step after which the event happens; every tenth step is saved. Slurm checks time limits twice a minute."""

ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True)
class Scenario:
    """One event, and what repairs it."""

    event: str
    happen: Callable[[str, str], None]
    """Causes the event; called with the names of run and job."""

    repair: Callable[[], None] = field(default=lambda: None)
    """What an administrator does after the job has reacted."""

    notices: bool = True
    """Whether the event ends this start of the job."""

    resume: bool = False
    """Whether the user has to resume the run."""


def take_both_nodes(run: str, job: str) -> None:
    typed = ["sbatch", "--parsable", "-p", "high", "-N", "2", "--exclusive", "-o", "/dev/null"]
    other = subprocess.run([*typed, "--wrap", "sleep 600"], capture_output=True, text=True, check=True)
    until(lambda: story(run, job)[-1] == "requeued")
    subprocess.run(["scancel", other.stdout.strip()], check=True)


def daemon(name: str) -> int:
    folder = Path(os.environ["SLURM_CONF"]).parent
    return int((folder / f"run/{name}.pid").read_text())


def restart_slurmctld(run: str, job: str) -> None:
    pid = daemon("slurmctld")
    os.kill(pid, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{pid}").exists())
    until_step(run, HAPPENS_AT + 10)
    subprocess.run(["slurmctld"], check=True)


def fill_disk(run: str, job: str) -> None:
    with contextlib.suppress(OSError), Path("runs/ballast").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))


SCENARIOS = (
    Scenario("preempted by another partition", take_both_nodes),
    Scenario("time limit", lambda run, job: scontrol("update", f"JobId={job}", "TimeLimit=2")),
    Scenario("`scontrol requeue`", lambda run, job: scontrol("requeue", job)),
    Scenario("`cancel --save`", lambda run, job: cancel(run, "--save"), resume=True),
    Scenario("`cancel`", lambda run, job: cancel(run), resume=True),
    Scenario("a rank gets SIGKILL", lambda run, job: kill(job, 1, signal.SIGKILL)),
    Scenario(
        "a node's slurmd is killed",
        lambda run, job: os.kill(daemon("slurmd.n2"), signal.SIGKILL),
        lambda: start_slurmd("n2"),
        notices=False,
    ),
    Scenario("one of two nodes is gone", lambda run, job: crash("n2"), lambda: start_slurmd("n2")),
    Scenario("slurmctld restarts", restart_slurmctld, notices=False),
    Scenario(
        "the disk is full", fill_disk, lambda: Path("runs/ballast").unlink(missing_ok=True), notices=False
    ),
)


def cancel(run: str, *options: str) -> None:
    said = megakernel("cancel", run, *options)
    assert said.status == 0, said.err


def shown(run: str) -> str:
    """State and reason as `megakernel status` shows them."""
    now = status(run)
    return f"{now['state']}: {now['why']}" if now["why"] else now["state"]


def row(scenario: Scenario, run: str, expected: dict[int, float]) -> str:
    """Run one scenario; return its row of the table."""
    (job,) = submit(f"run.yaml --name {run} -N 2")
    until_step(run, HAPPENS_AT)
    scenario.happen(run, job)
    if scenario.notices:
        ends = ("requeued", "ended", "waits")
        until(lambda: story(run, job)[-1] in ends or status(run)["state"] in ENDS, seconds=500)
        # Slurm waits five minutes for a node that does not answer, from when it has noticed.
        until(lambda: status(run)["state"] not in ("RUNNING", "COMPLETING"), seconds=700)
    says, before = shown(run), max(losses(run), default=0)
    saved = last(run, "ended")["step"] if "ended" in story(run, job) else status(run)["saved"]
    scenario.repair()
    ended = until_state(run, *ENDS, seconds=500)
    if scenario.resume:
        assert megakernel("resume", run).status == 0
        ended = until_state(run, *ENDS)
    if not scenario.notices:
        says = shown(run)
    starts = story(run).count("started")
    again = "by hand" if scenario.resume else "yes" if starts > 1 else "not needed"
    kept = f"step {saved} of {before}" if scenario.notices else "goes on"
    found = losses(run)
    different = sum(found.get(step) != loss for step, loss in expected.items())
    same = (
        "yes"
        if ended["state"] == "COMPLETED" and not different
        else f"no: {ended['state']}, {different} differ"
    )
    return f"| {scenario.event} | {kept} | {again} | {same} | {says} |"


def at_submission(expected: dict[int, float]) -> Iterator[str]:
    """Rows of events that happen while a run is submitted, or before it starts."""
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    os.environ.update(launcher)
    (job,) = submit("run.yaml --name started -N 2 --sbatch hold")
    for name in launcher:
        del os.environ[name]
    with contextlib.ExitStack() as listening:
        for offset in range(3):
            port = 20000 + (7 * int(job) + offset) % 12000
            listening.enter_context(socket.create_server(("", port)))
        scontrol("release", job)
        ended = until_state("started", *ENDS)
    same = "yes" if ended["state"] == "COMPLETED" and losses("started") == expected else "no"
    yield f"| submitted under torchrun, its first three ports taken | - | not needed | {same} | {shown('started')} |"

    words = "submit run.yaml --name twice --sbatch hold"
    typed = [sys.executable, "-m", "launch.cli", *words.split()]
    both = [subprocess.Popen(typed, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    refused = [error.strip() for process, error in zip(both, errors) if process.returncode]
    assert len(refused) == 1, errors
    yield f"| two submissions at once | - | - | - | {shown('twice')}; the other: {refused[0]} |"
    cancel("twice")


def table(only: list[str]) -> Iterator[str]:
    """Yield the lines of the table, each as soon as its event is over."""
    submit("run.yaml --name whole -N 2")
    assert until_state("whole", *ENDS)["state"] == "COMPLETED"
    expected = losses("whole")
    assert sorted(expected) == list(range(1, STEPS + 1))
    yield "| event | saved | starts again | bit for bit | `megakernel status` says |\n|---|---|---|---|---|"
    yield from at_submission(expected)
    for number, scenario in enumerate(SCENARIOS):
        if not only or any(word in scenario.event for word in only):
            yield row(scenario, f"run-{number}", expected)


def main() -> int:
    """Run the scenarios, and rewrite the page after each of them."""
    parser = page_parser(__doc__)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORD",
        help="only events of a running job whose name contains WORD; may be given several times",
    )
    args = parser.parse_args()
    out = args.out.absolute() if args.out else None
    subprocess.run([LOCAL_CLUSTER, "start"], check=True)
    shown = subprocess.run([LOCAL_CLUSTER, "env"], capture_output=True, text=True, check=True).stdout
    os.environ.update(
        SLURM_CONF=shown.strip().partition("=")[2], OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY)
    )
    typed = shlex.join(["python", "-m", "tests.slurm.scenarios", *sys.argv[1:]])
    begun = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    head = (
        "# What becomes of a run on Slurm\n\n"
        f"`{typed}`, {begun}: {machine_description()}; Slurm on two nodes of this machine "
        "(`slurm/local_cluster`), jobs of two processes on two nodes, shipped settings. A run of "
        f"{STEPS} steps saves every tenth; the event happens from step {HAPPENS_AT} on. Saved: steps behind the "
        f"checkpoint of those logged when the job had ended. Bit for bit: all {STEPS} losses equal those of a run to "
        "which nothing happened.\n\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        words = "prepare --source stdlib --tokenizer byte --out corpus --max-documents 60"
        assert megakernel(words, "--validation-fraction 0.1 --workers 1").status == 0
        Path("run.yaml").write_text(CONFIG.replace("steps: 100", f"steps: {STEPS}"))
        Path("runs").mkdir()
        # A separate disk, which one of the events fills.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256M", "none", "runs"], check=True)
        lines = []
        try:
            for line in table(args.only):
                lines.append(line)
                write_page(head + "\n".join(lines) + "\n", out)  # events take minutes: keep the rows so far
        finally:
            subprocess.run(["scancel", "--user=root", "--quiet"], check=False)
            until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout)
            subprocess.run(["umount", "--lazy", "runs"], check=False)
    subprocess.run([LOCAL_CLUSTER, "stop"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
