"""Ranks that share a padded vocabulary have the loss and the gradients of its words, also a rank that has none."""

import pytest
import torch

from megakernel.model.head import _losses
from megakernel.model.vocabulary_loss import DistillationTarget
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.unit.model.test_vocabulary_loss import LESSONS, drawn, expected, found

HERE = [16, 16, 8, 0]
"""Words of each rank, of 16 rows."""


def losses_over_ranks():
    """Each rank's loss, with the gradients of the states and of its rows; and what evaluation measures."""
    results = []
    with cpu_mesh(tensor=len(HERE)) as mesh:
        for weights in LESSONS.values():
            (hidden, head, theirs, their_head), targets = drawn(torch.float64)
            head, their_head = (x.chunk(len(HERE))[mesh.tp.rank].clone() for x in (head, their_head))
            distillation = None if weights is None else DistillationTarget(theirs, their_head, **weights)
            learned = hidden.requires_grad_(), head.requires_grad_()
            loss, _ = found(*learned, targets, 8, distillation, HERE[mesh.tp.rank], mesh.tp.group)
            results.append((loss.item(), *torch.autograd.grad(loss, learned)))
        (hidden, head, *_), targets = drawn(torch.float32)
        own = head.chunk(len(HERE))[mesh.tp.rank]
        measured = _losses(own, hidden, targets, 8, HERE[mesh.tp.rank], True).sum()
    return results, measured.item()


def test_padding_counts_on_no_rank():
    trained, measured = zip(*run_ranks(losses_over_ranks, len(HERE)), strict=True)
    right, _ = expected(*drawn(torch.float32), None)
    assert measured == pytest.approx([right.item()] * len(HERE), rel=1e-6)
    for *ranks, weights in zip(*trained, LESSONS.values(), strict=True):
        tensors, targets = drawn(torch.float64)
        learned = [x.requires_grad_() for x in tensors[:2]]
        loss, _ = expected(tensors, targets, weights)
        of_hidden, of_head = torch.autograd.grad(loss, learned)
        assert [rank[0] for rank in ranks] == pytest.approx([loss.item()] * len(HERE), rel=1e-12)
        # Each rank has the part of the states' gradient that its rows give.
        torch.testing.assert_close(sum(rank[1] for rank in ranks), of_hidden)
        torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), of_head)
