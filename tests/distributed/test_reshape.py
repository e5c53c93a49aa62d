"""A run goes on with another layout of processes through DeepSpeed's universal checkpoint format."""

from argparse import Namespace

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from megakernel.checkpoint.reshape import reshape_run
from tests.distributed.training_run import layout, scalars, train, write_config
from tests.tiers import tiered

LEG = 2
"""Steps on one layout."""

JOURNEYS = [
    "tp2, cp2, pp2, tp2 zero 1",
    "dp2, pp2, dp2 zero 3, one process",
    "dp2 zero 1, tp2, cp2 zero 2, pp2 zero 1",
    "tp2 pp2 zero 1, tp2 dp2 zero 3, dp2 zero 2",
]
HOW_TENSOR_RANKS_SHARE = {
    "parameter_with_row_parallelism_patterns": [r".*output\.weight", r".*linear_fc2\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*linear_fc1\.weight"],
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r".*\.pool_(keys|values)"],
}
"""In DeepSpeed's words, by the names of parameters; ours comes from the parameters themselves."""

OPTIONS = ("schedule.name=constant", "logging.tensorboard=false", "training.eval_samples=0")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus):
    config = write_config(tmp_path_factory.mktemp("one"), corpus)
    return config, train(config, 1, *OPTIONS, f"training.steps={4 * LEG}")


@pytest.mark.parametrize("journey", tiered(JOURNEYS, ["dp2 zero 1, tp2, cp2 zero 2, pp2 zero 1"]))
def test_continued_on_other_layouts_the_losses_are_those_of_one_run(journey, uninterrupted, tmp_path):
    config, expected = uninterrupted
    for leg, ranks in enumerate(journey.split(", "), start=1):
        steps = f"training.steps={leg * LEG}"
        found = train(config, *layout(ranks), *OPTIONS, f"run.root={tmp_path}", steps)
        # float32 sums in another order; Adam's state and step count go along, or it would show.
        assert scalars(found, "train/loss") == pytest.approx(
            scalars(expected, "train/loss")[: leg * LEG], rel=1e-5
        )


def test_the_conversion_is_deepspeeds_own_where_it_has_one(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    train(config, *layout("tp2 dp2 zero 1"), *OPTIONS, "training.steps=2")
    ours = reshape_run(tmp_path / "run")
    theirs = tmp_path / "theirs"
    for file in ours.parent.glob("mp_rank_*_model_states.pt"):
        state = torch.load(file, weights_only=False)
        # Megatron-core's layers leave entries without a tensor, on which DeepSpeed's converter ends.
        state["module"] = {name: value for name, value in state["module"].items() if value is not None}
        torch.save(state | {"universal_checkpoint_info": HOW_TENSOR_RANKS_SHARE}, file)
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    ds_to_universal.main(
        Namespace(
            input_folder=str(ours.parent),
            output_folder=str(theirs),
            strict=True,
            inject_missing_state=False,
            **workers,
        )
    )
    parameters = sorted(path.parent.name for path in theirs.glob("zero/*/step.pt"))
    assert len(parameters) == 35
    for name in parameters:
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            expected, found = (torch.load(folder / "zero" / name / f"{key}.pt") for folder in (theirs, ours))
            torch.testing.assert_close(found["param"], expected["param"], rtol=0, atol=0)
        expected, found = (torch.load(folder / "zero" / name / "step.pt") for folder in (theirs, ours))
        assert found == expected == 2
    (buffer,) = {path.name for path in (ours / "zero").iterdir()} - set(parameters)
    assert buffer == "4.self_attention.core.projection.matrix.values", (
        "random, and joined from both tensor ranks too"
    )
    assert torch.load(ours / "zero" / buffer / "fp32.pt")["param"].shape == (4, 32, 16)
