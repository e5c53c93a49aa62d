"""A run goes on with another layout of processes through DeepSpeed's universal checkpoint format."""

import pytest

from tests.distributed.training_run import scalars, train, write_config

LEG = 2
"""Steps on one layout."""

CP2, TP2, PP2 = "parallel.context=2", "parallel.tensor=2", "parallel.pipeline=2"
ZERO = "parallel.zero_stage="
JOURNEYS = {
    "tp2, cp2, pp2, tp2 zero 1": [(2, TP2), (2, CP2), (2, PP2), (2, f"{TP2} {ZERO}1")],
    "dp2, pp2, dp2 zero 3, one process": [(2, ""), (2, PP2), (2, f"{ZERO}3"), (1, "")],
    "dp2 zero 1, tp2, cp2 zero 2, pp2 zero 1": [
        (2, f"{ZERO}1"),
        (2, TP2),
        (2, f"{CP2} {ZERO}2"),
        (2, f"{PP2} {ZERO}1"),
    ],
    "tp2 pp2 zero 1, tp2 dp2 zero 3, dp2 zero 2": [
        (4, f"{TP2} {PP2} {ZERO}1"),
        (4, f"{TP2} {ZERO}3"),
        (2, f"{ZERO}2"),
    ],
}
OPTIONS = ("schedule.name=constant", "logging.tensorboard=false", "training.eval_samples=0")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus):
    config = write_config(tmp_path_factory.mktemp("one"), corpus)
    return config, train(config, 1, *OPTIONS, f"training.steps={4 * LEG}")


@pytest.mark.parametrize("journey", list(JOURNEYS))
def test_continued_on_other_layouts_the_losses_are_those_of_one_run(journey, uninterrupted, tmp_path):
    config, expected = uninterrupted
    for leg, (world_size, layout) in enumerate(JOURNEYS[journey], start=1):
        steps = f"training.steps={leg * LEG}"
        found = train(config, world_size, *OPTIONS, f"run.root={tmp_path}", steps, *layout.split())
        # float32 sums in another order (DESIGN decision 5); Adam's state and step count go along, or it would show.
        assert scalars(found, "train/loss") == pytest.approx(
            scalars(expected, "train/loss")[: leg * LEG], rel=1e-5
        )
