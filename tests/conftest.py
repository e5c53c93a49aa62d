import math
import os
import signal
import time
from hashlib import sha256

import pytest
import torch

from tests.tiers import mark_tiers

# pytest then explains failed assertions of this helper as it does those of tests.
pytest.register_assert_rewrite("tests.distributed.training_run")

if not torch.cuda.is_available():
    # Before anything imports triton: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background processes with SIGINT ignored, nohup with SIGHUP. The tests go on ignoring them, but what
# they start must not inherit that: a handler, unlike SIG_IGN, becomes the default action in a new program.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)


def pytest_addoption(parser):
    parser.addoption(
        "--seed", default="0", help="seed of the tests' random numbers, or `random` to explore (default: 0)"
    )
    parser.addoption(
        "--second-tier-minutes",
        type=float,
        default=math.inf,
        metavar="M",
        help="skip tests of the second tier that would start later than M minutes after pytest (default: none)",
    )
    parser.addoption(
        "--shuffle-files",
        metavar="KEY",
        help="run the files of tests in an order drawn from KEY, so that a limit of time skips others each time",
    )


STARTED = time.monotonic()


def pytest_configure(config):
    # Workers of pytest-xdist draw with the number that their controller chose.
    if config.option.seed == "random":
        config.option.seed = str(int.from_bytes(os.urandom(4)))


def pytest_report_header(config):
    lines = [f"seed: {config.option.seed} (--seed N draws again, --seed random explores)"]
    if key := config.option.shuffle_files:
        lines.append(f"files: in the order of --shuffle-files {key}")
    return lines


@pytest.fixture
def seed(request) -> int:
    """The value of --seed."""
    return int(request.config.option.seed)


@pytest.fixture(autouse=True)
def same_numbers(seed):
    """Seed torch, so that a test's random numbers do not depend on the tests before it."""
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """Output does not depend on the width of the terminal in which the tests run."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def draw(seed) -> torch.Generator:
    """The test's own generator of random numbers, seeded with --seed."""
    return torch.Generator().manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark every case with its tier, and skip the tests that need a GPU on a machine without one."""
    if left_out := mark_tiers(items):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if key := config.option.shuffle_files:
        items.sort(key=lambda item: sha256(f"{key} {item.path.name}".encode()).digest())
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip a test of the second tier when its time is over; pytest's summary says how many were."""
    minutes = item.config.option.second_tier_minutes
    if "second" in item.keywords and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"of the second tier, whose {minutes:g} minutes are over on this machine")


@pytest.fixture
def refused(capsys):
    """Run a command that must be refused with status 2; returns the one line of its error."""
    from launch.cli import main

    def run(*words: object) -> str:
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:
            status = ended.code
        assert status == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("megakernel: error: ")
        return line

    return run


@pytest.fixture(scope="module")
def mesh():
    """The mesh of this one process, on the CPU."""
    from megakernel.config import Parallel
    from megakernel.parallel import Mesh, prepare_device
    from megakernel.parallel.processes import ProcessEnvironment

    mesh = Mesh.create(Parallel(), ProcessEnvironment(), prepare_device("cpu", 0))
    yield mesh
    mesh.destroy()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared corpus: part of the standard library's source files."""
    from launch.cli import main

    folder = tmp_path_factory.mktemp("data") / "stdlib"
    command = f"prepare --source stdlib --tokenizer byte --out {folder} --max-documents 60 --validation-fraction 0.1"
    assert main(command.split()) == 0
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory, corpus):
    """The configuration file of a small run; runs are in its folder."""
    from tests.distributed.training_run import write_config

    return write_config(tmp_path_factory.mktemp("runs"), corpus)
