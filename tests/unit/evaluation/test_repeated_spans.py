"""Repeated spans, for a model that copies what followed the same token before."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megakernel.evaluation.repeated_spans import UNSCORED, measure_repeated, random_spans
from megakernel.evaluation.run import parse
from tests.unit.evaluation.test_answers import subject

VOCABULARY = 257
SPAN = 40


class Copier:
    """A model that predicts what followed this token before, or uniformly if it is new."""

    settings = SimpleNamespace(loss_chunk_size=7)

    def hidden(self, tokens, positions):
        assert torch.equal(positions[0], torch.arange(2 * SPAN - 1))
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        for row, index in torch.cartesian_prod(
            torch.arange(len(tokens)), torch.arange(1, tokens.shape[1])
        ).tolist():
            if len(before := (tokens[row, :index] == tokens[row, index]).nonzero()):
                logits[row, index] = 100.0 * F.one_hot(tokens[row, before[-1, 0] + 1], VOCABULARY)
        return logits.transpose(0, 1)

    def logits(self, hidden):
        return hidden.transpose(0, 1)


def test_the_repetition_is_scored_after_its_first_tokens():
    spans = torch.stack([torch.randperm(VOCABULARY)[:SPAN] for _ in range(3)])
    progress = []
    first, second, right = measure_repeated(subject(Copier()), spans, 2, lambda *done: progress.append(done))
    assert first == pytest.approx(torch.tensor(float(VOCABULARY)).log().item())
    assert second == pytest.approx(0, abs=1e-6)
    assert right == 1
    assert progress == [(1, 2), (2, 2)]


def test_both_occurrences_are_scored_on_the_same_tokens():
    model = Copier()
    scored = []
    model.logits = lambda hidden: scored.append(hidden.shape[0]) or hidden.transpose(0, 1)
    measure_repeated(subject(model), torch.stack([torch.randperm(VOCABULARY)[:SPAN]]), 1, lambda *_: None)
    assert sum(scored) == 2 * (SPAN - 1 - UNSCORED)


def test_random_ids_need_no_data():
    (task,) = parse(["lm:repeated=random"], samples=3, seq_len=2 * SPAN)
    run = subject(Copier())
    assert run.corpora is None
    assert task.split is None
    task.check(run)
    assert task.measure(run, lambda *_: None).span == SPAN


def test_random_spans_are_deterministic():
    spans = random_spans(4, 32, VOCABULARY)
    assert spans.shape == (4, 32)
    assert spans.unique().numel() > 60
    assert torch.equal(spans, random_spans(4, 32, VOCABULARY))
