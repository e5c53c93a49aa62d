import os
import re
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest

import megakernel
from launch.cli import COMMANDS, DEV, GROUPS, main, parse
from launch.doctor import _devices, _system
from launch.exit_status import ExitStatus
from megakernel.config import Config, from_yaml, load

from ..config import trees


def test_exit_statuses_keep_the_numbers_that_other_tools_rely_on():
    assert [int(status) for status in ExitStatus] == [0, 1, 2, 3, 4, 85, 86, 87, 88, 89, 90, 92, 141, 143]


def test_version_prints_the_version_of_the_package(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megakernel {megakernel.__version__}\n"


@pytest.mark.parametrize("program", [["-m", "megakernel"], ["megakernel"]])
def test_python_and_torchrun_start_the_package_by_name_and_in_a_checkout_as_a_folder(program):
    """torchrun gives its script or module to Python as it is."""
    done = subprocess.run(
        [sys.executable, *program, "--version"],
        cwd=Path(megakernel.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"megakernel {megakernel.__version__}\n", done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example_that_parses(name, capsys, monkeypatch):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert "%%" not in output
    example = output.partition("example:\n  ")[2].splitlines()[0]
    program, *arguments = shlex.split(example)
    assert program == "megakernel"
    assert arguments[: 1 + (name in DEV)] == ["dev"] * (name in DEV) + [name]
    monkeypatch.setattr(COMMANDS[name], "run", lambda args: 0)
    assert main(arguments) == 0


def test_help_lists_the_user_commands_by_group(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in output if line.startswith("  ") and line[2].isalpha()]
    assert names == ["COMMAND", *(name for group in GROUPS.values() for name in group), "dev"]
    assert [line[:-1] for line in output if line[:-1] in GROUPS] == list(GROUPS)


@pytest.mark.parametrize("name", DEV)
def test_developer_commands_also_work_without_the_prefix_dev(name, monkeypatch):
    seen = []
    monkeypatch.setattr(COMMANDS[name], "run", lambda args: seen.append(vars(args)) or 0)
    _, *arguments = shlex.split(COMMANDS[name].EXAMPLE)
    assert main(arguments) == main(arguments[1:]) == 0
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "arguments", [[], ["dev"], ["train"], ["config"], ["config", "x.yaml", "--frobnicate"], ["doctor", "x"]]
)
def test_an_invalid_command_line_is_a_usage_error(arguments, refused):
    assert refused(*arguments).endswith(" --help")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["train", "configs/demo.yaml"], "did you mean pretrain? see megakernel --help"),
        (["pretran", "configs/demo.yaml"], "did you mean pretrain, "),
        (["dev", "mechanism"], "did you mean mechanisms, "),
        (["pretrain", "x.yaml", "--training.steps", "20"], "write training.steps=20; see"),
        (["pretrain", "x.yaml", "--training.steps=20", "--nproc", "2"], "write training.steps=20; see"),
        (
            ["pretrain", "x.yaml", "--model.attention={preset:flurka}"],
            "write model.attention='{preset:flurka}'",
        ),
        (["config", "configs/demo.yaml", "--model.attention={preset: flurka}"], "leave out the dashes"),
        (["submit", "x.yaml", "--optimizer.lr", "-N", "2"], "write optimizer.lr=VALUE"),
    ],
)
def test_what_other_programs_call_it_is_refused_with_its_name_here(arguments, remedy, refused):
    assert remedy in refused(*arguments)


def test_two_dashes_are_a_value_of_an_option_as_any_other_text(refused):
    assert parse(["generate", "runs/x", "--prompt=--"]).prompt == ["--"]
    assert "--nproc: -- is not an integer" in refused("pretrain", "x.yaml", "--nproc=--")


def test_config_prints_a_file_that_loads_to_the_same_configuration(tmp_path, capsys):
    path = trees.file(tmp_path)
    assert main(["config", str(path), "training.steps=7", "model.attention=softmax"]) == 0
    assert from_yaml(capsys.readouterr().out) == load(path, ["training.steps=7", "model.attention=softmax"])


def test_config_explains_keys_by_their_docstrings(tmp_path, capsys):
    path = str(trees.file(tmp_path))
    assert main(["config", path, "--explain", "training.steps"]) == 0
    assert (
        capsys.readouterr().out
        == "training.steps: 100\n    Optimizer steps of the whole run. Raise it to continue a finished run.\n"
    )
    assert main(["config", path, "--explain", "training.step"]) == ExitStatus.USAGE


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("attention", "model.attention, model.dropout.attention?"),
        ("lr", "optimizer.lr?"),
        ("training.step", "training.steps, "),
    ],
)
def test_a_key_that_is_none_is_refused_with_the_nearest_ones(key, meant, tmp_path, refused):
    assert f"did you mean {meant}" in refused("config", trees.file(tmp_path), "--explain", key)


def test_every_key_has_an_explanation(tmp_path, capsys):
    for section in Config.model_fields:
        main(["config", str(trees.file(tmp_path)), "--explain", section])
        lines = capsys.readouterr().out.splitlines()
        assert all(line.startswith(section) for line in lines[::2])
        assert all(len(line) > len("    ") for line in lines[1::2])


def test_each_configuration_error_is_one_line_without_traceback(tmp_path, capsys):
    assert (
        main(["config", str(trees.file(tmp_path)), "training.steps=0", "model.layers=2"]) == ExitStatus.USAGE
    )
    unknown, too_small = capsys.readouterr().err.splitlines()
    assert unknown == "megakernel: error: model.layers=2 is an unknown key; did you mean num_layers?"
    assert too_small.startswith("megakernel: error: training.steps=0 should be greater than 0; ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--nproc", "3"], "training.global_batch_size=8 is not a multiple"),
        (["--nproc", "3", "parallel.tensor=2"], "processes=3 is not a multiple"),
        (["--nproc", "0"], "--nproc 0 is not possible"),
        (
            ["parallel.pipeline=2", "--nproc", "4", "parallel.zero_stage=3"],
            "parallel.zero_stage=3 with pipeline=2",
        ),
    ],
)
def test_pretrain_checks_everything_before_it_starts_a_process(
    tmp_path, monkeypatch, refused, arguments, error
):
    monkeypatch.chdir(tmp_path)
    assert error in refused("pretrain", trees.file(tmp_path), *arguments)
    assert not (tmp_path / "runs").exists()


def test_pretrain_refuses_the_folder_of_another_configuration(tmp_path, monkeypatch, capsys, refused):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/small"
    folder.mkdir(parents=True)
    main(["config", str(trees.file(tmp_path))])
    (folder / "config.yaml").write_text(capsys.readouterr().out)
    message = refused("pretrain", tmp_path / "run.yaml", "optimizer.lr=1.0")
    assert "optimizer.lr=1.0 was 0.0003 when the run began" in message
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_nproc_is_refused_under_torchrun(tmp_path, monkeypatch, refused):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    message = refused("pretrain", trees.file(tmp_path), "--nproc", 4)
    assert "leave it out under torchrun and srun" in message


def test_a_file_system_error_is_reported_in_one_line(tmp_path, corpus, capsys, refused):
    path = trees.file(tmp_path)
    capsys.readouterr()  # what preparing the corpus printed
    assert refused("pretrain", path, f"run.root={path}", f"data.train={corpus}") == (
        f"megakernel: error: run.root={path} cannot be written ([Errno 20] Not a directory: '{path}/small/logs'); make "
        "it writable, free space or choose another run.root"
    )


@pytest.mark.parametrize("run", ["there", "gone"])
def test_an_unexpected_error_is_one_line_with_its_traceback_in_the_logs(tmp_path, monkeypatch, capsys, run):
    (tmp_path / "there/logs").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(COMMANDS["generate"], "run", lambda args: {}["bug"])
    assert main(["generate", str(tmp_path / run), "--prompt", ""]) == ExitStatus.FAILED
    [line] = capsys.readouterr().err.splitlines()
    message, _, file = line.partition("; the traceback is in ")
    assert message == "megakernel: error: KeyError: 'bug'"
    assert Path(file).parent == (tmp_path / "there/logs" if run == "there" else tmp_path)
    assert "Traceback (most recent call last)" in Path(file).read_text()


def test_in_a_job_the_traceback_is_in_the_log_of_the_process(tmp_path, monkeypatch, capsys):
    (tmp_path / "run/logs").mkdir(parents=True)
    monkeypatch.setenv("MEGAKERNEL_JOB", "7")
    monkeypatch.setattr(COMMANDS["generate"], "run", lambda args: {}["bug"])
    assert main(["generate", str(tmp_path / "run"), "--prompt", ""]) == ExitStatus.FAILED
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "megakernel: error: KeyError: 'bug'; the traceback is above this line"
    assert not any((tmp_path / "run/logs").iterdir())


def test_the_doctor_shows_the_error_of_sbatch(monkeypatch, tmp_path, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\necho 'sbatch: fatal: Could not establish a configuration source' >&2\nexit 1\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == ExitStatus.DONE
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "cannot reach Slurm" in line]
    assert line.startswith("-  ")
    assert "sbatch cannot reach Slurm" in line


def test_the_doctor_names_the_variable_that_hides_gpus(monkeypatch, tmp_path, capsys):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("COLUMNS", "200")
    main(["doctor"])
    assert "unset CUDA_VISIBLE_DEVICES=-1, or look at nvidia-smi" in capsys.readouterr().out
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    main(["doctor"])
    assert "(torch built for CUDA 13.0)" in (out := capsys.readouterr().out)
    assert "reinstall torch" not in out


def test_the_doctor_names_the_assembler_once(monkeypatch):
    hopper = SimpleNamespace(total_memory=80 << 30, name="H100", major=9, minor=0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: hopper)
    names = [finding.name for finding in _devices()]
    assert names[:3] == ["cuda:0", "cuda:1", "ptxas"]
    assert names.count("ptxas") == 1


def test_the_doctor_looks_for_the_compiler_that_triton_takes(monkeypatch, tmp_path):
    def compiler() -> str:
        return next(finding.value for finding in _system() if finding.name == "C compiler")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compiler() == "none"
    for name in ("c++", "clang", "other"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert compiler() == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "other")
    assert compiler() == str(tmp_path / "other")


def test_the_doctor_passes_on_this_machine():
    result = subprocess.run(
        [sys.executable, "-m", "launch.cli", "doctor"], capture_output=True, text=True, check=False
    )
    assert result.returncode == ExitStatus.DONE, result.stdout
    for name in ("torch", "megatron-core", "deepspeed", "liger-kernel", "gloo", "cpu"):
        assert f"ok  {name} " in result.stdout


def test_the_doctor_names_the_machine_first_in_80_columns_with_whole_commands(monkeypatch, capsys):
    monkeypatch.setattr("launch.doctor.metadata.version", lambda name: "0.0")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == ExitStatus.FAILED
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines[: lines.index("")]]
    assert names.index("cpu") < names.index("megakernel") < names.index("torch")
    commands = [line for line in lines if line.startswith("  pip install")]
    assert "  pip install 'megakernel[gpu]'" in commands
    assert len(commands) == len(set(commands)), "packages of one extra share a command"
    assert max(len(line) for line in lines if line not in commands) <= 80


def test_the_doctor_checks_the_requirements_of_the_package(tmp_path):
    """The import path has a package that is older than setup.cfg requires before the installed one."""
    old = tmp_path / "rich-1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 1.0\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-m", "launch.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == ExitStatus.FAILED
    lines = result.stdout.splitlines()
    found, remedy = (place for place, line in enumerate(lines) if line.startswith("missing"))
    assert lines[found].split() == ["missing", "rich", "1.0"]
    assert lines[remedy : remedy + 2] == ["missing rich", "  pip install 'rich>=13' -c constraints.txt"]
    needed = {re.split("[<>=;]", wanted)[0] for wanted in requires("megakernel") if "extra" not in wanted}
    assert needed <= {line.split()[1] for line in lines if line}
