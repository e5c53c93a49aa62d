"""A run continues on another layout through DeepSpeed's universal checkpoint format."""

from argparse import Namespace
from threading import Thread

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from megakernel.checkpoint import reshape
from tests.distributed.training_run import layout, scalars, train, write_config

pytestmark = pytest.mark.second

STEPS_PER_LAYOUT = 2
"""Steps on each layout."""

LAYOUT_SEQUENCES = [
    "tp2, cp2, pp2, tp2 zero 1",
    "dp2, pp2, dp2 zero 3, one process",
    "dp2 zero 1, tp2, cp2 zero 2, pp2 zero 1",
    "tp2 pp2 zero 1, tp2 dp2 zero 3, dp2 zero 2",
]
UNIVERSAL_CHECKPOINT_INFO = {
    "parameter_with_row_parallelism_patterns": [r".*output\.weight", r".*linear_fc2\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*linear_fc1\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r".*\.pool_(keys|values)"],
}
"""How tensor ranks share parameters, as DeepSpeed's converter wants it; Megakernel takes it from the parameters."""

OPTIONS = ("schedule.name=constant", "logging.tensorboard=false", "training.eval_samples=0")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus):
    config = write_config(tmp_path_factory.mktemp("one"), corpus)
    return config, train(config, 1, *OPTIONS, f"training.steps={4 * STEPS_PER_LAYOUT}")


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


FEW_KEY_HEADS = (
    "model.num_kv_heads=2",
    "model.attention_pattern=[main, {preset: flurka, compression: {block_size: 16, rank: 4, per_head: true}},"
    "{preset: gated_deltanet, short_convolution: 3}, softmax]",
)
"""What two of four tensor ranks hold together: E and F per key head, a convolution, a decay."""


def test_tensor_ranks_with_the_same_key_head_write_and_read_checkpoints_of_any_layout(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    options = (*OPTIONS, *FEW_KEY_HEADS)
    expected = scalars(train(config, 1, *options, "run.name=one", "training.steps=4"), "train/loss")
    for steps, ranks in ((1, "one process"), (2, "tp4 zero 1"), (4, "tp2 sequence parallel")):
        actual = train(config, *layout(ranks), *options, f"training.steps={steps}")
    # The loss of a step depends on weights of the step before, and on moments of that before it.
    assert scalars(actual, "train/loss") == pytest.approx(expected, rel=1e-5)


def test_two_conversions_at_once_make_one(corpus, tmp_path, monkeypatch, caplog):
    config = write_config(tmp_path, corpus)
    train(config, 1, *OPTIONS, "training.steps=1")
    conversions, folders = [], []
    convert = reshape._convert

    def interrupted(*args):
        conversions.append(args)
        if len(conversions) == 1:
            other.start()
        return convert(*args)

    other = Thread(target=lambda: folders.append(reshape.reshape_run(tmp_path / "run")))
    monkeypatch.setattr(reshape, "_convert", interrupted)
    folder = reshape.reshape_run(tmp_path / "run")
    other.join()
    assert len(conversions) == 1
    assert folders == [folder]
    assert "waiting for it" in caplog.text


def test_the_universal_checkpoint_equals_the_one_of_deepspeeds_converter(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    train(config, *layout("tp2 dp2 zero 1"), *OPTIONS, "training.steps=2")
    converted = reshape.reshape_run(tmp_path / "run")
    reference = tmp_path / "reference"
    for file in converted.parent.glob("mp_rank_*_model_states.pt"):
        state = torch.load(file, weights_only=False)
        # DeepSpeed's converter fails on the entries without a tensor that Megatron-core's layers leave.
        state["module"] = {name: value for name, value in state["module"].items() if value is not None}
        torch.save(state | {"universal_checkpoint_info": UNIVERSAL_CHECKPOINT_INFO}, file)
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    ds_to_universal.main(
        Namespace(
            input_folder=str(converted.parent),
            output_folder=str(reference),
            strict=True,
            inject_missing_state=False,
            **workers,
        )
    )
    parameters = sorted(path.parent.name for path in reference.glob("zero/*/step.pt"))
    assert len(parameters) == 35
    for name in parameters:
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            expected, actual = (
                torch.load(folder / "zero" / name / f"{key}.pt") for folder in (reference, converted)
            )
            torch.testing.assert_close(actual["param"], expected["param"], rtol=0, atol=0)
        expected, actual = (
            torch.load(folder / "zero" / name / "step.pt") for folder in (reference, converted)
        )
        assert actual == expected == 2
    (buffer,) = {path.name for path in (converted / "zero").iterdir()} - set(parameters)
    assert buffer == "4.self_attention.core.projection.matrix.values", (
        "the random projection is merged from both tensor ranks too"
    )
    assert torch.load(converted / "zero" / buffer / "fp32.pt")["param"].shape == (4, 32, 16)
