"""A run starts from its newest valid checkpoint, or from the weights of another run."""

import os
import platform
from pathlib import Path

import pytest

from megakernel.config import load
from megakernel.model.flops import training_flops_per_token
from megakernel.model.parameters import parameter_count
from tests.distributed.processes import RankFailedError, run_ranks
from tests.distributed.training_run import metrics, pretrain_in_this_rank, scalars, train, write_config
from tests.tiers import tiered

SHORT = (
    *("training.steps=2", "training.micro_batch_size=4", "logging.tensorboard=false"),
    *("checkpoint.every=1", "checkpoint.keep=3"),
)


def start(config: Path, world_size: int, *overrides: str) -> str:
    """Train; returns the console output of rank 0."""
    console = config.with_name("console.txt")
    assert set(run_ranks(_pretrain_into, world_size, config, overrides, console)) == {0}
    return console.read_text()


def _pretrain_into(config: Path, overrides: tuple[str, ...], console: Path) -> int:
    if os.environ["RANK"] == "0":
        os.dup2(os.open(console, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
    return pretrain_in_this_rank(config, overrides)


@pytest.fixture(scope="module")
def source(tmp_path_factory, corpus):
    """A configuration, and the run that two tensor ranks trained with it."""
    config = write_config(tmp_path_factory.mktemp("source"), corpus)
    train(config, 2, *SHORT, "parallel.tensor=2", "run.name=source")
    return config, config.with_name("source")


@pytest.mark.second
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(1, "", marks=pytest.mark.second),
        (2, "parallel.pipeline=2 parallel.zero_stage=1"),
        (2, "parallel.zero_stage=3"),
        pytest.param(2, "parallel.context=2 parallel.zero_stage=2", marks=pytest.mark.second),
    ],
)
def test_init_from_loads_the_weights_of_a_run_of_any_layout(world_size, layout, source, tmp_path):
    config, run = source
    own = f"run.root={tmp_path} init.from={run} {layout}"
    lines = train(config, world_size, *SHORT, *own.split())
    # The same weights in float32, summed in another order.
    assert lines[0]["eval/loss"] == pytest.approx(metrics(run)[-1]["eval/loss"], rel=1e-6)
    assert scalars(lines, "step") == [0, 1, 2]
    assert scalars(lines, "train/lr") == scalars(metrics(run), "train/lr"), "the new run has its own schedule"


@pytest.mark.second
@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm"])
def test_parameters_and_flops_are_those_of_a_vocabulary_that_is_larger_than_the_tokenizers(
    kind, corpus, tmp_path
):
    config = write_config(tmp_path, corpus)
    keys = (
        "model.vocab_size=5000",
        f"model.kind={kind}",
        "model.attention=softmax",
        "model.attention_pattern=null",
    )
    console = start(config, 1, *SHORT, *keys)
    loaded = load(config, keys)
    ids = 5000 - loaded.model.special_ids
    assert f": {parameter_count(loaded.model, ids, 128):,} parameters in" in console
    last = metrics(tmp_path / "run")[-1]
    flops = training_flops_per_token(loaded.model, 128, ids, loaded.predicted_share)
    assert last["throughput/tflops"] / last["throughput/tokens_per_sec"] == pytest.approx(flops / 1e12)


@pytest.mark.second
@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks x86 for its instructions")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_without_products_in_bfloat16_is_named(dtype, corpus, tmp_path):
    console = start(
        write_config(tmp_path, corpus), 1, *SHORT, f"training.dtype={dtype}", "parallel.zero_stage=1"
    )
    slow = dtype == "bfloat16" and " avx512bw " not in Path("/proc/cpuinfo").read_text()
    assert (
        "warning: training.dtype=bfloat16: this CPU has no matrix products in bfloat16" in console
    ) == slow


@pytest.fixture(scope="module")
def halves(source):
    """The metrics of a run of four steps, and a run of its first two."""
    config, _ = source
    whole = train(config, 1, *SHORT, "training.steps=4", "run.name=whole")
    train(config, 2, *SHORT, "parallel.tensor=2", "schedule.steps_after=2", "run.name=first")
    return whole, config.with_name("first")


@pytest.mark.second
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, ""), (2, "parallel.pipeline=2 parallel.zero_stage=1"), (2, "parallel.zero_stage=3")],
)
def test_two_runs_joined_by_moments_and_schedule_equal_one_run(world_size, layout, source, halves, tmp_path):
    config, (whole, first) = source[0], halves
    read = 2 * load(config).training.global_batch_size
    own = f"run.root={tmp_path} init.from={first} init.moments={first} {layout} schedule.steps_before=2"
    second = train(config, world_size, *SHORT, *own.split(), f"training.skip_samples=[[0,{read}]]")
    for tag in ("train/loss", "train/grad_norm", "train/lr"):
        # Sums in another order, of which Adam divides by the roots of the squares.
        assert scalars(second, tag) == pytest.approx(scalars(whole, tag)[2:], rel=1e-5), tag
    unlike = train(
        config, 1, *SHORT, *own.split(), "init.moments=null", "run.name=unlike", "parallel.pipeline=1"
    )
    assert scalars(unlike, "train/loss")[1] != pytest.approx(scalars(whole, "train/loss")[3], rel=1e-4)


@pytest.mark.second
def test_moments_of_bfloat16_runs_belong_to_their_float32_master_weights(source, tmp_path):
    config = source[0]
    read = 2 * load(config).training.global_batch_size
    own = (*SHORT, f"run.root={tmp_path}", "training.dtype=bfloat16", "parallel.zero_stage=2")
    whole = train(config, 2, *own, "training.steps=4", "run.name=whole")
    train(config, 2, *own, "schedule.steps_after=2", "run.name=first")
    start_at = f"init.from={tmp_path}/first init.moments={tmp_path}/first schedule.steps_before=2"
    second = train(config, 2, *own, *start_at.split(), f"training.skip_samples=[[0,{read}]]")
    for tag in ("train/loss", "train/grad_norm", "train/lr"):
        assert scalars(second, tag) == pytest.approx(scalars(whole, tag)[2:], rel=1e-5), tag


def test_a_run_without_moments_for_this_models_weights_is_refused(source, tmp_path):
    config, _ = source
    place = f"run.root={tmp_path}"
    train(config, 1, *SHORT, place, "run.name=mechanism", "optimizer.trained=mechanism")
    run = tmp_path / "mechanism"
    with pytest.raises(
        RankFailedError, match=f"init.moments={run}: it holds no AdamW moments of this model's"
    ):
        start(
            config,
            1,
            *SHORT,
            place,
            f"init.from={run}",
            f"init.moments={run}",
            "model.attention=softmax",
            "model.attention_pattern=null",
        )


@pytest.mark.second
def test_bfloat16_weights_are_initialized_from_float32_master_weights(source, tmp_path):
    config, run = source
    own = f"run.root={tmp_path} init.from={run}/checkpoints/step_2 training.dtype=bfloat16"
    lines = train(config, 2, *SHORT, *own.split(), "parallel.zero_stage=1")
    # Every weight and activation has the three significant digits of bfloat16.
    assert lines[0]["eval/loss"] == pytest.approx(metrics(run)[-1]["eval/loss"], rel=3e-3)


def test_weights_that_only_the_model_or_the_checkpoint_has_are_listed(source, tmp_path):
    config, run = source
    own = f"run.root={tmp_path} init.from={run} model.qkv_bias=true model.num_layers=3"
    three = "[main, {preset: flurka_kernel, compression: {block_size: 16, rank: 4}}, softmax]"
    output = start(config, 1, *SHORT, *own.split(), f"model.attention_pattern={three}")
    new, left = (
        next(line for line in output.splitlines() if what in line) for what in ("new here", "left out")
    )
    assert "{1,2,3}.self_attention.qkv.bias" in new
    assert "4.self_attention.qkv.weight" in left


def test_weights_of_another_shape_are_refused_with_one_line_each(source, tmp_path):
    config, run = source
    own = f"run.root={tmp_path} init.from={run} model.ffn_hidden_size=96"
    with pytest.raises(RankFailedError) as failure:
        start(config, 2, *SHORT, *own.split(), "parallel.tensor=2")
    lines = [line for line in str(failure.value).splitlines() if "mlp" in line]
    assert len(lines) == 8, "two matrices in each of four layers"
    assert f"init.from={run}: 1.mlp.linear_fc1.weight is (512, 64) in the checkpoint and " in lines[0]
    assert "(192, 64) in the model; give the model the checkpoint's sizes" in lines[0]


def test_init_from_a_folder_without_a_run_is_refused(source, tmp_path):
    config, _ = source
    with pytest.raises(RankFailedError, match=f"init.from={tmp_path} is no run, no good"):
        start(config, 1, *SHORT, f"run.root={tmp_path}", f"init.from={tmp_path}")


def test_a_start_refused_before_its_first_step_leaves_the_run_name_free(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    with pytest.raises(RankFailedError, match=r"model\.vocab_size=10 .* remove the key"):
        start(config, 1, *SHORT, "model.vocab_size=10")
    start(config, 1, *SHORT, "training.steps=1", "training.eval_samples=0")


def truncate(checkpoint: Path) -> str:
    file = next(checkpoint.glob("*_states.pt"))
    os.truncate(file, 1000)
    return f"{file.name} has 1000 bytes instead of"


def remove_manifest(checkpoint: Path) -> str:
    (checkpoint / "complete.json").unlink()
    return "complete.json is missing"


@pytest.mark.parametrize("damage", tiered([truncate, remove_manifest], [truncate]))
def test_a_broken_newest_checkpoint_is_reported_and_the_previous_one_is_used(
    damage, source, corpus, tmp_path
):
    config = write_config(tmp_path, corpus)
    whole = train(config, 2, *SHORT)
    checkpoints = tmp_path / "run/checkpoints"
    reason = damage(checkpoints / "step_2")
    (checkpoints / "step_3.partial").mkdir()
    output = start(config, 2, *SHORT)
    assert f"{checkpoints / 'step_2'} cannot be used ({reason}" in output
    assert f"continuing from {checkpoints / 'step_1'}" in output
    assert f"removed {checkpoints / 'step_3.partial'}" in output
    assert scalars(metrics(tmp_path / "run"), "train/loss") == scalars(whole, "train/loss")


@pytest.mark.second
def test_a_conversion_of_an_earlier_version_is_left_alone_and_removed_with_its_step(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    train(config, 2, *SHORT, "parallel.tensor=2", "schedule.name=constant")
    folder = tmp_path / "run/checkpoints/step_2/universal"
    (folder / "zero").mkdir(parents=True)
    longer = ("training.steps=3", "schedule.name=constant")
    output = start(config, 1, *SHORT, *longer)
    assert f"reshaping {folder.parent}: tensor 2 -> 1" in output
    assert list(folder.iterdir()) == [folder / "zero"]
    train(config, 1, *SHORT, *longer, "training.steps=4", "checkpoint.keep=1")
    assert not folder.exists()
