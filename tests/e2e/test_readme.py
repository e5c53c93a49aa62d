"""The README, the quickstart and the guides to long context, tuning and serving, typed in as they stand."""

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
PAGES = ("README.md", "docs/quickstart.md", "docs/long_context.md", "docs/tuning.md", "docs/serving.md")
PROGRAMS = {"megakernel": "launch.cli", "tensorboard": "tensorboard.main"}
"""Program -> its module, so that this checkout and this Python run, installed or not."""


def commands(page):
    """The lines of a page's `console` blocks that are commands. Where a block shows output, commands follow a `$`."""
    for block in re.findall(r"```console\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL):
        lines = block.splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from prompted or lines


def typed(page):
    """The page's commands but for `make`: `make test-all` runs this test, and CI runs both from a clean clone."""
    return [command for command in commands(page) if not command.startswith("make ")]


@pytest.fixture
def folder(tmp_path):
    """What a reader's clone holds for these commands."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    for page in PAGES:  # blocks that name a file are its text
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
    """What a command that succeeds says."""
    process = start(command, folder, *more, stdout=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == 0, f"{command}\n{out}\n{err}"
    return out, err


def metric(run, tag):
    """step -> value of a tag in a run's metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[tag] for line in lines if tag in line}


def scalars_in_tensorboard(command, folder, run, tag):
    """step -> value of a tag, as the TensorBoard server that `command` starts gives it to a browser."""
    # Port 0 takes a free one; the server names it on stderr once it listens.
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
    """What the page's script says that asks the server that `command` starts; of a model without chats its name."""
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
    """The lines up to the first that holds a text."""
    for line in lines:
        yield line
        if text in line:
            return


SHORT = {
    "prepare": ["--max-documents", "60", "--validation-fraction", "0.1"],
    "pretrain": ["training.steps=2", "training.eval_samples=2"],
    "generate": [],
}
"""The first command of each kind, and what makes it short."""


def test_text_becomes_a_model_that_writes_by_the_commands_of_the_readme(folder):
    for kind, more in SHORT.items():
        command = next(line for line in typed("README.md") if line.startswith(f"megakernel {kind}"))
        said = run(command, folder, *more)
    assert said[0].startswith("import os")
    assert list(metric(folder / "runs/first", "train/loss")) == [2]


@pytest.mark.second
@pytest.mark.timeout(1200)
def test_every_command_does_what_the_pages_say(folder):
    for command in dict.fromkeys(command for page in PAGES for command in typed(page)):
        if command.startswith("tensorboard"):
            shown = scalars_in_tensorboard(command, folder, "first/tensorboard", "train/loss")
            assert shown == pytest.approx(metric(folder / "runs/first", "train/loss"), rel=1e-6)  # float32
            continue
        if command.startswith("megakernel serve"):
            assert answers_of_a_server(command, folder)
            continue
        assert any(run(command, folder)), f"{command} says nothing"
    losses, sharded = (metric(folder / "runs" / run, "train/loss") for run in ("first", "sharded"))
    assert sharded == pytest.approx(losses, rel=1e-5)  # "any other layout gives the same losses"


def test_the_quickstart_shows_every_command_of_the_readme():
    assert set(typed("README.md")) <= set(typed("docs/quickstart.md"))
