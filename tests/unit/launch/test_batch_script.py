"""The text of the batch script; tests/slurm runs it under Slurm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.shipped import REPOSITORY
from launch.slurm.collectives import timeout
from launch.slurm.refusals import explain_refusal
from launch.slurm.script import Script
from launch.slurm.submission import ScriptExecutor
from launch.slurm_programs import foreign_variables
from launch.submit import indices
from megakernel.config import ConfigError, UserError, validate_section
from megakernel.config.cluster import Cluster, Container
from tests.unit.config import trees

ENROOT = Container(runtime="enroot", image="/it's/mk.sqsh", mounts=["/a b", "/c:/d:ro"])
PYXIS = Container(image="/shared/mk.sqsh", mounts=["/shared:/shared"])


def script(template="pretrain", array=None, **settings):
    command = ["pretrain", "$submission/config.yaml"]
    return Script(template, Cluster(**settings), Path("/r/it's"), "now", command, array).text()


@pytest.mark.parametrize("template", ["pretrain", "uptrain", "prepare", "evaluate", "command"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"setup": ["module load cuda"], "environment": {"GREETING": "it's"}},
        {"container": PYXIS},
        {"container": Container(runtime="apptainer", image="mk.sif", mounts=["/a:/b"])},
        {"container": ENROOT},
        {"array": "0-3%2"},
        {"stage": "$TMPDIR/me"},
    ],
    ids=["plain", "setup", "pyxis", "apptainer", "enroot", "array", "stage"],
)
def test_every_script_is_valid_bash(template, settings):
    text = script(template, **settings)
    assert "{{" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_shellcheck_finds_nothing_in_any_script(tmp_path):
    search_path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=search_path)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install -e '.[dev]'")
    settings = {"setup": ["module load cuda"], "environment": {"GREETING": "it's"}}
    scripts = [REPOSITORY / name for name in (".ci/run", "slurm/local_cluster", "slurm/container/install")]
    for path in sorted((REPOSITORY / "slurm").glob("*.sbatch")):
        if "{{" in path.read_text():
            containers = [script(path.stem, container=one, array="0-3") for one in (PYXIS, ENROOT)]
            staged = script(path.stem, stage="$TMPDIR/me")
            filled = [script(path.stem, **settings), staged, *containers]
            for number, text in enumerate(filled):
                scripts.append(tmp_path / f"{path.stem}-{number}")
                scripts[-1].write_text(text)
        else:
            scripts.append(path)
    done = subprocess.run([shellcheck, "--format=gcc", *scripts], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_gpu_type_is_requested():
    assert "#SBATCH --gpus-per-node=h100:8\n" in script(gpu_type="h100", gpus_per_node=8)


def test_spare_nodes_are_requested_and_left_out_of_the_first_start():
    text = script(nodes=2, spares=1)
    assert "#SBATCH --nodes=3\n#SBATCH --no-kill\n" in text
    assert "--no-kill" not in script(nodes=2)


def test_a_range_of_nodes_is_left_to_slurm_and_the_job_survives_the_loss_of_one():
    text = script(nodes="2-4", gpus_per_node=8, sbatch={"cpus-per-task": 12})
    assert "#SBATCH --nodes=2-4\n#SBATCH --no-kill\n" in text
    # Slurm takes the least number of nodes for a job with a number of tasks per node.
    assert "#SBATCH --ntasks-per-node" not in text
    assert "#SBATCH --cpus-per-task=96\n" in text
    assert "export SLURM_CPUS_PER_TASK=$((${SLURM_CPUS_PER_TASK:-8} / 8))\n" in text


@pytest.mark.parametrize(
    ("nodes", "error"),
    [
        (
            "2-4",
            "nodes=2-4: 3 nodes cannot train this run (training.global_batch_size=8 is not a multiple of ",
        ),
        ("5-7", "nodes=5-7: 5 nodes cannot train this run"),
        ("1-8", "give those that can: --nodes 1-2,4,8"),
        ("5-7", "none of them can"),
        ("2,3,4", "nodes=2-4: 3 nodes cannot train"),
    ],
)
def test_every_number_of_nodes_in_a_range_must_be_able_to_train_the_run(nodes, error, tmp_path, refused):
    sizes = {"global_batch_size": 8, "micro_batch_size": 1, "eval_samples": 0}
    config = trees.file(tmp_path, training=sizes)
    words = ("submit", config, "--nodes", nodes, "--dependency", "afterok:1", "--dry-run")
    message = refused(*words)
    assert error in message
    assert len(message.splitlines()) == 1


def test_percent_signs_in_a_folder_are_escaped_and_backslashes_refused():
    parts = {"cluster": Cluster(), "submission": "now", "command": ["prepare"]}
    text = Script("command", run=Path("/data/%j/x"), **parts).text()
    assert "#SBATCH --output=/data/%%j/x/logs/%j.log\n" in text
    with pytest.raises(UserError, match="no log below a folder with a backslash"):
        Script("command", run=Path("/data/a\\b"), **parts).text()


def test_settings_become_sbatch_directives():
    text = script(
        time="1-0", nodes=2, gpus_per_node=8, requeue=False, sbatch={"exclusive": True, "signal": None}
    )
    wanted = ("nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "time=1-0", "no-requeue", "exclusive")
    assert [line for line in wanted if f"#SBATCH --{line}\n" not in text] == []
    assert "--signal" not in text
    assert "#SBATCH --output='/r/it'\"'\"'s/logs/%j.log'\n" in text


NEWLINE = "x\ntouch /tmp/owned"


@pytest.mark.parametrize(
    ("settings", "key"),
    [({key: NEWLINE}, key) for key in ("partition", "account", "qos", "constraint", "exclude", "nodelist")]
    + [({key: NEWLINE}, key) for key in ("reservation", "mem")]
    + [({"partition": f"x{control}y"}, "partition") for control in "\r\0\x1b\x7f\x85\u2028"]
    + [
        ({"sbatch": {"comment": NEWLINE}}, "sbatch.comment"),
        ({"sbatch": {NEWLINE: True}}, "sbatch"),
        ({"sbatch": {"x --hold": "y"}}, "sbatch"),
        ({"environment": {"A": NEWLINE}}, "environment.A"),
        ({"container": {"image": NEWLINE}}, "container.image"),
        ({"container": {"image": "x", "mounts": ["/a", NEWLINE]}}, "container.mounts.1"),
    ],
)
def test_no_setting_can_inject_shell_code(settings, key):
    with pytest.raises(ConfigError) as caught:
        validate_section(Cluster, settings)
    assert str(caught.value).startswith(f"{key}=")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "more", [{"options": {"dependency": NEWLINE}}, {"array": f"0-1%{NEWLINE}"}, {"run": Path("/r", NEWLINE)}]
)
def test_no_other_option_can_inject_shell_code(more):
    parts = {"run": Path("/r"), "submission": "now", "command": ["prepare"]} | more
    with pytest.raises(UserError, match="on one plain line"):
        Script("command", Cluster(), **parts).text()


def test_a_multi_line_argument_stays_one_argument():
    typed = ["generate", "runs/x", "--prompt", "a\n#SBATCH --comment=b\n$(id) '\""]
    text = Script("command", Cluster(), Path("/r"), "now", typed).text()
    line = text.partition("-m launch.cli ")[2].partition("\nstatus=")[0]
    shown = subprocess.run(["bash", "-c", f"printf '%s|' {line}"], capture_output=True, text=True, check=True)
    assert shown.stdout.split("|")[:-1] == typed


def test_each_member_of_a_job_array_has_its_own_folder():
    text = script(array="0-3%2")
    assert "#SBATCH --array=0-3%2\n" in text
    assert "s'-$SLURM_ARRAY_TASK_ID\n" in text
    assert "s-%a/logs/%A_%a.log'\n" in text


def test_commands_run_in_containers_by_pyxis_and_apptainer():
    assert "--container-image=/shared/mk.sqsh --container-mounts=/shared:/shared" in script(container=PYXIS)
    apptainer = script(container=Container(runtime="apptainer", image="mk.sif", mounts=["/a:/b"]))
    assert "apptainer exec --nv --bind=/a:/b mk.sif python -m launch.cli pretrain" in apptainer


PRINTS = """#!/usr/bin/env bash
for word in "$@"; do
    if [[ $word == *.sqsh ]]; then printf '%s\\n' "$word"; shift; break; fi
    printf '%s\\n' "$word"
    shift
done
exec "$@"
"""
"""An enroot that prints its options up to the image, and runs the command outside of it."""


def test_enroot_gets_the_variables_of_the_job_the_mounts_and_the_working_folder(tmp_path, monkeypatch):
    """How enroot itself understands them: tests/slurm/test_containers.py."""
    enroot = tmp_path / "enroot"
    enroot.write_text(PRINTS)
    enroot.chmod(0o755)
    text = Script("command", Cluster(container=ENROOT), Path("/r"), "now", ["prepare"]).text()
    command = text.partition("{{srun}} ")[2] or text.partition('rank_%t.err" ')[2]
    words = command.partition("bash -c")[1] + command.partition("bash -c")[2].partition(" -m launch.cli")[0]
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_PROCID": "3",
        "GREETING": "it's\nlong",
        "HOME": "/h",
    }
    shown = subprocess.run(
        ["bash", "-c", f"cd {tmp_path}; {words} -c 'import os; print(os.getcwd())'"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[:2] == ["start", "--rw"]
    kept = {shown[at + 1] for at, word in enumerate(shown) if word == "--env"}
    assert {"SLURM_PROCID", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"} <= kept
    assert not {"PATH", "HOME", "GREETING"} & kept
    mounts = ["--mount=/a b:/a b:x-create=auto,rbind", "--mount=/c:/d:x-create=auto,rbind,ro"]
    assert shown[-4:] == [*mounts, "/it's/mk.sqsh", str(tmp_path)]
    assert "NVIDIA_VISIBLE" not in script(gpus_per_node=0, container=ENROOT), "its hook needs a driver"


def test_enroot_starts_no_addresses():
    with pytest.raises(ConfigError, match="is an address, and enroot starts only files"):
        validate_section(Cluster, {"container": {"runtime": "enroot", "image": "docker://x"}})


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 602), (1024, 2648)])
def test_the_preflight_of_a_large_job_has_time_to_connect(nodes, seconds):
    assert f"limit={seconds} step" in script(nodes=nodes, gpus_per_node=8)
    most = timeout(8 * nodes).total_seconds()
    assert 3 * most + 3 * timeout(16).total_seconds() < seconds, "it ends by its own timeouts first"


def test_a_job_inherits_no_slurm_variables_of_the_job_that_submits_it(monkeypatch, tmp_path):
    for name in ("SLURM_NTASKS", "SBATCH_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    assert sorted(foreign_variables()) == ["SBATCH_PARTITION", "SLURM_NTASKS"]
    # submitit's method that is overridden; called directly, it needs no Slurm.
    command = ScriptExecutor._make_submission_command(object.__new__(ScriptExecutor), tmp_path / "s")
    assert command[:1] == ["env"]
    assert command[-2:] == ["sbatch", str(tmp_path / "s")]
    assert {"SBATCH_PARTITION", "SLURM_NTASKS"} <= set(command)


@pytest.mark.parametrize(
    ("text", "expected"), [("0-3", [0, 1, 2, 3]), ("1,5%2", [1, 5]), ("0-10:5,7%2", [0, 5, 10, 7])]
)
def test_array_indices_are_parsed_as_by_slurm(text, expected):
    assert indices(text) == expected


TOO_MANY = ["0-99999999", "0-1000"]


@pytest.mark.parametrize(
    "text",
    ["", "3-1", "a", "0-3:0", "-1", "0-1%0", "0-1%", "0-1%x", "0-" + "9" * 40, "1,nan", "0-1%nan", *TOO_MANY],
)
def test_invalid_or_too_many_array_indices_are_refused(text):
    with pytest.raises(UserError, match="at most 1000 at once" if text in TOO_MANY else "no list of indices"):
        indices(text)


@pytest.mark.parametrize("words", [["--all", "x"], ["--watch", "--json"]])
def test_options_that_exclude_each_other_are_refused(words, refused):
    assert "leave one out" in refused("status", *words)


def test_an_invalid_up_training_is_refused_before_submission(tmp_path, refused):
    flurka = {"preset": "flurka", "compression": {"block_size": 128, "rank": 1}}
    sections = {"init": {"from": "models/dense"}, "uptrain": {"alpha": 0.3}, "training": {"steps": 5}}
    config = trees.file(tmp_path, model={"attention": flurka}, **sections)
    message = refused("submit", config, "--dry-run")
    assert "error: training.steps=5 leaves a stage without a step: " in message


def test_an_account_limit_is_not_mistaken_for_the_time_limit():
    message = (
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
        "accounting/QOS policy (job submit limit, user's size and/or time limits)"
    )
    line = explain_refusal(message, Cluster(time=10, qos="short"), {})
    assert line.startswith("qos=short: Slurm refuses the job (QOSMaxSubmitJobPerUserLimit; ")
    assert "sacctmgr show qos" in line
