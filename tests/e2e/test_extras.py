"""Commands without the packages of the extras: what works, and the one line of what does not."""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch.cli import COMMANDS
from launch.exit_status import ExitStatus
from megakernel.config.extras import EXTRAS
from tests.tiers import tiered

REPOSITORY = Path(__file__).parents[2]
HIDES = REPOSITORY / "tests/missing_packages"

_SETUP = configparser.ConfigParser()
_SETUP.read(REPOSITORY / "setup.cfg")
_DECLARED = {
    name: {Requirement(line).name for line in lines.strip().splitlines()}
    for name, lines in _SETUP["options.extras_require"].items()
}


def without(*extras: str) -> dict[str, str]:
    """The environment of a Python in which nothing of these extras is installed."""
    modules = {module for extra in extras for module in EXTRAS[extra].packages}
    packages = set().union(*(_DECLARED[extra] for extra in extras))
    return {
        **os.environ,
        "MISSING": ",".join((" ".join(modules), " ".join(packages))),
        "PYTHONPATH": os.pathsep.join((str(HIDES), str(REPOSITORY))),
        "OMP_NUM_THREADS": "1",
    }


def run(place, *words, missing):
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", *words],
        cwd=place,
        env=without(*missing),
        capture_output=True,
        text=True,
    )


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file() or path.name == "x"]


def test_setup_declares_the_extras_that_errors_name():
    assert set(_DECLARED) == {*EXTRAS, "dev"}
    for name, extra in EXTRAS.items():
        assert set(extra.packages.values()) <= _DECLARED[name]


def test_an_installation_for_development_has_every_extra():
    (everything,) = re.findall(
        r"^    megakernel\[(.*)\]$", (REPOSITORY / "setup.cfg").read_text(), re.MULTILINE
    )
    assert set(everything.split(",")) == set(EXTRAS)


def test_the_makefile_installs_extras_that_exist():
    chosen = re.findall(r"^EXTRAS \?= (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert len(chosen) == 2
    assert {name for line in chosen for name in line.split(",")} < set(EXTRAS)


_DEMO = str(REPOSITORY / "configs/demo.yaml")
_PREPARE = ("prepare", "--out", "data/x", "--tokenizer")
_LACKING = {
    "analyze": ("plot", "matplotlib", ("analyze", "runs/none", "--what", "attention")),
    "logging.analysis_every=5": ("plot", "matplotlib", ("pretrain", _DEMO, "logging.analysis_every=5")),
    "logging.wandb": ("wandb", "wandb", ("pretrain", _DEMO, "logging.wandb={project: p}")),
    "logging.trackio": ("trackio", "trackio", ("pretrain", _DEMO, "logging.trackio={project: p}")),
    "export": ("hf", "transformers", ("export", "runs/none", "--to", "models/none")),
    "import": ("hf", "transformers", ("import", "models/none")),
    "--tokenizer bpe:300": ("hf", "transformers", (*_PREPARE, "bpe:300", "--source", "text.jsonl")),
    "--tokenizer words": ("hf", "transformers", (*_PREPARE, "words", "--source", "text.jsonl")),
    "tokenizer models/none": ("hf", "transformers", (*_PREPARE, "models/none", "--source", "text.jsonl")),
    "--source hf:none": ("train", "datasets", (*_PREPARE, "byte", "--source", "hf:none")),
    "Parquet": ("train", "pyarrow", (*_PREPARE, "byte", "--source", "table.parquet")),
    "zstd": ("train", "pyarrow", (*_PREPARE, "byte", "--source", "text.jsonl.zst")),
    "submit": ("slurm", "submitit", ("submit", _DEMO, "-N", "1", "-G", "2", "-t", "1:00:00", "--dry-run")),
    "sweep": ("slurm", "submitit", ("sweep", "none.yaml")),
    "resume": ("slurm", "submitit", ("resume", "none")),
    "--print-completion": ("shell", "shtab", ("--print-completion", "bash")),
    "--curve": ("plot", "plotext", ("monitor", "--once", "--curve", "--root", ".")),
    "serve": ("serve", "fastapi and uvicorn", ("serve", "runs/none")),
}
"""What lacks a package -> its extra, the packages, the command."""

_FIRST = ("analyze", "logging.wandb", "export", "Parquet", "submit", "--print-completion", "serve")
"""The first tier: each extra once."""


@pytest.mark.parametrize("what", tiered(_LACKING, _FIRST))
def test_what_lacks_an_extra_says_so_in_one_line_and_writes_no_file(what, tmp_path):
    extra, packages, words = _LACKING[what]
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "table.parquet").write_bytes(b"PAR1" + bytes(8) + b"PAR1")
    (tmp_path / "text.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(8))
    before = files(tmp_path)
    done = run(tmp_path, *words, missing=[extra])
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("megakernel: error: "))
    assert line.endswith(f"{what} needs {packages}; pip install 'megakernel[{extra}]'")
    assert "Traceback" not in done.stderr
    assert done.returncode == ExitStatus.USAGE
    assert files(tmp_path) == before


def test_an_import_that_no_check_foresaw_gives_the_line_too(tmp_path):
    code = (
        "from launch import cli\n"
        "def run(args):\n    import matplotlib.figure\n"
        "cli.COMMANDS['doctor'].run = run\n"
        "raise SystemExit(cli.main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=without("plot"), capture_output=True, text=True
    )
    assert done.stderr == "megakernel: error: doctor needs matplotlib; pip install 'megakernel[plot]'\n"
    assert done.returncode == ExitStatus.USAGE


def test_a_task_of_the_harness_without_the_harness_says_so(tmp_path):
    code = "from megakernel.evaluation.run import parse; parse(['lm_eval:piqa'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=without("eval"), capture_output=True, text=True
    )
    message = "UserError: --task lm_eval:NAME needs lm-eval; pip install 'megakernel[eval]'"
    assert done.stderr.splitlines()[-1].endswith(message)


@pytest.mark.second
def test_the_doctor_names_every_extra_that_is_missing_and_finds_the_rest_good(tmp_path):
    done = run(tmp_path, "doctor", missing=EXTRAS)
    shown = " ".join(done.stdout.split())
    assert done.returncode == ExitStatus.DONE, shown
    for name in EXTRAS:
        assert f"'megakernel[{name}]'" in shown


@pytest.mark.second
def test_a_plan_without_triton_says_how_attention_is_counted(tmp_path):
    done = run(tmp_path, "plan", _DEMO, "--gpus", "2", "--gpu", "h100", missing=EXTRAS)
    assert done.returncode == ExitStatus.DONE, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Triton is not installed: "))
    assert line.endswith("pip install 'megakernel[gpu]'")
    assert "fits as configured: " in done.stdout


def test_help_comes_without_any_extra(tmp_path):
    code = (
        "import sys\nfrom launch import cli\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        cli.main([name, '--help'])\n"
        "    except SystemExit as ended:\n        assert ended.code == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS],
        cwd=tmp_path,
        env=without(*EXTRAS),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(COMMANDS)


@pytest.mark.second
def test_training_and_its_use_on_a_cpu_need_no_extra(tmp_path):
    """Text is prepared, a model trained on one and on two processes, evaluated, and asked to continue a text."""

    def worked(*words):
        done = run(tmp_path, *words, missing=EXTRAS)
        assert done.returncode == ExitStatus.DONE, done.stdout + done.stderr
        return done

    words = "--source stdlib --tokenizer byte --out data/stdlib --max-documents 60 --validation-fraction 0.1"
    worked("prepare", *words.split())
    small = (
        "training.steps=2",
        "training.eval_samples=2",
        "model.num_layers=1",
        "training.global_batch_size=8",
    )
    for processes in ("1", "2"):
        worked("pretrain", _DEMO, *small, f"run.name=on-{processes}", "--nproc", processes)
    worked("generate", "runs/on-2", "--prompt", "import os", "--max-new-tokens", "4")
    done = worked("evaluate", "runs/on-1", "--task", "passkey:length=256,depths=2", "--samples", "2")
    assert " ".join(done.stderr.split()) == (
        "the heat map of accuracies by length and depth is left out: it needs matplotlib; "
        "pip install 'megakernel[plot]'"
    )
    written = {file.suffix for file in (tmp_path / "runs/on-1/evaluation").rglob("passkey*")}
    assert written == {".json", ".md"}
