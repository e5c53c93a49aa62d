"""What no command can work with ends in one line on stderr, whichever command it is given to."""

import pytest

from launch.cli import main
from launch.exit_status import ExitStatus
from megakernel.ops.dispatch import choose

from ..config import trees

BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi")
)

FILES = {
    "an alias bomb": (BOMB, "run.yaml:5 is not YAML (111,111 values, aliases written out)"),
    "a bomb of merges": (MERGES, "values, aliases written out"),
    "an anchor in itself": ("a: &a [*a]\n", "run.yaml:1 is not YAML (an anchor that holds itself)"),
    "a mapping in itself": ("a: &a {b: *a}\n", "an anchor that holds itself"),
    "deep lists": ("a: " + "[" * 150 + "]" * 150, "levels, aliases written out"),
    "very deep lists": ("a: " + "[" * 2000 + "]" * 2000, "is nested too deeply"),
    "an empty file": ("", "run.name is missing"),
    "a binary file": ("\x00\x01\x02", "is not YAML"),
}


@pytest.mark.parametrize("content", FILES)
def test_a_file_that_is_no_configuration(content, tmp_path, capsys):
    text, said = FILES[content]
    (tmp_path / "run.yaml").write_text(text)
    assert main(["config", str(tmp_path / "run.yaml")]) == ExitStatus.USAGE
    assert said in capsys.readouterr().err.splitlines()[0]


LONG = "x" * 300


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"run.name={LONG}", "run.name=xxx"),
        (f"data.train={LONG}/y", "data.train=xxx"),
        (f"init.from=models/{LONG}", "init.from=models/xxx"),
        ('data.train="a\\0b"', r"data.train=a\0b holds a NUL character; remove it"),
        (".".join(["run"] * 3000) + "=1", "is no override; write section.key=value"),
        ("model=" + "[" * 3000, "is nested too deeply"),
        ("run.name=${HOME}/../x", "run.name="),
        ("run.name=\udcff", "is not YAML"),
    ],
)
def test_an_override_that_no_machine_can_serve(override, said, tmp_path, refused):
    assert said in refused("config", trees.file(tmp_path), override)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x"}, "RANK=x is no number from 0 to 1; unset it, or start with torchrun or srun"),
        ({"RANK": "2"}, "RANK=2 is no number from 0 to 1"),
        ({"RANK": ""}, "RANK= is no number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is no number from 1 or more"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is no number from 0 or more"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc is no number from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no number"),
    ],
)
def test_a_place_in_a_world_that_is_none(variables, said, tmp_path, monkeypatch, refused):
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    for name, value in (world | variables).items():
        monkeypatch.setenv(name, value)
    assert said in refused("pretrain", trees.file(tmp_path))


@pytest.mark.parametrize("name", ["x", "chunked", "reference", "triton", ""])
def test_a_backend_that_no_op_has(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGAKERNEL_BACKEND", name)
    known = name != "x"
    assert main(["config", str(trees.file(tmp_path))]) == (0 if known else ExitStatus.USAGE)
    said = "MEGAKERNEL_BACKEND=x is no backend; set it to chunked, reference, triton, or unset it"
    assert capsys.readouterr().err == ("" if known else f"megakernel: error: {said}\n")
    if known:
        assert choose(dict.fromkeys(("chunked", "reference", "triton"), main), None)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["pretrain", "{config}", "run.root=/proc/x"], 2, "run.root=/proc/x cannot be written"),
        (["generate", "/proc/self", "--prompt", ""], 2, "/proc/self is not the folder of a run"),
        (
            ["generate", LONG, "--prompt", ""],
            1,
            f"{LONG}/config.yaml cannot be written or read (File name too long",
        ),
        (["evaluate", LONG], 1, "File name too long); shorten it"),
        (["config", LONG], 2, "cannot be read (File name too long)"),
        (["config", "/proc/self/mem"], 2, "/proc/self/mem"),
        (["config", "/dev/zero"], 2, "/dev/zero is no regular file; name a YAML file"),
        (["config", "{large}"], 2, "has more than 1,048,576 bytes"),
        (["config", "."], 2, ". cannot be read (Is a directory)"),
        (["monitor", LONG, "--once"], 1, "File name too long"),
        (["status", LONG], 1, "File name too long"),
        (["prepare", "--source", "{config}", "--tokenizer", "byte", "--out", "/proc/x"], 2, "--out /proc/x"),
        (["prepare", "--source", LONG, "--tokenizer", "byte", "--out", "y"], 1, "File name too long"),
        (["prepare", "--source", "{config}", "--tokenizer", "byte", "--out", LONG], 2, "--out xxx"),
    ],
)
def test_a_path_that_leads_nowhere(command, status, said, tmp_path, capsys, monkeypatch):
    config, large = trees.file(tmp_path), tmp_path / "large.yaml"
    if "{large}" in command:
        large.write_text("# " + "x" * (1 << 20))
    typed = [word.replace("{config}", str(config)).replace("{large}", str(large)) for word in command]
    assert main(typed) == status
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megakernel: error: ")]
    assert len(lines) == 1
    assert said in lines[0]
