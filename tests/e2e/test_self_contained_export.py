"""An exported folder needs only `transformers`: neither this repository nor the libraries that it builds on."""

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
    options = ("training.eval_samples=0", "logging.tensorboard=false", "optimizer.lr=1e-2")
    train(config, 1, "training.steps=1", *options)
    return config.parent / "run"


@pytest.fixture(scope="module")
def exported(run):
    assert main(["export", str(run), "--to", str(run.parent / "exported")]) == 0
    return run.parent / "exported"


def link_other_packages(folder):
    """Link all installed packages but this one and those that it builds on into a folder."""
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
def results(exported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    packages, out = link_other_packages(folder / "packages"), folder / "out"
    out.mkdir()
    code = "import runpy, sys; _, place, *sys.argv = sys.argv; sys.path.append(place); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # Threads that wait for each other take minutes beside other work.
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, packages, SCRIPT, exported, out, json.dumps(IDS)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"out": out}


@torch.no_grad()
def test_logits_equal_those_of_the_run(run, results):
    model = one_process_model(TrainedRun.find(run), 257, torch.device("cpu"))
    tokens = torch.tensor([IDS])
    hidden, _ = model.extend(tokens, torch.arange(len(IDS))[None], None)
    found = torch.load(results["out"] / "logits.pt", weights_only=True)["logits"]
    assert found.std() > 0.1
    # float32 numbers of order 1, summed in another order.
    torch.testing.assert_close(found, model.logits(hidden), atol=1e-5, rtol=0)


def test_generated_texts_equal_those_of_megakernel_generate(run, results):
    expected = [""] * len(PROMPTS)
    for piece in generate_texts(run, PROMPTS, max_new_tokens=24, sampling=Sampling(temperature=0)):
        expected[piece.prompt] += piece.text
    assert results["texts"] == expected


def test_padded_batches_beam_search_and_stop_strings_work(results):
    assert results["padded"] == results["texts"]
    assert results["beams"][0] == results["beams"][1]
    text = results["texts"][1]
    assert results["stopped"] == text[: text.index(results["stop"]) + len(results["stop"])]


def test_trainer_peft_and_a_resized_vocabulary_work(results):
    assert results["losses"][-1] < results["losses"][0]
    assert results["words"] == 257 + 7
    # Logits of magnitude 1 in float32: sums sometimes have another order if the weights lie elsewhere in memory.
    assert results["merged_apart"] < 1e-3
    for name in ("trained", "adapted", "merged", "grown"):
        identical, difference = results[name]
        assert identical, name
        assert difference < 1e-4, name


def test_saved_folders_stay_self_contained_and_import_nothing_of_this_repository(results):
    assert results["code_is_kept"] == [True] * 3
    assert results["headless"]
    assert results["loaded"] == []


def test_a_missing_weight_file_is_a_one_line_error(exported, tmp_path):
    from transformers import AutoModelForCausalLM

    for file in exported.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(OSError, match=r"no file named model\.safetensors") as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert "\n" not in str(caught.value)
