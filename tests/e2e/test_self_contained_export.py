"""An exported folder is all that a user of `transformers` needs: nothing of this repository or what it is built on."""

import json
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch.cli import main
from megakernel.checkpoint.one_process import one_process_model
from megakernel.checkpoint.trained_run import TrainedRun
from megakernel.generation import Sampling, generate_texts
from tests.distributed.training_run import train, write_config
from tests.e2e.without_the_package import ABSENT

pytestmark = pytest.mark.second

SCRIPT = Path(__file__).with_name("without_the_package.py")
PROMPTS = ["import ", "def f(x):\n    return é"]
IDS = torch.randint(256, (100,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """FLuRKA with both kinds of near windows, softmax and Performer."""
    config = write_config(tmp_path_factory.mktemp("runs"), corpus)
    still = ("training.eval_samples=0", "logging.tensorboard=false", "optimizer.lr=1e-2")
    train(config, 1, "training.steps=1", *still)
    return config.parent / "run"


@pytest.fixture(scope="module")
def exported(run):
    assert main(["export", str(run), "--to", str(run.parent / "exported")]) == 0
    return run.parent / "exported"


def elsewhere(folder):
    """A folder of installed packages without this one and without what it is built on: links to all others."""
    folder.mkdir()
    hidden = tuple(name.replace("_", "-") for name in ABSENT) + ABSENT + ("__editable__",)
    places = [
        Path(place)
        for place in dict.fromkeys([*site.getsitepackages(), *sys.path])
        if "site-packages" in place
    ]
    for place in places:
        for item in place.iterdir() if place.is_dir() else ():
            if not item.name.startswith(hidden) and not (folder / item.name).exists():
                (folder / item.name).symlink_to(item)
    return folder


@pytest.fixture(scope="module")
def told(exported, tmp_path_factory):
    place = tmp_path_factory.mktemp("elsewhere")
    packages, out = elsewhere(place / "packages"), place / "out"
    out.mkdir()
    code = "import runpy, sys; _, place, *sys.argv = sys.argv; sys.path.append(place); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(place),
        "HF_HOME": str(place / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, packages, SCRIPT, exported, out, json.dumps(IDS)],
        cwd=place,
        env=environment | {"HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"out": out}


@torch.no_grad()
def test_logits_are_those_of_the_run_bit_for_bit(run, told):
    ours = one_process_model(TrainedRun.find(run), 257, torch.device("cpu"))
    tokens = torch.tensor([IDS])
    hidden, _ = ours.extend(tokens, torch.arange(len(IDS))[None], None)
    assert torch.equal(
        torch.load(told["out"] / "logits.pt", weights_only=True)["logits"], ours.logits(hidden)
    )


def test_texts_are_those_of_megakernel_generate(run, told):
    found = [""] * len(PROMPTS)
    for piece in generate_texts(run, PROMPTS, max_new_tokens=24, sampling=Sampling(temperature=0)):
        found[piece.prompt] += piece.text
    assert told["texts"] == found


def test_batches_beams_and_stop_strings(told):
    assert told["padded"] == told["texts"]
    assert told["beams"][0] == told["beams"][1]
    text = told["texts"][1]
    assert told["stopped"] == text[: text.index(told["stop"]) + len(told["stop"])]


def test_trainer_peft_and_new_words(told):
    assert told["losses"][-1] < told["losses"][0]
    assert told["words"] == 257 + 7
    # Logits of size 1 in float32: the same weights elsewhere in memory are summed in another order now and then.
    assert told["merged_apart"] < 1e-3
    for name in ("trained", "adapted", "merged", "grown"):
        alike, apart = told[name]
        assert alike, name
        assert apart < 1e-4, name


def test_what_is_saved_stays_self_contained_and_loads_nothing_of_here(told):
    assert told["code_is_kept"] == [True] * 3
    assert told["loaded"] == []


def test_a_missing_weight_file_is_one_line(exported, tmp_path):
    from transformers import AutoModelForCausalLM

    for file in exported.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(OSError, match=r"no file named model\.safetensors") as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert "\n" not in str(caught.value)
