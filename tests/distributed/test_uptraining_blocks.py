"""Attention transfer in blocks of layers equals that of all layers at once, but needs the memory of one block."""

import copy
import gc
import json
import os
import pkgutil
import signal
from contextlib import ExitStack
from itertools import count

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.cli import main
from launch.training import providers
from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.checkpoint.whole_tensors import WEIGHT
from megakernel.config import RunFailed, UserError, load, yaml_text
from megakernel.training.process import run_in_mesh
from megakernel.training.stop_requests import Stop
from megakernel.training.trainer import Trainer
from megakernel.uptraining.blocks import BlockTransfer
from megakernel.uptraining.stages import stages
from tests import dense_models
from tests.disk import files_of_at_most
from tests.distributed.processes import RankFailedError, run_ranks, this_process
from tests.distributed.training_run import (
    layout,
    metrics,
    pretrain_in_this_rank,
    pretrain_tracked,
    scalars,
)
from tests.tracked import DATABASES, trackio_history, trackio_runs

pytestmark = pytest.mark.second

LAYERS = 4
TRANSFER = {"steps": 4, "lr": 0.02, "rows": 4, "cross_entropy": 0.1}
STATES_BYTES = 4 * 4 * dense_models.LENGTH * 32 * 4
"""Bytes of hidden states between two blocks: steps x sequences x tokens x hidden size, in float32."""

UPTRAINING = {
    "parallel": {"zero_stage": 0},
    "training": {
        "steps": 2,
        "seq_len": dense_models.LENGTH,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "dtype": "float32",
        "log_every": 1,
        "eval_samples": 2,
    },
    # No clipping: the norm over all gradients would make layers depend on each other.
    "optimizer": {"lr": 1e-3, "mechanism_lr": 1e-2, "clip_grad_norm": 1e6},
    "checkpoint": {"every": 1},
    "uptrain": {"transfer": TRANSFER, "layers": {"keep": 1}},
}


def write_config(folder, corpus, family="llama", num_layers=LAYERS):
    """Write the configuration of an up-training of a dense model with random weights."""
    dense = copy.deepcopy(dense_models.CONFIGS[family])
    dense.num_hidden_layers, dense.tie_word_embeddings = num_layers, True
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(dense).save_pretrained(folder / "dense")
    section = DenseCheckpoint(folder / "dense").section
    tree = UPTRAINING | {
        "run": {"name": "whole", "seed": 7, "root": str(folder)},
        "init": {"from": str(folder / "dense")},
        "model": section | {"attention": {"preset": "flurka", "compression": {"block_size": 16, "rank": 4}}},
        "data": {"train": str(corpus), "num_workers": 0},
    }
    (folder / "up.yaml").write_text(yaml_text.write(tree))
    return folder / "up.yaml"


@pytest.fixture(scope="module")
def config(tmp_path_factory, corpus):
    return write_config(tmp_path_factory.mktemp("blocks"), corpus)


def block_overrides(name, layers):
    return f"run.name={name}", f"uptrain.transfer.block_layers={layers}"


@pytest.fixture(scope="module")
def whole(config):
    """The folder of an up-training whose transfer trained all layers at once."""
    assert run_ranks(pretrain_in_this_rank, 1, config, ()) == [0]
    return config.parent / "whole"


@pytest.fixture(scope="module")
def by_threes(config):
    """The folder of one that trained three layers, then the last one."""
    assert run_ranks(pretrain_in_this_rank, 1, config, block_overrides("threes", 3)) == [0]
    return config.parent / "threes"


def run_transfer(config, overrides, layers=None, note=lambda text: None):
    """Run the transfer stage in this rank, all layers at once or `layers` at a time; why it stopped."""
    run = load(config, overrides)
    (stage,) = (one for one in stages(run) if one.kind == "transfer")

    def work(mesh):
        if layers is None:
            return Trainer(stage.config, mesh, providers()).run()
        return BlockTransfer(stage.config, layers, mesh, providers(), [run.run.folder], note).run()

    return run_in_mesh(stage.config, this_process(), work)


def weights(run):
    tensors = CheckpointTensors(find_checkpoint(run))
    return {name: tensors.read(name, [WEIGHT])[WEIGHT] for name in tensors.names}


def assert_same_weights(run, expected):
    """Bit for bit: each layer does the same arithmetic on the same numbers, whichever other layers are trained."""
    actual, wanted = weights(run), weights(expected)
    assert actual.keys() == wanted.keys()
    unequal = [name for name in actual if not torch.equal(actual[name], wanted[name])]
    assert unequal == []
    assert {name: x.dtype for name, x in actual.items()} == {name: x.dtype for name, x in wanted.items()}


def test_transfer_in_blocks_gives_bit_identical_weights(whole, by_threes):
    assert_same_weights(by_threes / "1-transfer", whole / "1-transfer")
    source = DenseCheckpoint(whole.parent / "dense")
    new_weights = {name for name, x in weights(by_threes / "1-transfer").items() if name not in source.names}
    assert {int(name.partition(".")[0]) for name in new_weights} == set(range(1, LAYERS + 1))


def test_metrics_of_the_blocks_are_combined_into_those_of_one_run(whole, by_threes):
    actual, expected = (metrics(run / "1-transfer") for run in (by_threes, whole))
    assert scalars(actual, "step") == [1, 2, 3, 4]
    # The loss sums the layers in another order.
    for tag in ("train/loss", "train/grad_norm"):
        assert scalars(actual, tag) == pytest.approx(scalars(expected, tag), rel=1e-5)
    heads = {tag: value for tag, value in expected[-1].items() if tag.startswith("transfer/")}
    assert heads == {tag: value for tag, value in actual[-1].items() if tag.startswith("transfer/")}
    assert scalars(actual, "train/tokens") == scalars(expected, "train/tokens")


def test_later_stages_and_export_work_after_a_transfer_in_blocks(whole, by_threes, tmp_path):
    softmax_layers = [json.loads((run / "kept_layers.json").read_text()) for run in (by_threes, whole)]
    assert softmax_layers[0] == softmax_layers[1]
    assert_same_weights(by_threes / "2-main", whole / "2-main")
    for tag in ("train/loss", "eval/loss"):
        actual, expected = (scalars(metrics(run / "2-main"), tag) for run in (by_threes, whole))
        assert actual == expected
    assert main(["export", str(by_threes / "1-transfer"), "--to", str(tmp_path / "model")]) == 0
    exported = DenseCheckpoint(tmp_path / "model")
    for name, tensor in weights(by_threes / "1-transfer").items():
        assert torch.equal(exported.read(name)[WEIGHT], tensor)


def test_hidden_states_are_removed_once_the_blocks_are_merged(by_threes):
    assert sorted(path.name for path in (by_threes / "1-transfer").iterdir() if path.is_dir()) == [
        "checkpoints",
        "layers_0-2",
        "layers_3-3",
        "logs",
        "tokenizer",
    ]
    block = CheckpointTensors(find_checkpoint(by_threes / "1-transfer" / "layers_3-3"))
    assert all(name.startswith("4.self_attention.core.") for name in block.names)


@pytest.mark.second
def test_trackers_show_the_stages_of_an_up_training_and_its_report(config):
    overrides = (*block_overrides("tracked", 3), "logging.trackio={project: up}")
    assert run_ranks(pretrain_tracked, 1, config, overrides, DATABASES) == [0]
    assert trackio_runs("up") == {"tracked/1-transfer", "tracked/2-main", "tracked/report"}
    for stage in ("1-transfer", "2-main"):
        shown = [
            line["train/loss"] for line in trackio_history("up", f"tracked/{stage}") if "train/loss" in line
        ]
        assert shown == pytest.approx(scalars(metrics(config.parent / "tracked" / stage), "train/loss"))
    assert any("report/loss/dense" in line for line in trackio_history("up", "tracked/report"))


PACKAGE = "megakernel.uptraining"
TRAIN_STEP, WRITE = (
    "megakernel.training.engine:Engine.train_step",
    f"{PACKAGE}.hidden_states:HiddenStates._write",
)
WRITE_LAYER = f"{PACKAGE}.blocks:write_layer"

KILL_POINTS = {
    "training of a block": (TRAIN_STEP, 7),
    "saving a block": ("megakernel.training.trainer:Trainer._save", 6),
    "writing hidden states": (WRITE, 13),
    "their last file": (f"{PACKAGE}.hidden_states:HiddenStates._publish", 2),
    "removing those before": (f"{PACKAGE}.blocks:BlockTransfer._remove_states", 3),
    "putting blocks together": (WRITE_LAYER, 3),
    "the last file of all": (f"{PACKAGE}.blocks:write_model_states", 1),
}
"""Where a start with blocks of one layer is killed -> a function, and the number of the call."""


@pytest.mark.parametrize("place", KILL_POINTS)
def test_a_transfer_killed_anywhere_ends_with_the_same_weights(place, config, whole):
    name = place.replace(" ", "-")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(transfer_killed_in, 1, *KILL_POINTS[place], config, [f"run.name={name}"])
    leftover_states = {path.name for path in (config.parent / name / "1-transfer/hidden_states").glob("*")}
    assert leftover_states or place in ("putting blocks together", "the last file of all")
    assert run_ranks(run_transfer, 1, config, [f"run.name={name}"], 1) == [Stop.NONE]
    assert_same_weights(config.parent / name / "1-transfer", whole / "1-transfer")
    actual, expected = (metrics(run / "1-transfer") for run in (config.parent / name, whole))
    assert actual[-1].keys() >= {tag for tag in expected[-1] if tag.startswith("transfer/")}
    assert not (config.parent / name / "1-transfer/hidden_states").exists()


def transfer_killed_in(place, call, config, overrides):
    calls = count(1)
    call_before(place, lambda: next(calls) < call or os.kill(os.getpid(), signal.SIGKILL))
    return run_transfer(config, overrides, 1)


def call_before(place, act):
    """Patch a function of this process so that each of its calls first calls `act`."""
    home, _, name = place.replace(":", ".").rpartition(".")
    owner, function = pkgutil.resolve_name(home), pkgutil.resolve_name(place)

    def acting(*args, **options):
        act()
        return function(*args, **options)

    setattr(owner, name, acting)


def test_parameters_in_memory_do_not_depend_on_the_depth_of_the_teacher(tmp_path, corpus):
    paths = []
    for layers in (4, 8):
        (folder := tmp_path / f"{layers}").mkdir()
        paths.append(write_config(folder, corpus, num_layers=layers))
    block, block_of_deeper, at_once = run_ranks(peak_parameters, 1, *paths)[0]
    assert block_of_deeper == block < at_once


def peak_parameters(config, deeper):
    """The peak number of parameter elements: in blocks of two layers for both models, and with all layers at once."""
    counts = []
    for place in (TRAIN_STEP, WRITE, WRITE_LAYER):
        call_before(place, lambda: counts.append(parameter_elements()))
    peaks = []
    for path, layers in ((config, 2), (deeper, 2), (config, None)):
        counts.clear()
        gc.collect()
        run_transfer(path, [f"run.name=of-{layers}", "uptrain.transfer.steps=1"], layers)
        peaks.append(max(counts))
    return peaks


def parameter_elements():
    weights = (x for x in gc.get_objects() if type(x) is torch.nn.Parameter and not x.is_meta)
    return sum({x.data_ptr(): x.numel() for x in weights}.values())


def test_a_full_disk_is_a_one_line_error_and_the_next_start_continues(config, whole):
    folder = config.parent / "full/1-transfer"
    message, left, stop = run_ranks(run_into_a_full_disk, 1, config, ["run.name=full"], folder)[0]
    assert "hidden_states/before_1 could not be written (" in message
    assert "File too large" in message
    assert message.endswith("untouched; free space, then start the same command again to continue")
    assert (left, stop) == ([], Stop.NONE)
    assert_same_weights(folder, whole / "1-transfer")


def run_into_a_full_disk(config, overrides, folder):
    """The error message, the hidden states that were left, and how the next start ended."""

    def limit_file_size(text):
        if text.startswith("hidden states before"):
            limit.enter_context(files_of_at_most(STATES_BYTES // 2))

    with ExitStack() as limit, pytest.raises(RunFailed) as error:
        run_transfer(config, overrides, 1, limit_file_size)
    return str(error.value), list((folder / "hidden_states").iterdir()), run_transfer(config, overrides, 1)


def test_a_disk_too_small_for_the_hidden_states_is_refused_at_the_start(config):
    steps = 10**13  # their hidden states fit on no disk
    overrides = ["run.name=small", f"uptrain.transfer.steps={steps}"]
    message = run_ranks(refusal, 1, config, overrides, 2)[0]
    size = STATES_BYTES * steps / TRANSFER["steps"] / 1e6
    assert message.startswith(
        f"uptrain.transfer.block_layers=2: hidden states between blocks take {size:,.1f} MB, and run.root="
    )
    assert message.endswith("; free space, choose another run.root, or lower uptrain.transfer.steps")
    assert not (config.parent / "small").exists()


def refusal(config, overrides, layers):
    with pytest.raises(UserError) as error:
        run_transfer(config, overrides, layers)
    return str(error.value)


def test_a_stop_request_is_honored_between_blocks(config, whole):
    assert run_ranks(transfer_with_stop_file, 1, config, ["run.name=stopped"]) == [
        (Stop.STOP_FILE, [], False)
    ]
    assert run_ranks(run_transfer, 1, config, ["run.name=stopped"], 2) == [Stop.NONE]
    assert_same_weights(config.parent / "stopped/1-transfer", whole / "1-transfer")


def transfer_with_stop_file(config, overrides):
    """Why it stopped, the hidden states that are left, and whether the stop file is still there."""
    folder = load(config, overrides).run.folder

    def touch_stop_file(text):
        if text.startswith("hidden states before"):
            (folder / "STOP").touch()

    stop = run_transfer(config, overrides, 2, touch_stop_file)
    return stop, list((folder / "1-transfer/hidden_states").iterdir()), (folder / "STOP").exists()


LAYOUTS = ["dp2 zero 2", "tp2", "tp2 sequence parallel", "cp2"]


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_learns_the_same_weights(ranks, config, whole):
    processes, *overrides = layout(ranks)
    overrides += [f"run.name={ranks.replace(' ', '-')}"]
    assert run_ranks(run_transfer, processes, config, overrides, 3) == [Stop.NONE] * processes
    assert_weights_close(load(config, overrides).run.folder / "1-transfer", whole / "1-transfer")


def assert_weights_close(run, expected):
    """Sums in another order: 1e-4 for losses as elsewhere, and for weights a fiftieth of the learning rate of 0.02,
    as AdamW's first updates amplify gradients near 0: one weight of 64 is 2.3e-4 off on an AMD EPYC, none on an Intel
    Xeon."""
    for tag in ("train/loss", "train/grad_norm"):
        actual, wanted = (scalars(metrics(one), tag) for one in (run, expected))
        assert actual == pytest.approx(wanted, rel=1e-4)
    actual, wanted = weights(run), weights(expected)
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=4e-4)


def test_hidden_states_of_another_layout_are_computed_again(config, whole):
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(transfer_killed_in, 1, TRAIN_STEP, 14, config, ["run.name=moved"])
    folder = config.parent / "moved/1-transfer"
    assert [path.name for path in (folder / "hidden_states").iterdir()] == ["before_3"]
    processes, *overrides = layout("dp2 zero 1")
    assert run_ranks(run_transfer, processes, config, ["run.name=moved", *overrides], 1) == [Stop.NONE] * 2
    assert_weights_close(folder, whole / "1-transfer")


def test_blocks_equal_all_layers_at_once_in_bfloat16_with_learned_positions(tmp_path, corpus):
    path = write_config(tmp_path, corpus, "gpt2")
    half = ["training.dtype=bfloat16", "parallel.zero_stage=1"]
    for name, layers in (("whole", None), ("blocks", 3)):
        run_ranks(run_transfer, 1, path, [f"run.name={name}", *half], layers)
    assert_same_weights(tmp_path / "blocks/1-transfer", tmp_path / "whole/1-transfer")
    dtypes = {tensor.dtype for tensor in weights(tmp_path / "blocks/1-transfer").values()}
    assert dtypes == {torch.float32, torch.bfloat16}


def test_blocks_without_trained_layers_are_skipped(config):
    pattern = 'model.attention_pattern=["softmax","softmax","main","main"]'
    overrides = [pattern, "uptrain.layers.keep=0"]
    for name, layers in (("some-whole", None), ("some", 2)):
        run_ranks(run_transfer, 1, config, [*overrides, f"run.name={name}"], layers)
    folder = config.parent / "some/1-transfer"
    assert_same_weights(folder, config.parent / "some-whole/1-transfer")
    assert [path.name for path in folder.glob("layers_*")] == ["layers_2-3"]
