"""Runs the commands of the README, the quickstart and the guides to single subjects as printed."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = (
    *("README.md", "docs/quickstart.md", "docs/long_context.md", "docs/tuning.md", "docs/serving.md"),
    *("docs/optimization.md", "docs/encoders.md", "docs/editor_and_shell.md", "docs/from_text_to_a_model.md"),
)
SHORTENED = {"megakernel pretrain configs/demo.yaml --nproc 2": ["training.steps=20"]}
"""Command -> what a test adds, because it takes minutes."""

PROGRAMS = {
    "megakernel": "launch.cli",
    "tensorboard": "tensorboard.main",
    "torchrun": "torch.distributed.run",
}
"""Program -> its module, so that this checkout runs in this Python, whether it is installed or not."""


def commands(page):
    """The commands in a page's `console` blocks; in blocks that also show output, those after a `$`."""
    for block in re.findall(r"```console\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL):
        lines = block.splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from prompted or lines


def shown(page):
    """Command -> the lines of output that the page shows below it, with `...` for those that it leaves out."""
    lines = {}
    for block in re.findall(r"```console\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL):
        for command, text in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            # A command that a page shows again has found its work done.
            lines.setdefault(command, [line for line in text.splitlines() if line not in ("", "...")])
    return lines


_VARYING = r"""
    \d[\d,]*\.\d+(e[-+]?\d+)?%?                               # measured numbers
    | \d[\d,]*(?=\ (documents|tokens|tok/s|answers)\b)       # what there is of text depends on the Python
    | \d+:\d\d:\d\d | \d[\d,]*/(\d[\d,]*|\?)(?=\ [\d,]+\ tokens)  # time, progress of `prepare`
    | \d+e[-+]\d+
"""


def comparable(line):
    """A line of output without what depends on the machine and its Python, and without drawings: tables, spinners."""
    if is_row := "│" in line:
        line = re.sub(r"\d[\d,.]*%?", "#", line)
    line = re.sub(r"[━┏┳┓┡╇┩├┼┤└┴┘│─\u2800-\u28ff]+", " ", line)
    return " ".join((line if is_row else re.sub(_VARYING, "#", line, flags=re.VERBOSE)).split())


def commands_without_make(page):
    """The page's commands without `make`: `make test-all` runs this test, and CI runs both in a new clone."""
    return [command for command in commands(page) if not command.startswith("make ")]


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of a reader's clone that these commands need."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    for page in PAGES:  # a block that names a file is its content
        for name, text in re.findall(r"```\w+ (\S+)\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL):
            (tmp_path / name).write_text(text)
    return tmp_path


def start(command, folder, *more, **options):
    program, *arguments = shlex.split(command)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAMS[program], *arguments, *more],
        cwd=folder,
        env=environment,
        text=True,
        stderr=subprocess.PIPE,
        **options,
    )


def run(command, folder, *more):
    """Run a command that must succeed, and return its stdout and stderr."""
    process = start(command, folder, *more, stdout=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == 0, f"{command}\n{out}\n{err}"
    return out, err


def metric(run, tag):
    """Step -> value of a tag in a run's metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[tag] for line in lines if tag in line}


def scalars_in_tensorboard(command, folder, run, tag):
    """Step -> value of a tag, from the TensorBoard server that `command` starts."""
    # Port 0 means any free port; the server prints it on stderr once it listens.
    server = start(command, folder, "--port", "0", "--load_fast", "false", stdout=subprocess.DEVNULL)
    opener = build_opener(ProxyHandler({}))
    try:
        assert server.stderr is not None
        printed = "".join(iter_until(server.stderr, "http://"))
        address = re.search(r"http://\S+?/", printed)
        assert address, printed
        scalars = f"{address[0]}data/plugin/scalars"
        deadline = time.monotonic() + 60
        while tag not in json.load(opener.open(f"{scalars}/tags")).get(run, {}):
            assert time.monotonic() < deadline, f"TensorBoard shows no {tag} of {run}"
        series = json.load(opener.open(f"{scalars}/scalars?{urlencode({'run': run, 'tag': tag})}"))
    finally:
        server.terminate()
        server.communicate()
    return {step: value for _, step, value in series}


def answers_of_a_server(command, folder):
    """Start a server, and return the output of the page's client script; without a chat template, the model's name."""
    server = start(command, folder, "--port", "0", stdout=subprocess.PIPE)
    try:
        address = re.search(r"http://\S+", "".join(iter_until(server.stdout, "http://")))
        assert address
        health = json.load(build_opener(ProxyHandler({})).open(f"{address[0]}/health"))
        if not health["chat"]:
            return health["model"]
        script = (folder / "ask.py").read_text().replace("http://127.0.0.1:8000", address[0])
        return subprocess.check_output([sys.executable, "-c", script], cwd=folder, text=True)
    finally:
        server.terminate()
        server.communicate()


def iter_until(lines, text):
    """The lines up to the first one that contains `text`."""
    for line in lines:
        yield line
        if text in line:
            return


SHORT = {
    "prepare": ["--max-documents", "60", "--validation-fraction", "0.1"],
    "pretrain": ["training.steps=2", "training.eval_samples=2"],
    "generate": [],
}
"""Kind of command -> options that shorten the first command of this kind."""


@pytest.mark.second
def test_the_first_commands_of_the_readme_train_a_model_and_generate_text(folder):
    for kind, more in SHORT.items():
        command = next(
            line for line in commands_without_make("README.md") if line.startswith(f"megakernel {kind}")
        )
        output = run(command, folder, *more)
    assert output[0].startswith("import os")
    assert list(metric(folder / "runs/first", "train/loss")) == [2]


@pytest.mark.second
@pytest.mark.timeout(2400)  # 70 starts of a program; a slow machine takes half an hour
def test_every_command_on_the_pages_works(folder):
    printed = {}
    for command in dict.fromkeys(command for page in PAGES for command in commands_without_make(page)):
        if command.startswith("tensorboard"):
            scalars = scalars_in_tensorboard(command, folder, "first", "train/loss")
            assert scalars == pytest.approx(metric(folder / "runs/first", "train/loss"), rel=1e-6)  # float32
            continue
        if command.startswith("megakernel serve"):
            assert answers_of_a_server(command, folder)
            continue
        printed[command] = "".join(run(command, folder, *SHORTENED.get(command, ())))
        assert printed[command], f"{command} prints nothing"
    losses, sharded = (metric(folder / "runs" / run, "train/loss") for run in ("first", "sharded"))
    assert sharded == pytest.approx(losses, rel=1e-5)  # "any other layout gives the same losses"
    stale = []
    for page in PAGES:
        for command, lines in shown(page).items():
            # Generated texts are random bytes, and `doctor` speaks of the machine.
            if command in printed and not command.startswith(("megakernel generate", "megakernel doctor")):
                known = {comparable(line) for line in re.split(r"[\n\r]", printed[command])}
                stale += [f"{page}: {command}\n    {line}" for line in lines if comparable(line) not in known]
                stale += [f"now:\n{printed[command]}"] if stale and page in stale[-1] else []
    assert not stale, "\n".join(stale)


def test_the_quickstart_shows_every_command_of_the_readme():
    assert set(commands_without_make("README.md")) <= set(commands_without_make("docs/quickstart.md"))
