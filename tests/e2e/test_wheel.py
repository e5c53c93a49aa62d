"""The wheel, installed in an environment that has its dependencies and no checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

REPOSITORY = Path(__file__).parents[2]
_BUILT_FROM = (
    *("configs", "data_pipeline", "launch", "megakernel", "slurm"),
    *("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg", "setup.py"),
)

pytestmark = pytest.mark.second


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what a build reads: setuptools writes beside it."""
    folder = tmp_path_factory.mktemp("sources")
    for name in _BUILT_FROM:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.fixture(scope="module")
def bin(sources, tmp_path_factory):
    """The programs of an environment in which the wheel, built through an sdist, is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"

    def built(kind: str, place: Path) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", build, kind, folder],
            cwd=place,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return folder / done.stdout.split()[-1]

    shutil.unpack_archive(built("build_sdist", sources), folder / "sdist")
    (unpacked,) = (folder / "sdist").iterdir()
    wheel = built("build_wheel", unpacked)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")})
    # The dependencies by their path alone: the .pth file of an editable install there would lead to the checkout.
    Path(paths["purelib"], "dependencies.pth").write_text(os.pathsep.join(_site_packages()))
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
    ]
    subprocess.run(install, check=True)
    return folder / "venv" / "bin"


def _site_packages() -> list[str]:
    import torch

    return [str(Path(torch.__file__).parents[1])]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An empty folder to work in."""
    return tmp_path_factory.mktemp("work")


def run(bin: Path, place: Path, *words: str, **options) -> subprocess.Popen:
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [bin / "megakernel", *words],
        cwd=place,
        env=known | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def output(bin: Path, place: Path, *words: str) -> str:
    process = run(bin, place, *words)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return out + err


SMALL = ("training.steps=2", "training.eval_samples=2", "model.num_layers=1", "training.global_batch_size=8")


@pytest.fixture(scope="module")
def trained(bin, place):
    """Text prepared and a run trained on two processes with a shipped configuration; returns the console's text."""
    words = "prepare --source stdlib --tokenizer byte --out data/stdlib --max-documents 60 --validation-fraction 0.1"
    output(bin, place, *words.split())
    return output(bin, place, "pretrain", "configs/demo.yaml", *SMALL, "--nproc", "2")


def test_a_shipped_configuration_trains_and_is_said_to_be_that_of_the_package(trained, place):
    assert "configs/demo.yaml is not in this folder; reading " in trained
    lines = [json.loads(line) for line in (place / "runs/demo/metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 2


def test_a_job_is_written_from_the_shipped_templates(trained, bin, place):
    words = "submit configs/demo.yaml run.name=job -N 1 -G 2 -t 1:00:00 --dry-run"
    script = output(bin, place, *words.split())
    assert "#SBATCH --nodes=1" in script
    assert "launch.cli pretrain" in script


def test_every_shipped_configuration_is_in_the_wheel(bin, place):
    names = [file.relative_to(REPOSITORY) for file in (REPOSITORY / "configs").glob("*.yaml")]
    assert len(names) > 5
    for name in names:
        assert "\nmodel:\n" in output(bin, place, "config", str(name))


def test_nothing_of_the_checkout_is_imported(bin, place):
    code = (
        "import launch as l, megakernel as m, data_pipeline as d; print(l.__file__, m.__file__, d.__file__)"
    )
    done = subprocess.run(
        [bin / "python", "-c", code], cwd=place, check=True, stdout=subprocess.PIPE, text=True
    )
    assert all(file.startswith(str(bin.parent)) for file in done.stdout.split())


def test_a_run_is_served(trained, bin, place):
    server = run(bin, place, "serve", "demo", "--port", "0")
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        with build_opener(ProxyHandler({})).open(address.rstrip("/") + "/health", timeout=60) as answer:
            assert answer.status == 200
    finally:
        server.terminate()
        server.wait(timeout=60)
