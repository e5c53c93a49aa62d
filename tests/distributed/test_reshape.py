"""A run continues on another layout from the same files."""

import contextlib
import io
import re
from argparse import Namespace
from pathlib import Path
from threading import Event

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param

from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.manifest import SavedCheckpoint, write_manifest
from megakernel.checkpoint.whole_tensors import MOMENTS, STEP, WEIGHT
from megakernel.config import load
from tests.distributed.processes import RankFailedError, cpu_mesh, run_ranks
from tests.distributed.training_run import (
    layout,
    metrics,
    pretrain_killed_at_line,
    scalars,
    train,
    write_config,
)
from tests.tiers import tiered

STEPS_PER_LAYOUT = 2
"""Steps on each layout."""

LAYOUT_SEQUENCES = [
    "tp2, cp2, pp2, tp2 zero 1",
    "dp2, pp2, dp2 zero 3, one process",
    "dp2 zero 1, tp2, cp2 zero 2, pp2 zero 1",
    "tp2 pp2 zero 1, tp2 dp2 zero 3, dp2 zero 2",
]
OPTIONS = ("schedule.name=constant", "logging.tensorboard=false", "training.eval_samples=0")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus):
    config = write_config(tmp_path_factory.mktemp("one"), corpus)
    return config, train(config, 1, *OPTIONS, f"training.steps={4 * STEPS_PER_LAYOUT}")


@pytest.mark.second
@pytest.mark.parametrize("layouts", LAYOUT_SEQUENCES)
def test_continuing_on_other_layouts_gives_the_losses_of_an_uninterrupted_run(
    layouts, uninterrupted, tmp_path
):
    config, expected = uninterrupted
    for leg, ranks in enumerate(layouts.split(", "), start=1):
        steps = f"training.steps={leg * STEPS_PER_LAYOUT}"
        actual = train(config, *layout(ranks), *OPTIONS, f"run.root={tmp_path}", steps)
        # float32 sums in another order; without Adam's state and step count the losses would differ.
        assert scalars(actual, "train/loss") == pytest.approx(
            scalars(expected, "train/loss")[: leg * STEPS_PER_LAYOUT], rel=1e-5
        )


UNIVERSAL_CHECKPOINT_INFO = {
    "parameter_with_row_parallelism_patterns": [r".*output\.weight", r".*linear_fc2\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*linear_fc1\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r".*\.pool_(keys|values)"],
}
"""How tensor ranks share parameters, as DeepSpeed's converter wants it; Megakernel takes it from the parameters."""


@pytest.mark.second
def test_whole_tensors_equal_those_of_deepspeeds_converter(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    train(config, *layout("tp2 dp2 zero 1"), *OPTIONS, "training.steps=2")
    saved = SavedCheckpoint.read(tmp_path / "run/checkpoints/step_2")
    reference = tmp_path / "reference"
    for file in saved.folder.glob("mp_rank_*_model_states.pt"):
        state = torch.load(file, weights_only=False)
        # DeepSpeed's converter fails on the entries without a tensor that Megatron-core's layers leave.
        state["module"] = {name: value for name, value in state["module"].items() if value is not None}
        torch.save(state | {"universal_checkpoint_info": UNIVERSAL_CHECKPOINT_INFO}, file)
    ds_to_universal.main(
        Namespace(
            input_folder=str(saved.folder),
            output_folder=str(reference),
            strict=True,
            inject_missing_state=False,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
        )
    )
    tensors = CheckpointTensors(saved)
    parameters = {path.parent.name for path in reference.glob("zero/*/step.pt")}
    assert len(parameters) == 35
    for name in parameters:
        state = tensors.read(name)
        for key in (WEIGHT, *MOMENTS):
            expected = torch.load(reference / "zero" / name / f"{key}.pt")["param"]
            torch.testing.assert_close(state[key], expected, rtol=0, atol=0)
        assert state[STEP] == torch.load(reference / "zero" / name / "step.pt") == 2
    (buffer,) = tensors.names - parameters
    assert buffer == "4.self_attention.core.projection.matrix.values", (
        "the random projection is merged from both tensor ranks too"
    )
    assert tensors.shape(buffer) == (4, 32, 16)


FEW_KEY_HEADS = (
    "model.num_kv_heads=2",
    "model.attention_pattern=[main, {preset: flurka, compression: {block_size: 16, rank: 4, per_head: true}},"
    "{preset: gated_deltanet, short_convolution: 3}, softmax]",
)
"""What two of four tensor ranks hold together: E and F per key head, a convolution, a decay."""


@pytest.mark.second
def test_tensor_ranks_with_the_same_key_head_write_and_read_checkpoints_of_any_layout(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    options = (*OPTIONS, *FEW_KEY_HEADS)
    expected = scalars(train(config, 1, *options, "run.name=one", "training.steps=4"), "train/loss")
    for steps, ranks in ((1, "one process"), (2, "tp4 zero 1"), (4, "tp2 sequence parallel")):
        actual = train(config, *layout(ranks), *options, f"training.steps={steps}")
    # The loss of a step depends on weights of the step before, and on moments of that before it.
    assert scalars(actual, "train/loss") == pytest.approx(expected, rel=1e-5)


def load_and_save(config: Path, overrides: tuple[str, ...], folder: Path) -> str:
    """Load the newest checkpoint on this layout, and write what was loaded to `folder`; returns what was printed."""
    from launch.training import providers
    from megakernel.training.trainer import Trainer

    settings = load(config, overrides)
    sizes = settings.parallel.model_dump(include={"tensor", "context", "pipeline"})
    with cpu_mesh(**sizes) as mesh, contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = Trainer(settings, mesh, providers())
        assert trainer._load() == 1
        engine = trainer.engine
        for name, parameter in engine.engine.module.named_parameters():
            master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if settings.parallel.zero_stage > 0 and master is not None:
                with deepspeed.zero.GatheredParameters([parameter]):
                    assert torch.equal(parameter.data, master.to(parameter.dtype)), name
        records = engine.state_files.write(engine.checkpoint_states(folder), folder, Event())
        files = {name: record for share in mesh.gather_objects(records) for name, record in share.items()}
        if mesh.rank == 0:
            progress = SavedCheckpoint.read(trainer.folder.checkpoints / "step_1").progress
            progress.layout.update(trainer.layout)
            write_manifest(folder, progress, files)
    return printed.getvalue()


TIED: tuple[str, ...] = ()
MUON, FROZEN = (
    ("optimizer.name=muon", "optimizer.muon_lr=1e-2", "model.tie_embeddings=false"),
    ("optimizer.trained=mechanism", "model.attention_pattern=[main]"),
)
OFFLOADED = ("deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}",)
CHANGES = [
    ("bfloat16 tp2 dp2 zero 1", "bfloat16 dp2 zero 3", TIED),
    ("bfloat16 dp2 zero 3", "bfloat16 tp2 dp2 zero 2", TIED),
    ("bfloat16 tp2 dp2 zero 2", "bfloat16 pp2 zero 1", TIED),
    ("bfloat16 pp2 dp2 zero 1", "bfloat16 cp2 zero 2", TIED),
    ("bfloat16 dp2 zero 1", "bfloat16 tp2 zero 1", FROZEN),
    ("dp4 zero 1", "dp2", TIED),
    ("tp4", "dp4 zero 2", FEW_KEY_HEADS),
    ("dp4 zero 3", "tp4 zero 1", FEW_KEY_HEADS),
    ("pp2 dp2 zero 1", "tp2 dp2 zero 2", MUON),
    ("pp2", "dp2 zero 1", MUON),
    ("dp2 zero 3", "dp2 zero 2", OFFLOADED),
    ("dp2 zero 2", "dp2 zero 3", OFFLOADED),
]


@pytest.mark.parametrize(("before", "after", "keys"), tiered(CHANGES, CHANGES[:1]))
def test_every_layout_loads_the_state_of_any_other_bit_for_bit(before, after, keys, corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    options = (*OPTIONS, *keys, "training.steps=1")
    train(config, *layout(before), *options)
    (again := tmp_path / "again/step_1").mkdir(parents=True)
    world_size, *overrides = layout(after)
    saved = SavedCheckpoint.read(tmp_path / "run/checkpoints/step_1")
    files = {path: path.stat().st_mtime_ns for path in saved.folder.rglob("*")}
    output, *_ = run_ranks(load_and_save, world_size, config, (*options, *overrides), again, timeout=240)
    assert {path: path.stat().st_mtime_ns for path in saved.folder.rglob("*")} == files

    expected, actual = CheckpointTensors(saved), CheckpointTensors(SavedCheckpoint.read(again))
    assert expected.names == actual.names
    held = 0
    for name in expected.names:
        theirs, ours = expected.read(name), actual.read(name)
        assert theirs.keys() == ours.keys(), name
        for key in theirs:
            assert torch.equal(theirs[key], ours[key]), f"{key} of {name}"
            assert theirs[key].dtype == ours[key].dtype
            if key != STEP:
                held += theirs[key].nbytes * (1 if STEP in theirs else world_size)
    assert actual.counters == expected.counters
    found = re.search(r"read ([\d,]+) bytes, at most ([\d,]+) each", output)
    assert found is not None
    total, most = (int(number.replace(",", "")) for number in found.groups())
    assert most <= total <= world_size * most
    if "tp" not in after and "pp" not in after and keys is not FROZEN:
        assert total == held, "of what is trained each byte is read once, of buffers by each rank"


def test_a_start_on_another_layout_that_is_killed_loses_nothing(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    small = ("model.num_layers=2", "model.attention_pattern=[main, softmax]")
    train(config, *layout("dp2 zero 1"), *OPTIONS, *small, "training.steps=2")
    saved = tmp_path / "run/checkpoints/step_2"
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    world_size, *overrides = (*layout("tp2 zero 1"), *OPTIONS, *small, "training.steps=3")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(pretrain_killed_at_line, world_size, "reshaping", config, tuple(overrides))
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert not [line for line in metrics(tmp_path / "run") if line["step"] > 2]
    continued = train(config, world_size, *overrides)
    whole = train(config, 1, *OPTIONS, *small, "training.steps=3", "run.name=whole")
    assert scalars(continued, "train/loss") == pytest.approx(scalars(whole, "train/loss"), rel=1e-5)


def open_damaged(checkpoint: SavedCheckpoint) -> str:
    """Open a checkpoint that was verified on this rank and the others; returns the error."""
    from megakernel.config import UserError
    from megakernel.parallel.ranks import Ranks

    with cpu_mesh() as mesh:
        try:
            CheckpointTensors(checkpoint, Ranks.of(mesh)).read("1.mlp.linear_fc1.weight", [WEIGHT])
        except UserError as error:
            return str(error)
    return ""


def test_files_that_change_after_they_were_verified_are_refused_alike_on_all_ranks(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    train(
        config,
        *layout("dp2 zero 1"),
        *OPTIONS,
        "model.num_layers=1",
        "model.attention_pattern=null",
        "training.steps=1",
    )
    checkpoint = SavedCheckpoint.read(tmp_path / "run/checkpoints/step_1")
    assert run_ranks(open_damaged, 2, checkpoint) == [""] * 2
    file = next(checkpoint.folder.glob("*pp_rank_1*optim_states.pt"))
    content = file.read_bytes()
    for damaged, reason in ((content[: len(content) // 2], "damaged"), (None, "cannot be read")):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        first, second = run_ranks(open_damaged, 2, checkpoint)
        assert first == second
        assert file.name in first
        assert reason in first
        assert len(first.splitlines()) == 1
