"""Invalid input ends in one line on stderr, whichever command it is given to."""

import pytest
import torch
from triton import language as tl

from launch.cli import COMMANDS, main
from launch.exit_status import ExitStatus
from megakernel.config import UserError
from megakernel.ops.dispatch import choose
from megakernel.ops.kernels import launch as kernel_launch
from megakernel.parallel.device import choose_device

from ..config import trees

ALIAS_BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi")
)

FILES = {
    "an alias bomb": (ALIAS_BOMB, "run.yaml:5 is not YAML (111,111 values, aliases written out)"),
    "a bomb of merges": (MERGE_BOMB, "values, aliases written out"),
    "an anchor in itself": ("a: &a [*a]\n", "run.yaml:1 is not YAML (an anchor that contains itself)"),
    "a mapping in itself": ("a: &a {b: *a}\n", "an anchor that contains itself"),
    "deep lists": ("a: " + "[" * 150 + "]" * 150, "levels, aliases written out"),
    "very deep lists": ("a: " + "[" * 2000 + "]" * 2000, "is nested too deeply"),
    "an empty file": ("", "run.name is missing"),
    "a binary file": ("\x00\x01\x02", "is not YAML"),
}


@pytest.mark.parametrize("content", FILES)
def test_an_invalid_configuration_file_is_refused_in_one_line(content, tmp_path, capsys):
    text, message = FILES[content]
    (tmp_path / "run.yaml").write_text(text)
    assert main(["config", str(tmp_path / "run.yaml")]) == ExitStatus.USAGE
    assert message in capsys.readouterr().err.splitlines()[0]


LONG_NAME = "x" * 300


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"run.name={LONG_NAME}", "run.name=xxx"),
        (f"data.train={LONG_NAME}/y", "data.train=xxx"),
        (f"init.from=models/{LONG_NAME}", "init.from=models/xxx"),
        ('data.train="a\\0b"', r"data.train=a\0b holds a NUL character; remove it"),
        (".".join(["run"] * 3000) + "=1", "is not an override; write section.key=value"),
        ("model=" + "[" * 3000, "is nested too deeply"),
        ("run.name=${HOME}/../x", "run.name="),
        ("run.name=\udcff", "is not YAML"),
    ],
)
def test_an_invalid_override_is_refused(override, message, tmp_path, refused):
    assert message in refused("config", trees.file(tmp_path), override)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x"}, "RANK=x is no number from 0 to 1; unset it, or start with torchrun or srun"),
        ({"RANK": "2"}, "RANK=2 is no number from 0 to 1"),
        ({"RANK": ""}, "RANK= is no number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is no number from 1 up"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is no number from 0 up"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc is no number from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no number"),
    ],
)
def test_invalid_rank_variables_are_refused(variables, message, tmp_path, monkeypatch, refused):
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    for name, value in (world | variables).items():
        monkeypatch.setenv(name, value)
    assert message in refused("pretrain", trees.file(tmp_path))


@pytest.mark.parametrize("name", ["x", "chunked", "reference", "triton", "composed", ""])
def test_an_unknown_backend_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGAKERNEL_BACKEND", name)
    known = name != "x"
    assert main(["config", str(trees.file(tmp_path))]) == (0 if known else ExitStatus.USAGE)
    message = (
        "MEGAKERNEL_BACKEND=x is no backend; set it to chunked, reference, triton, composed, or unset it"
    )
    assert capsys.readouterr().err == ("" if known else f"megakernel: error: {message}\n")
    if known:
        assert choose(dict.fromkeys(("chunked", "reference", "triton"), main), None)


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (
            ["pretrain", "{config}", "run.root=/proc/x", "data.train={corpus}"],
            2,
            "run.root=/proc/x cannot be written",
        ),
        (["generate", "/proc/self", "--prompt", ""], 2, "/proc/self is not the folder of a run"),
        (
            ["generate", LONG_NAME, "--prompt", ""],
            1,
            f"{LONG_NAME}/config.yaml cannot be written or read (File name too long",
        ),
        (["evaluate", LONG_NAME], 1, "File name too long); shorten it"),
        (["config", LONG_NAME], 2, "cannot be read (File name too long)"),
        (["config", "/proc/self/mem"], 2, "/proc/self/mem"),
        (["config", "/dev/zero"], 2, "/dev/zero is not a regular file; name a YAML file"),
        (["config", "{large}"], 2, "has more than 1,048,576 bytes"),
        (["config", "."], 2, ". cannot be read (Is a directory)"),
        (["monitor", LONG_NAME, "--once"], 1, "File name too long"),
        (["status", LONG_NAME], 1, "File name too long"),
        (["prepare", "--source", "{config}", "--tokenizer", "byte", "--out", "/proc/x"], 2, "--out /proc/x"),
        (["prepare", "--source", LONG_NAME, "--tokenizer", "byte", "--out", "y"], 1, "File name too long"),
        (["prepare", "--source", "{config}", "--tokenizer", "byte", "--out", LONG_NAME], 2, "--out xxx"),
    ],
)
def test_an_unusable_path_is_refused_in_one_line(command, status, message, corpus, tmp_path, capsys):
    config, large = trees.file(tmp_path), tmp_path / "large.yaml"
    if "{large}" in command:
        large.write_text("# " + "x" * (1 << 20))
    capsys.readouterr()  # what preparing the corpus printed
    typed = [word.format(config=config, large=large, corpus=corpus) for word in command]
    assert main(typed) == status
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megakernel: error: ")]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_model_configuration_that_is_nested_too_deeply_is_refused(tmp_path, refused):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    )
    assert "config.json is nested too deeply for a configuration; download it again" in refused(
        "import", tmp_path
    )


@pytest.mark.parametrize(
    "command",
    [
        ["config", "loop"],
        ["pretrain", "loop"],
        ["prepare", "--source", "loop", "--tokenizer", "byte", "--out", "out"],
        ["evaluate", "loop"],
    ],
)
def test_a_link_that_leads_to_itself_is_an_error_of_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert main(command) in (ExitStatus.USAGE, ExitStatus.FAILED)
    (line,) = capsys.readouterr().err.splitlines()
    assert "traceback" not in line
    assert "loop" in line


def test_kernels_without_a_gpu_are_refused_before_the_model_runs(monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "triton")
    monkeypatch.setattr(kernel_launch, "INTERPRETED", tl.constexpr(False))
    message = "MEGAKERNEL_BACKEND=triton needs a GPU, and this process computes on the CPU; unset it, or set"
    with pytest.raises(UserError, match=message):
        choose_device("cpu")
    monkeypatch.setattr(kernel_launch, "INTERPRETED", tl.constexpr(True))
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("allocate", "size"),
    [(lambda: torch.empty(2**50), " (4,194,304.0 GiB at once)"), (lambda: bytearray(2**60), "")],
)
def test_a_model_larger_than_the_memory_is_an_error_of_one_line(allocate, size, monkeypatch, capsys):
    monkeypatch.setattr(COMMANDS["doctor"], "run", lambda args: allocate())
    assert main(["doctor"]) == ExitStatus.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert f"this machine has too little memory{size}; take one with more, a smaller model" in line


_ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 11.52 GiB is "
    "free. Including non-PyTorch memory, this process has 67.58 GiB memory in use."
)


def test_a_full_gpu_is_an_error_of_one_line_with_keys_to_lower(monkeypatch, capsys):
    def run(args):
        raise torch.OutOfMemoryError(_ON_A_GPU)

    monkeypatch.setattr(COMMANDS["doctor"], "run", run)
    assert main(["doctor"]) == ExitStatus.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "CUDA out of memory (20.00 GiB more were needed at once); in training lower training.micro_batch_size"
        in line
    )
    assert "traceback" not in line
