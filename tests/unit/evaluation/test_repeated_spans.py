"""A span that stands twice, to a model that copies what followed the same token, and to one that does not."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megakernel.evaluation.repeated_spans import UNSCORED, measure_repeated, random_spans
from tests.unit.evaluation.test_answers import subject

VOCABULARY = 257
SPAN = 40


class Copier:
    """A model that is nearly sure of what followed this token when it stood before, else even."""

    settings = SimpleNamespace(loss_chunk_size=7)

    def hidden(self, tokens, positions):
        assert torch.equal(positions[0], torch.arange(2 * SPAN - 1))
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        for row, place in torch.cartesian_prod(
            torch.arange(len(tokens)), torch.arange(1, tokens.shape[1])
        ).tolist():
            if len(before := (tokens[row, :place] == tokens[row, place]).nonzero()):
                logits[row, place] = 100.0 * F.one_hot(tokens[row, before[-1, 0] + 1], VOCABULARY)
        return logits.transpose(0, 1)

    def logits(self, hidden):
        return hidden.transpose(0, 1)


def test_what_is_read_again_is_scored_behind_its_beginning():
    spans = torch.stack([torch.randperm(VOCABULARY)[:SPAN] for _ in range(3)])
    told = []
    first, second, right = measure_repeated(subject(Copier()), spans, 2, lambda *done: told.append(done))
    assert first == pytest.approx(torch.tensor(float(VOCABULARY)).log().item())
    assert second == pytest.approx(0, abs=1e-6)
    assert right == 1
    assert told == [(1, 2), (2, 2)]


def test_both_readings_score_the_same_tokens():
    model = Copier()
    seen = []
    model.logits = lambda hidden: seen.append(hidden.shape[0]) or hidden.transpose(0, 1)
    measure_repeated(subject(model), torch.stack([torch.randperm(VOCABULARY)[:SPAN]]), 1, lambda *_: None)
    assert sum(seen) == 2 * (SPAN - 1 - UNSCORED)


def test_random_spans_are_the_same_for_every_run():
    spans = random_spans(4, 32, VOCABULARY)
    assert spans.shape == (4, 32)
    assert spans.unique().numel() > 60
    assert torch.equal(spans, random_spans(4, 32, VOCABULARY))
