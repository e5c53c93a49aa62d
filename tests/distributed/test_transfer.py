"""Attention transfer over tensor, context and pipeline ranks equals that of one process."""

import pytest
import torch

from megakernel.checkpoint.frozen import head_inputs
from megakernel.config import Model
from megakernel.model import IGNORED, LanguageModel, ModelSettings, stage_layers
from megakernel.model.layer import attention_cores, converted_cores
from megakernel.training.optimizer import freeze
from megakernel.uptraining.transfer import AttentionTransfer
from tests.distributed.processes import cpu_mesh, run_ranks

ROWS, TOKENS, HEADS, LAYERS = 2, 16, 4, 2
SIZES = {"hidden_size": 16, "num_heads": HEADS, "num_kv_heads": 2, "vocab_multiple": 32, "init_std": 0.5}
FLURKA = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}}


def model(mesh, attention):
    section = Model(**SIZES, num_layers=LAYERS, attention=attention)
    settings = ModelSettings(section, vocab_size=32, mesh=mesh)
    return LanguageModel(settings, stage_layers(settings)).double()


def batch(mesh):
    """This rank's tokens of two sequences, whose documents end inside shards and between them."""
    tokens = torch.randint(32, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
    packed = torch.cat([torch.arange(length) for length in (3, 7, 6)])
    positions = torch.stack([torch.arange(TOKENS), packed])
    tokens, positions = (x.chunk(mesh.cp.size, 1)[mesh.cp.rank].contiguous() for x in (tokens, positions))
    return tokens, positions, torch.full_like(tokens, IGNORED), torch.ones(1)


def run_transfer(mesh):
    """The total loss, this rank's gradients with the dimension that is sharded by heads, and the means of all heads."""
    teacher, student = model(mesh, "softmax"), model(mesh, FLURKA)
    freeze(student, "mechanism")
    trained = {name: x for name, x in student.named_parameters() if x.requires_grad}
    transfer = AttentionTransfer(
        teacher, converted_cores(student), sampled_queries=5, cross_entropy=0.3, seed=1
    )
    transfer.begin(step=2, batch_rows=ROWS)
    with transfer:
        head_inputs(teacher, batch(mesh), mesh)
    loss = transfer.loss()
    loss.backward()
    sharded = {
        id(dict(core.named_parameters())[name]): dimension
        for core in attention_cores(student).values()
        for name, dimension in core.sharded_parameters().items()
        if name in dict(core.named_parameters())
    }
    gradients = {name: (mesh.sum(x.grad, mesh.gradient), sharded.get(id(x))) for name, x in trained.items()}
    return sum(mesh.gather_objects(loss.item())), gradients, transfer.sums.means(mesh.gather_objects)


def on_ranks(sizes):
    with cpu_mesh(**sizes) as mesh:
        return run_transfer(mesh)


@pytest.fixture(scope="module")
def one_process(mesh):
    return run_transfer(mesh)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_ranks, 8, {"tensor": 2, "context": 2, "pipeline": 2})


def test_the_loss_and_gradients_match_one_process(ranks, one_process):
    loss, gradients, _ = one_process
    assert all(gradient.abs().max() > 0 for gradient, _ in gradients.values())
    named = set()
    for rank, (total, parts, _) in enumerate(ranks):
        assert total == pytest.approx(loss, rel=1e-10)
        named |= parts.keys()
        for name, (part, dimension) in parts.items():
            whole = gradients[name][0]
            expected_part = whole if dimension is None else whole.chunk(2, dimension)[rank % 2]
            # float64 sums in another order.
            torch.testing.assert_close(part, expected_part, rtol=1e-9, atol=1e-12)
    assert named == gradients.keys()


def test_every_rank_has_the_means_of_all_heads_and_layers(ranks, one_process):
    means = one_process[2]
    assert all(len(means[name]) == LAYERS for name in means)
    assert means.keys() > {"error", "cross_entropy", "far_mass", "rank_correlation"}
    for _, _, rank_means in ranks:
        for name, layers in means.items():
            for layer, expected in layers.items():
                assert expected.shape == (HEADS,)
                torch.testing.assert_close(rank_means[name][layer], expected, rtol=1e-9, atol=1e-12)
