"""Attention transfer in blocks of layers is that of all layers at once, wherever it is killed, in a block's memory."""

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
from megakernel.checkpoint.universal import WEIGHT
from megakernel.config import RunFailed, UserError, load, yaml_text
from megakernel.training.process import run_in_mesh
from megakernel.training.stop_requests import Stop
from megakernel.training.trainer import Trainer
from megakernel.uptraining.blocks import BlockTransfer
from megakernel.uptraining.stages import stages
from tests import dense_models
from tests.disk import files_of_at_most
from tests.distributed.processes import RankFailedError, run_ranks, this_process
from tests.distributed.training_run import layout, metrics, pretrain_here, scalars
from tests.tiers import tiered

LAYERS = 4
TRANSFER = {"steps": 4, "lr": 0.02, "rows": 4, "cross_entropy": 0.1}
STATES = 4 * 4 * dense_models.LENGTH * 32 * 4
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
    # What a step clips by is the norm of all its gradients: that alone would tie layers to each other.
    "optimizer": {"lr": 1e-3, "mechanism_lr": 1e-2, "clip_grad_norm": 1e6},
    "checkpoint": {"every": 1},
    "uptrain": {"transfer": TRANSFER, "layers": {"keep": 1}},
}


def written(folder, corpus, family="llama", num_layers=LAYERS):
    """An up-training of a dense model with random weights, as a file."""
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
    return written(tmp_path_factory.mktemp("blocks"), corpus)


def in_blocks(name, layers):
    return f"run.name={name}", f"uptrain.transfer.block_layers={layers}"


@pytest.fixture(scope="module")
def whole(config):
    """An up-training whose transfer took all layers at once."""
    assert run_ranks(pretrain_here, 1, config, ()) == [0]
    return config.parent / "whole"


@pytest.fixture(scope="module")
def by_threes(config):
    """One that took three layers, then the last."""
    assert run_ranks(pretrain_here, 1, config, in_blocks("threes", 3)) == [0]
    return config.parent / "threes"


def transferred(config, overrides, layers=None, note=lambda text: None):
    """The transfer stage alone, in this rank: all at once, or so many layers at a time; why it stopped."""
    run = load(config, overrides)
    (stage,) = (one for one in stages(run) if one.kind == "transfer")

    def work(mesh):
        if layers is None:
            return Trainer(stage.config, mesh, providers()).run()
        return BlockTransfer(stage.config, layers, mesh, providers(), [run.run.folder], note).run()

    return run_in_mesh(stage.config, this_process(), work)


def weights(run):
    found = CheckpointTensors(find_checkpoint(run))
    return {name: found.read(name, [WEIGHT])[WEIGHT] for name in found.names}


def assert_same(run, expected):
    """Bit for bit: each layer does the same arithmetic on the same numbers, whatever other layers are there."""
    ours, theirs = weights(run), weights(expected)
    assert ours.keys() == theirs.keys()
    unequal = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert unequal == []
    assert {name: x.dtype for name, x in ours.items()} == {name: x.dtype for name, x in theirs.items()}


def test_blocks_give_the_weights_of_all_layers_at_once(whole, by_threes):
    assert_same(by_threes / "1-transfer", whole / "1-transfer")
    source = DenseCheckpoint(whole.parent / "dense")
    moved = {name for name, x in weights(by_threes / "1-transfer").items() if name not in source.names}
    assert {int(name.partition(".")[0]) for name in moved} == set(range(1, LAYERS + 1))


def test_the_curves_of_blocks_are_those_of_a_run(whole, by_threes):
    ours, theirs = (metrics(run / "1-transfer") for run in (by_threes, whole))
    assert scalars(ours, "step") == [1, 2, 3, 4]
    # The loss adds layers up in another order.
    for tag in ("train/loss", "train/grad_norm"):
        assert scalars(ours, tag) == pytest.approx(scalars(theirs, tag), rel=1e-5)
    heads = {tag: value for tag, value in theirs[-1].items() if tag.startswith("transfer/")}
    assert heads == {tag: value for tag, value in ours[-1].items() if tag.startswith("transfer/")}
    assert scalars(ours, "train/tokens") == scalars(theirs, "train/tokens")


def test_later_stages_and_export_go_on_behind_blocks(whole, by_threes, tmp_path):
    kept = [json.loads((run / "kept_layers.json").read_text()) for run in (by_threes, whole)]
    assert kept[0] == kept[1]
    assert_same(by_threes / "2-main", whole / "2-main")
    for tag in ("train/loss", "eval/loss"):
        ours, theirs = (scalars(metrics(run / "2-main"), tag) for run in (by_threes, whole))
        assert ours == theirs
    assert main(["export", str(by_threes / "1-transfer"), "--to", str(tmp_path / "model")]) == 0
    exported = DenseCheckpoint(tmp_path / "model")
    for name, tensor in weights(by_threes / "1-transfer").items():
        assert torch.equal(exported.read(name)[WEIGHT], tensor)


def test_hidden_states_go_when_the_blocks_are_together(by_threes):
    assert sorted(path.name for path in (by_threes / "1-transfer").iterdir() if path.is_dir()) == [
        "checkpoints",
        "layers_0-2",
        "layers_3-3",
        "logs",
        "tensorboard",
        "tokenizer",
    ]
    block = CheckpointTensors(find_checkpoint(by_threes / "1-transfer" / "layers_3-3"))
    assert all(name.startswith("4.self_attention.core.") for name in block.names)


ROOM = "megakernel.uptraining"
TRAIN_STEP, WRITE = (
    "megakernel.training.engine:Engine.train_step",
    f"{ROOM}.hidden_states:HiddenStates._write",
)
WRITE_LAYER = f"{ROOM}.blocks:write_layer"

KILLS = {
    "training of a block": (TRAIN_STEP, 7),
    "saving a block": ("megakernel.training.trainer:Trainer._save", 6),
    "writing hidden states": (WRITE, 13),
    "their last file": (f"{ROOM}.hidden_states:HiddenStates._publish", 2),
    "removing those before": (f"{ROOM}.blocks:BlockTransfer._remove_states", 3),
    "putting blocks together": (WRITE_LAYER, 3),
    "the last file of all": (f"{ROOM}.blocks:write_model_states", 1),
}
"""Where a start is killed -> a function, and in which of its calls; with blocks of one layer."""


@pytest.mark.parametrize("place", tiered(KILLS, ["writing hidden states"]))
def test_killed_anywhere_it_ends_the_same(place, config, whole):
    name = place.replace(" ", "-")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(killed_in, 1, *KILLS[place], config, [f"run.name={name}"])
    left = {path.name for path in (config.parent / name / "1-transfer/hidden_states").glob("*")}
    assert left or place in ("putting blocks together", "the last file of all")
    assert run_ranks(transferred, 1, config, [f"run.name={name}"], 1) == [Stop.NONE]
    assert_same(config.parent / name / "1-transfer", whole / "1-transfer")
    ours, theirs = (metrics(run / "1-transfer") for run in (config.parent / name, whole))
    assert ours[-1].keys() >= {tag for tag in theirs[-1] if tag.startswith("transfer/")}
    assert not (config.parent / name / "1-transfer/hidden_states").exists()


def killed_in(place, call, config, overrides):
    calls = count(1)
    before_each(place, lambda: next(calls) < call or os.kill(os.getpid(), signal.SIGKILL))
    return transferred(config, overrides, 1)


def before_each(place, act):
    """Do something before each call of a function of this process."""
    home, _, name = place.replace(":", ".").rpartition(".")
    owner, function = pkgutil.resolve_name(home), pkgutil.resolve_name(place)

    def acting(*args, **options):
        act()
        return function(*args, **options)

    setattr(owner, name, acting)


def test_the_teacher_takes_the_memory_of_a_block_however_deep_it_is(tmp_path, corpus):
    paths = []
    for layers in (4, 8):
        (folder := tmp_path / f"{layers}").mkdir()
        paths.append(written(folder, corpus, num_layers=layers))
    block, block_of_deeper, at_once = run_ranks(most_alive, 1, *paths)[0]
    assert block_of_deeper == block < at_once


def most_alive(config, deeper):
    """The most numbers in parameters at any time: by blocks of two layers of both models, and all layers at once."""
    counts = []
    for place in (TRAIN_STEP, WRITE, WRITE_LAYER):
        before_each(place, lambda: counts.append(numbers_alive()))
    found = []
    for path, layers in ((config, 2), (deeper, 2), (config, None)):
        counts.clear()
        gc.collect()
        transferred(path, [f"run.name=of-{layers}", "uptrain.transfer.steps=1"], layers)
        found.append(max(counts))
    return found


def numbers_alive():
    weights = (x for x in gc.get_objects() if type(x) is torch.nn.Parameter and not x.is_meta)
    return sum({x.data_ptr(): x.numel() for x in weights}.values())


def test_a_full_disk_is_one_line_and_the_next_start_goes_on(config, whole):
    folder = config.parent / "full/1-transfer"
    told, left, stop = run_ranks(met_a_full_disk, 1, config, ["run.name=full"], folder)[0]
    assert "hidden_states/before_1 could not be written (" in told
    assert "File too large" in told
    assert told.endswith("untouched; free space, then start the same command again to continue")
    assert (left, stop) == ([], Stop.NONE)
    assert_same(folder, whole / "1-transfer")


def met_a_full_disk(config, overrides, folder):
    """What was told, what was left of hidden states, and how the next start ended."""

    def fills_up(text):
        if text.startswith("hidden states before"):
            limit.enter_context(files_of_at_most(STATES // 2))

    with ExitStack() as limit, pytest.raises(RunFailed) as told:
        transferred(config, overrides, 1, fills_up)
    return str(told.value), list((folder / "hidden_states").iterdir()), transferred(config, overrides, 1)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(config):
    steps = 10**13  # whose states no disk holds
    overrides = ["run.name=small", f"uptrain.transfer.steps={steps}"]
    told = run_ranks(refused, 1, config, overrides, 2)[0]
    size = STATES * steps / TRANSFER["steps"] / 1e6
    assert told.startswith(
        f"uptrain.transfer.block_layers=2: hidden states between blocks take {size:,.1f} MB, and run.root="
    )
    assert told.endswith("; free space, choose another run.root, or lower uptrain.transfer.steps")
    assert not (config.parent / "small").exists()


def refused(config, overrides, layers):
    with pytest.raises(UserError) as told:
        transferred(config, overrides, layers)
    return str(told.value)


@pytest.mark.second
def test_a_request_to_stop_is_heeded_between_blocks(config, whole):
    assert run_ranks(stopped_between, 1, config, ["run.name=stopped"]) == [(Stop.STOP_FILE, [], False)]
    assert run_ranks(transferred, 1, config, ["run.name=stopped"], 2) == [Stop.NONE]
    assert_same(config.parent / "stopped/1-transfer", whole / "1-transfer")


def stopped_between(config, overrides):
    """Why it stopped, what is left of the states that it was writing, and whether the stop file is still there."""
    folder = load(config, overrides).run.folder

    def ask(text):
        if text.startswith("hidden states before"):
            (folder / "STOP").touch()

    stop = transferred(config, overrides, 2, ask)
    return stop, list((folder / "1-transfer/hidden_states").iterdir()), (folder / "STOP").exists()


LAYOUTS = ["dp2 zero 2", "tp2", "tp2 sequence parallel", "cp2"]


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["dp2 zero 2"]))
def test_layouts_learn_alike(ranks, config, whole):
    processes, *overrides = layout(ranks)
    overrides += [f"run.name={ranks.replace(' ', '-')}"]
    assert run_ranks(transferred, processes, config, overrides, 3) == [Stop.NONE] * processes
    assert_near(load(config, overrides).run.folder / "1-transfer", whole / "1-transfer")


def assert_near(run, expected):
    """Sums in another order: 1e-4 of losses as elsewhere, and a fiftieth of a learning rate of 0.02 of weights, which
    AdamW's first updates make of gradients near 0: one weight of 64 is 2.3e-4 off on an AMD EPYC, none on an Intel
    Xeon."""
    for tag in ("train/loss", "train/grad_norm"):
        ours, theirs = (scalars(metrics(one), tag) for one in (run, expected))
        assert ours == pytest.approx(theirs, rel=1e-4)
    ours, theirs = weights(run), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=4e-4)


@pytest.mark.second
def test_states_of_another_layout_are_made_again(config, whole):
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(killed_in, 1, TRAIN_STEP, 14, config, ["run.name=moved"])
    folder = config.parent / "moved/1-transfer"
    assert [path.name for path in (folder / "hidden_states").iterdir()] == ["before_3"]
    processes, *overrides = layout("dp2 zero 1")
    assert run_ranks(transferred, processes, config, ["run.name=moved", *overrides], 1) == [Stop.NONE] * 2
    assert_near(folder, whole / "1-transfer")


@pytest.mark.second
def test_half_precision_and_learned_positions_are_those_of_all_layers_at_once(tmp_path, corpus):
    path = written(tmp_path, corpus, "gpt2")
    half = ["training.dtype=bfloat16", "parallel.zero_stage=1"]
    for name, layers in (("whole", None), ("blocks", 3)):
        run_ranks(transferred, 1, path, [f"run.name={name}", *half], layers)
    assert_same(tmp_path / "blocks/1-transfer", tmp_path / "whole/1-transfer")
    dtypes = {tensor.dtype for tensor in weights(tmp_path / "blocks/1-transfer").values()}
    assert dtypes == {torch.float32, torch.bfloat16}


@pytest.mark.second
def test_blocks_without_anything_to_learn_are_left_out(config):
    pattern = 'model.attention_pattern=["softmax","softmax","main","main"]'
    overrides = [pattern, "uptrain.layers.keep=0"]
    for name, layers in (("some-whole", None), ("some", 2)):
        run_ranks(transferred, 1, config, [*overrides, f"run.name={name}"], layers)
    folder = config.parent / "some/1-transfer"
    assert_same(folder, config.parent / "some-whole/1-transfer")
    assert [path.name for path in folder.glob("layers_*")] == ["layers_2-3"]
