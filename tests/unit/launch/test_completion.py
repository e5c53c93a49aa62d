"""Completion in shells: the scripts complete as bash and zsh read them."""

import shutil
import subprocess

import pytest

from launch.cli import main
from launch.completion import SHELLS
from megakernel.config import Config
from megakernel.config.validation import all_keys


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Shell -> its script, as the command prints it."""
    files = {}
    for shell in SHELLS:
        file = tmp_path_factory.mktemp("completion") / shell
        with pytest.MonkeyPatch.context() as patch, file.open("w") as out:
            patch.setattr("sys.stdout", out)
            with pytest.raises(SystemExit) as ended:
                main(["--print-completion", shell])
        assert ended.value.code == 0
        files[shell] = file
    return files


@pytest.fixture
def completed(scripts, tmp_path):
    """A function: words of a command line -> what bash offers for the last one."""
    for folder in ("runs/demo", "runs/dense", "data/web"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "demo.yaml").touch()
    code = (
        'source "$SCRIPT"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        '_megakernel megakernel "${COMP_WORDS[COMP_CWORD]}" 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
    )

    def complete(*words):
        done = subprocess.run(
            ["bash", "-c", code, "bash", "megakernel", *words],
            cwd=tmp_path,
            env={"SCRIPT": str(scripts["bash"]), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        return sorted(done.stdout.split())

    return complete


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pre"], ["prepare", "pretrain"]),
        (["resh"], []),
        (["dev", "resh"], ["reshape"]),
        (["config", "--sch"], ["--schema"]),
        (["config", "--schema", ""], ["cluster", "run"]),
        (["pretrain", "de"], ["demo.yaml"]),
        (
            ["pretrain", "demo.yaml", "training.eval_s"],
            ["training.eval_samples=", "training.eval_seq_len=", "training.eval_sources="],
        ),
        (
            ["pretrain", "demo.yaml", "training.steps=3", "optimizer.beta"],
            ["optimizer.beta1=", "optimizer.beta2="],
        ),
        (["evaluate", "de"], ["demo", "dense"]),
        (["prepare", "--out", "da"], ["data"]),
        (["frobnicate", "x"], []),
    ],
)
def test_bash_offers(words, offered, completed):
    assert completed(*words) == offered


def test_every_key_that_an_override_can_name_is_offered(completed):
    elements = ("data.train.", "data.stages.", "data.validation.", "model.attention_pattern.")
    elements += ("training.seq_len_schedule.", "uptrain.length.seq_len_schedule.")
    expected = {f"{key}=" for key in all_keys(Config) if not key.startswith(elements)}
    assert len(expected) > 200
    assert set(completed("pretrain", "demo.yaml", "")) >= expected
    assert not [key for key in completed("pretrain", "demo.yaml", "data.") if key.startswith("data.train.")]


def test_the_zsh_script_is_for_the_command(scripts):
    text = scripts["zsh"].read_text()
    assert text.startswith("#compdef megakernel\n")
    assert "training.steps=" in text
    zsh = shutil.which("zsh")
    if zsh is not None:
        subprocess.run([zsh, "-n", scripts["zsh"]], check=True)


def test_a_shell_without_a_script_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "csh"])
    assert ended.value.code == 2
    assert "choose from 'bash', 'zsh'" in capsys.readouterr().err
