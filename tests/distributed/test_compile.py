"""Training with compiled layers (`training.compile: layer`) has the losses of training without."""

import re

import pytest

from megakernel.model import compiled
from tests.distributed.processes import run_ranks
from tests.distributed.training_run import (
    assert_losses_close,
    layout,
    pretrain_and_return_output,
    scalars,
    train,
    write_config,
)

pytestmark = [pytest.mark.second, pytest.mark.timeout(1800)]  # Inductor takes minutes on a slow machine

OPTIONS = (
    "training.steps=3",
    "model.num_layers=2",
    "model.attention_pattern=null",
    "logging.tensorboard=false",
)


def test_a_compiled_run_has_the_losses_of_one_that_is_not_and_resumes(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    expected = train(config, 1, *OPTIONS, "run.name=eager")
    compiled = (*OPTIONS, "training.compile=layer")
    assert_losses_close(train(config, 1, *compiled, "run.name=compiled"), expected)
    train(config, 2, *layout("dp2 zero 1")[1:], *compiled, "training.steps=2", "run.name=resumed")
    # The resumed run also has the evaluation at its first end.
    losses = scalars(train(config, 2, *layout("tp2")[1:], *compiled, "run.name=resumed"), "train/loss")
    assert losses == pytest.approx(scalars(expected, "train/loss"), rel=1e-5)


LAYOUTS = {
    # In bfloat16 Inductor keeps between operations in float32 what torch rounds.
    "full recompute bfloat16 zero 1": 5e-3,
    "selective recompute cp2": 1e-5,
}
"""Layout -> relative difference of losses."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_layers_have_the_losses_of_others_with(name, corpus, tmp_path):
    ranks, *keys = layout(name)
    config = write_config(tmp_path, corpus)
    # One layer and no evaluation, whose graph is another one: Inductor takes a minute for each.
    keys = (*OPTIONS, *keys, "model.num_layers=1", "training.eval_samples=0")
    expected = train(config, ranks, *keys, "run.name=eager")
    found = train(config, ranks, *keys, "training.compile=layer", "run.name=compiled", timeout=900)
    losses = (scalars(lines, "train/loss") for lines in (found, expected))
    assert next(losses) == pytest.approx(next(losses), rel=LAYOUTS[name])


def without_inductor(config, overrides):
    """Train in this rank with graphs that run as they were traced; returns what it printed."""

    def keep(graphs, graph, inputs):
        graphs.count += 1
        return graph.forward

    compiled.Graphs.compile = keep
    return pretrain_and_return_output(config, overrides)


def test_each_length_of_a_schedule_has_at_most_two_graphs(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    lengths = "[{until_step: 2, seq_len: 32}, {until_step: 4, seq_len: 64}]"
    overrides = (
        *OPTIONS,
        "training.steps=6",
        "training.eval_every=1",
        f"training.seq_len_schedule={lengths}",
        "training.compile=layer",
        "training.profile={start: 6, steps: 1}",
    )
    (output,) = run_ranks(without_inductor, 1, config, overrides)
    found = {
        int(step): int(graphs)
        for step, graphs in re.findall(r"step (\d+): (\d+) graphs? of layers compiled", output)
    }
    # Evaluation, of the last length in all phases, begins before the first step; its graph is another one.
    assert found == {1: 2, 3: 1, 5: 1}
    assert "training.profile with training.compile=layer: layers run compiled while it records" in output
