"""Megatron-core's parallel layers over the mesh give the numbers of one process, on gloo."""

import pytest
import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megakernel.parallel import replicated
from tests.distributed.ranks import cpu_mesh, run_ranks

TOKENS, BATCH, WIDTH, INNER, VOCABULARY = 6, 2, 8, 16, 12


def whole_weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (INNER, WIDTH), "down": (WIDTH, INNER), "embedding": (VOCABULARY, WIDTH)}
    shapes["scale"] = (WIDTH,)
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def token_ids():
    return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def loss_of_one_process():
    weights = {name: weight.requires_grad_() for name, weight in whole_weights().items()}
    ids = token_ids()
    hidden = torch.nn.functional.embedding(ids, weights["embedding"]).transpose(0, 1)
    hidden = hidden * weights["scale"]
    hidden = hidden + torch.tanh(hidden @ weights["up"].T) @ weights["down"].T
    logits = hidden @ weights["embedding"].T
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.T.flatten(), reduction="sum")
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items()}


def cut(weight, dimension, mesh):
    return weight.chunk(mesh.tp.size, dimension)[mesh.tp.rank]


def parallel_layers(mesh):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        tensor_model_parallel_size=mesh.tp.size,
        sequence_parallel=mesh.sequence_parallel,
        use_cpu_initialization=True,
    )
    shared = {"config": config, "tp_group": mesh.tp.group, "init_method": torch.nn.init.zeros_}
    linear = shared | {"bias": False}
    embedding = VocabParallelEmbedding(
        VOCABULARY, WIDTH, reduce_scatter_embeddings=mesh.sequence_parallel, **shared
    )
    up = ColumnParallelLinear(WIDTH, INNER, **linear)
    down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True, skip_bias_add=True, **linear)
    head = ColumnParallelLinear(WIDTH, VOCABULARY, skip_weight_param_allocation=True, **linear)
    weights = whole_weights()
    with torch.no_grad():
        embedding.weight.copy_(cut(weights["embedding"], 0, mesh))
        up.weight.copy_(cut(weights["up"], 0, mesh))
        down.weight.copy_(cut(weights["down"], 1, mesh))
    return embedding, torch.nn.Parameter(weights["scale"]), up, down, head


def loss_over_tensor_ranks(sequence_parallel):
    with cpu_mesh(tensor=2, sequence_parallel=sequence_parallel) as mesh:
        embedding, scale, up, down, head = parallel_layers(mesh)
        ids = token_ids()
        hidden = embedding(ids) if sequence_parallel else embedding(ids).transpose(0, 1)
        hidden = hidden * replicated(scale, mesh.tp.group if sequence_parallel else None)
        hidden = hidden + down(torch.tanh(up(hidden)[0]))[0]
        logits, _ = head(hidden, weight=embedding.weight)
        loss = vocab_parallel_cross_entropy(logits, ids.T.contiguous()).sum()
        loss.backward()
        grads = {"up": up.weight.grad, "down": down.weight.grad, "embedding": embedding.weight.grad}
        return loss.item(), grads | {"scale": scale.grad}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_give_the_loss_and_gradients_of_one_process(sequence_parallel):
    loss, grads = loss_of_one_process()
    results = run_ranks(loss_over_tensor_ranks, 2, sequence_parallel)
    for rank, (actual, parts) in enumerate(results):
        assert actual == pytest.approx(loss, rel=1e-6)
        expected = {name: grads[name].chunk(2, 0)[rank] for name in ("up", "embedding")}
        expected |= {"down": grads["down"].chunk(2, 1)[rank], "scale": grads["scale"]}
        # float32 sums in another order.
        torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-5)


def shared_by_heads():
    with cpu_mesh(tensor=2) as mesh:
        shared = torch.ones(3, requires_grad=True)
        own = torch.ones(3, requires_grad=True)
        head = torch.arange(3.0) + mesh.tp.rank
        (replicated(shared, mesh.tp.group) * head + replicated(own, None) * head).sum().backward()
        return shared.grad.tolist(), own.grad.tolist()


def test_what_heads_share_gets_the_gradients_of_all_heads():
    assert run_ranks(shared_by_heads, 2) == [([1, 3, 5], [0, 1, 2]), ([1, 3, 5], [1, 2, 3])]
