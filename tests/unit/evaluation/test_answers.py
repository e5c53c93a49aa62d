"""Scoring of answers at their positions, for models with known predictions."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_pipeline.tokenizers import ByteTokenizer
from megakernel.evaluation.answer_counts import AnswerCounts, Cell, heat_map
from megakernel.evaluation.perplexity import predict
from megakernel.evaluation.run import parse
from megakernel.evaluation.subject import LoadedRun
from tests.unit.config import trees

PADDED_VOCAB_SIZE = 320
"""Padded vocabulary size, above the 257 ids."""


class NextTokenOracle:
    """A model that predicts every next token with probability 1."""

    settings = SimpleNamespace(loss_chunk_size=7)

    def __init__(self, forgets: int | None = None):
        """forgets: a token that it never predicts."""
        self.forgets = forgets

    def hidden(self, tokens, positions):
        following = tokens.roll(-1, dims=1)
        logits = 100.0 * F.one_hot(following, PADDED_VOCAB_SIZE).float()
        if self.forgets is not None:
            logits[following == self.forgets] = 0.0
        return logits.transpose(0, 1)

    def logits(self, hidden):
        return hidden.transpose(0, 1)


def subject(model, kind="causal_lm"):
    """A loaded run whose checkpoint holds `model`."""
    training = {"seq_len": 128, "micro_batch_size": 4}
    config = trees.config(model={"kind": kind, "attention": "softmax"}, training=training)
    run = SimpleNamespace(config=config, checkpoint=SimpleNamespace(step=5))
    return LoadedRun(Path("runs/x"), run, config, ByteTokenizer(), None, model, torch.device("cpu"))


def measure(spec: str, model, samples: int = 8) -> AnswerCounts:
    (task,) = parse([spec], samples)
    passes = []
    found = task.measure(subject(model), lambda *step: passes.append(step))
    assert passes[-1][0] == passes[-1][1] == len(passes)
    return found


def test_a_perfect_model_has_accuracy_1_and_loss_0():
    found = measure("mqar:pairs=4,length=32+64", NextTokenOracle())
    assert [(cell.length, cell.examples, cell.answers, cell.right) for cell in found.cells] == [
        (32, 8, 32, 32),
        (64, 8, 32, 32),
    ]
    assert found.scalars() == pytest.approx(
        {"accuracy": 1, "loss": 0, "token_accuracy": 1, "accuracy_at_32": 1, "accuracy_at_64": 1}
    )


def test_an_answer_is_right_only_if_all_of_its_tokens_are():
    # An answer is a space and five digits, of which only the space is not predicted.
    found = measure("passkey:length=256,depths=1", NextTokenOracle(forgets=ord(" ")))
    total = found.total
    assert (total.answers, total.right, total.tokens, total.right_tokens) == (8, 0, 48, 40)
    # There the prediction is uniform over the padded vocabulary.
    assert total.loss == pytest.approx(math.log(PADDED_VOCAB_SIZE) / 6)


def test_every_depth_has_equally_many_examples():
    found = measure("passkey:length=256+512,depths=3", NextTokenOracle(), samples=7)
    assert [(cell.length, cell.depth, cell.examples) for cell in found.cells] == [
        (length, depth, 3) for length in (256, 512) for depth in (0.0, 0.5, 1.0)
    ]
    table = found.table()
    assert table.columns[1:4] == ("0%", "50%", "100%")
    assert [row[0] for row in table.rows] == ["256", "512"]


def test_predictions_exclude_ids_of_the_padding():
    hidden = torch.zeros(1, 1, PADDED_VOCAB_SIZE)
    hidden[..., 300], hidden[..., 65] = 9.0, 5.0
    model = SimpleNamespace(
        hidden=lambda *_: hidden, logits=lambda h: h.transpose(0, 1), settings=NextTokenOracle.settings
    )
    one = torch.ones(1, 1, dtype=torch.int64)
    found = predict(model, 257, one, one, 65 * one, one.bool())
    assert found.right.tolist() == [True]
    assert found.losses.item() > 4


def test_counts_are_summed_over_examples():
    right = torch.tensor([True, True, False, True])
    cell = Cell(16, None).with_example(np.array([0, 2]), torch.tensor([0.0, 1.0, 2.0, 3.0]), right)
    cell = cell.with_example(np.array([0]), torch.tensor([2.0]), torch.tensor([True]))
    assert (cell.examples, cell.answers, cell.right, cell.tokens, cell.right_tokens) == (2, 3, 2, 5, 4)
    assert cell.loss == pytest.approx(8 / 5)


def test_the_heat_map_plots_every_length_and_depth():
    cells = [Cell(length, depth, 1, 1, 1, 1, 1) for length in (64, 128) for depth in (0.0, 1.0)]
    plot = heat_map(AnswerCounts("passkey", "runs/x", 3, cells))
    assert plot is not None
    assert plot.startswith(b"\x89PNG")
    assert heat_map(AnswerCounts("copy", "runs/x", 3, [Cell(64, None, 1, 1, 1, 1, 1)])) is None


@pytest.mark.parametrize(
    ("specs", "options", "explanation"),
    [
        (["pass"], {}, "--task pass is not a task; choose passkey"),
        (["lm:strid=3"], {}, "--task lm:strid=3: lm has no option strid; choose stride"),
        (["lm:far=near"], {}, "--task lm.far=near is none of the choices; choose shuffled"),
        (["mqar:samples=some"], {}, "--task mqar:samples=some is not a whole number"),
        (["mqar:length=64+"], {}, r"--task mqar.length=.* should be a valid integer"),
        (["mqar"], {"seq_len": 64}, "--seq-len 64 applies only to lm; write --task mqar:length=64"),
        (["mqar"], {"draws": 2}, "--draws 2 applies only to lm"),
    ],
)
def test_invalid_tasks_are_refused(specs, options, explanation):
    with pytest.raises(ValueError, match=explanation):
        parse(specs, **options)


@pytest.mark.parametrize(
    ("spec", "explanation"),
    [
        (
            "mqar",
            "--task mqar: model.kind=masked_lm of runs/x does not continue text; give a run of a causal_lm",
        ),
        (
            "lm:stride=8",
            "--task lm:stride=8: stride=8 needs a causal_lm, runs/x is of kind masked_lm; leave it out",
        ),
        ("lm:far=shuffled", "far=shuffled needs a causal_lm, runs/x is of kind masked_lm; leave it out"),
    ],
)
def test_tasks_that_need_a_causal_lm_refuse_an_encoder(spec, explanation):
    (task,) = parse([spec])
    with pytest.raises(ValueError, match=explanation):
        task.check(subject(None, kind="masked_lm"))


def test_an_unreadable_filler_is_refused_before_the_model_is_loaded():
    (task,) = parse(["passkey:filler=nowhere.txt"])
    with pytest.raises(
        ValueError, match=r"filler=nowhere\.txt cannot be read .* give a UTF-8 file, or sentences"
    ):
        task.check(subject(None))


def test_a_length_that_is_too_short_is_refused_before_the_model_is_loaded():
    (task,) = parse(["passkey:length=512+100"])
    with pytest.raises(ValueError, match=r"passkey:length=100 has no room .* set length=1.. or more"):
        task.check(subject(None))
