"""Loss and gradients of a padded vocabulary over tensor ranks, one of which has only padding."""

import pytest
import torch

from megakernel.config import Model
from megakernel.model import ModelSettings
from megakernel.model.head import token_losses
from megakernel.model.vocabulary_loss import DistillationTarget
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.unit.model.test_vocabulary_loss import (
    OBJECTIVES,
    VOCAB_SIZE,
    compute_loss,
    expected,
    expected_z_loss,
    random_inputs,
)

LOCAL_VOCAB_SIZES = [16, 16, 8, 0]
"""Vocabulary entries of each rank, whose shard of the embedding has 16 rows."""


def z_losses_over_ranks():
    """Each rank's sums of cross entropy and z-loss, and the gradients of the hidden states and of its rows."""
    with cpu_mesh(tensor=len(LOCAL_VOCAB_SIZES)) as mesh:
        (hidden, head, *_), targets = random_inputs(torch.float64)
        own = head.chunk(len(LOCAL_VOCAB_SIZES))[mesh.tp.rank].clone()
        learned = hidden.requires_grad_(), own.requires_grad_()
        local, group = LOCAL_VOCAB_SIZES[mesh.tp.rank], mesh.tp.group
        loss, sums = compute_loss(*learned, targets, 8, None, local, group, z_loss=0.5)
        return sums.tolist(), *torch.autograd.grad(loss, learned)


def losses_over_ranks():
    """Each rank's loss with the gradients of the hidden states and of its rows, and the loss of an evaluation."""
    results = []
    with cpu_mesh(tensor=len(LOCAL_VOCAB_SIZES)) as mesh:
        for weights in OBJECTIVES.values():
            (hidden, head, teacher_hidden, teacher_head), targets = random_inputs(torch.float64)
            head, teacher_head = (
                x.chunk(len(LOCAL_VOCAB_SIZES))[mesh.tp.rank].clone() for x in (head, teacher_head)
            )
            distillation = (
                None if weights is None else DistillationTarget(teacher_hidden, teacher_head, **weights)
            )
            learned = hidden.requires_grad_(), head.requires_grad_()
            loss, _ = compute_loss(
                *learned, targets, 8, distillation, LOCAL_VOCAB_SIZES[mesh.tp.rank], mesh.tp.group
            )
            results.append((loss.item(), *torch.autograd.grad(loss, learned)))
        (hidden, head, *_), targets = random_inputs(torch.float32)
        own = head.chunk(len(LOCAL_VOCAB_SIZES))[mesh.tp.rank]
        model = Model(num_layers=1, hidden_size=hidden.shape[1], num_heads=1, vocab_multiple=len(head))
        settings = ModelSettings(model, sum(LOCAL_VOCAB_SIZES), mesh, loss_chunk_size=8)
        assert settings.local_vocab_size == LOCAL_VOCAB_SIZES[mesh.tp.rank]
        measured = token_losses(own, hidden[:, None], targets[None], settings).sum()
    return results, measured.item()


def test_padding_rows_affect_loss_and_gradients_on_no_rank():
    trained, measured = zip(*run_ranks(losses_over_ranks, len(LOCAL_VOCAB_SIZES)), strict=True)
    right, _ = expected(*random_inputs(torch.float32), None)
    assert measured == pytest.approx([right.item()] * len(LOCAL_VOCAB_SIZES), rel=1e-6)
    for *ranks, weights in zip(*trained, OBJECTIVES.values(), strict=True):
        tensors, targets = random_inputs(torch.float64)
        learned = [x.requires_grad_() for x in tensors[:2]]
        loss, _ = expected(tensors, targets, weights)
        of_hidden, of_head = torch.autograd.grad(loss, learned)
        assert [rank[0] for rank in ranks] == pytest.approx([loss.item()] * len(LOCAL_VOCAB_SIZES), rel=1e-12)
        # The gradients of the hidden states sum over ranks, as each rank has the part from its rows.
        torch.testing.assert_close(sum(rank[1] for rank in ranks), of_hidden)
        torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), of_head)


def test_the_z_loss_is_that_of_the_whole_vocabulary():
    ranks = run_ranks(z_losses_over_ranks, len(LOCAL_VOCAB_SIZES))
    tensors, targets = random_inputs(torch.float64)
    assert sum(LOCAL_VOCAB_SIZES) == VOCAB_SIZE
    learned = [x.requires_grad_() for x in tensors[:2]]
    cross_entropy, z_loss = expected(tensors, targets, None)[0], expected_z_loss(*learned, targets, 0.5)
    of_hidden, of_head = torch.autograd.grad(cross_entropy + z_loss, learned)
    for sums, _, _ in ranks:
        assert sums == pytest.approx([cross_entropy.item(), z_loss.item()], rel=1e-12)
    torch.testing.assert_close(sum(rank[1] for rank in ranks), of_hidden)
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), of_head)
