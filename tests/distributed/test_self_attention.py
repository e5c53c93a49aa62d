"""A self-attention layer with its projections over tensor-, sequence- and context-parallel ranks.

FLuRKA eq. 2 computes E X on the rank that has the tokens; short convolutions need tokens of the previous shard.
"""

import pytest
import torch

from megakernel.checkpoint.whole_tensors import partitions
from megakernel.config import Attention, Model, expand_preset
from megakernel.model.self_attention import SelfAttention
from megakernel.model.settings import ModelSettings, seeded_by
from megakernel.parallel.partition import Partition
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.tiers import tiered

BATCH, TOKENS, WIDTH, RANK = 2, 32, 16, 6
SHAPE = {"num_layers": 1, "hidden_size": WIDTH, "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}
SHORT = {"kind": "block", "block_size": 8, "rank": 3}
LAYERS = {
    "flurka_rnn": {"preset": "flurka_rnn", "compression": {"rank": RANK}},
    "flurka_performer": {"preset": "flurka_performer", "compression": {"rank": RANK, "share_kv": True}},
    "linformer": {"preset": "linformer", "compression": {"rank": RANK}},
    "mixture": {"preset": "flurka_rnn", "compression": {"rank": RANK}, "mixture": {}},
    "naive_order": {"preset": "flurka_rnn", "compression": {"rank": RANK, "compress": "projected"}},
    "per_head": {"preset": "linformer", "compression": {"rank": RANK, "per_head": True}},
    "blocks": {"similarity": "kernel", "feature_map": {"name": "elu"}, "compression": SHORT},
    "pool": {"similarity": "softmax", "compression": {"kind": "pool", "block_size": 8}},
    "mamba2": {"preset": "mamba2"},
    "softmax": {"preset": "softmax", "short_convolution": 3, "output_norm": True, "output_gate": "silu"},
    "gated_deltanet": {"preset": "gated_deltanet", "short_convolution": 3, "output_gate": "sigmoid"},
    "flurka_decay": {
        **{"preset": "flurka_decay", "short_convolution": 4, "output_norm": True},
        "compression": {"block_size": 4, "rank": 2},
    },
}
LAYOUTS = {
    "tp2": {"tensor": 2},
    "tp2 sequence parallel": {"tensor": 2, "sequence_parallel": True},
    "tp4": {"tensor": 4},  # two ranks hold the same key head
    "tp4 sequence parallel": {"tensor": 4, "sequence_parallel": True},
    "cp2": {"context": 2},
    "cp4": {"context": 4},
    "tp2 sequence parallel cp2": {"tensor": 2, "sequence_parallel": True, "context": 2},
}
FIRST_TIER = ["tp4", "cp2", "tp2 sequence parallel cp2"]


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(config, mesh):
    causal = Attention.model_validate(expand_preset(config)).looks_back_only
    kind = "causal_lm" if causal else "masked_lm"
    model = Model.model_validate({**SHAPE, "kind": kind, "position": "none", "attention": config})
    settings = ModelSettings(model.model_copy(update={"max_positions": TOKENS}), vocab_size=8, mesh=mesh)
    with seeded_by(0, "layer"):
        module = SelfAttention(settings, 0).double()
    bias = module.qkv.bias
    with torch.no_grad():  # initially 0, which would hide an error
        whole = draw(len(bias) * mesh.tp.size, seed=3)
        bias.copy_(Partition.of(bias).shard(whole, mesh.tp.rank, mesh.tp.size))
    return module


def shard_of(tensor, sizes, rank):
    """The rank's shard of (N, B, C): split over cp, then over tp."""
    cp_shard = tensor.chunk(sizes.get("context", 1), 0)[rank // sizes.get("tensor", 1)]
    return (
        cp_shard.chunk(sizes["tensor"], 0)[rank % sizes["tensor"]]
        if "sequence_parallel" in sizes
        else cp_shard
    )


def outputs_and_gradients(config, mesh, sizes):
    module = layer(config, mesh)
    hidden = shard_of(draw(TOKENS, BATCH, WIDTH, seed=1), sizes, mesh.rank).clone().requires_grad_()
    tokens = TOKENS // mesh.cp.size
    positions = torch.arange(tokens) + mesh.cp.rank * tokens
    out, _ = module(hidden, positions.expand(BATCH, -1))
    (out * shard_of(draw(TOKENS, BATCH, WIDTH, seed=2), sizes, mesh.rank)).sum().backward()
    # As in a training step: the sum over context-parallel ranks.
    gradients = {name: mesh.sum(x.grad, mesh.cp) for name, x in module.named_parameters()}
    return out.detach(), hidden.grad, gradients, partitions(module)


def run_all_layers(sizes):
    with cpu_mesh(**sizes) as mesh:
        return {name: outputs_and_gradients(config, mesh, sizes) for name, config in LAYERS.items()}


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(run_all_layers, 1, {})[0]


@pytest.fixture(scope="module", params=tiered(LAYOUTS, FIRST_TIER))
def many_processes(request):
    sizes = LAYOUTS[request.param]
    world_size = sizes.get("tensor", 1) * sizes.get("context", 1)
    return sizes, run_ranks(run_all_layers, world_size, sizes)


@pytest.mark.parametrize("name", list(LAYERS))
def test_every_layout_has_the_outputs_and_gradients_of_one_process(name, many_processes, one_process):
    out, input_gradient, gradients, _ = one_process[name]
    sizes, results = many_processes
    shards = sizes.get("tensor", 1)
    for rank, (actual, actual_input_gradient, actual_gradients, cuts) in enumerate(
        result[name] for result in results
    ):
        # float64 sums in another order.
        torch.testing.assert_close(actual, shard_of(out, sizes, rank), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            actual_input_gradient, shard_of(input_gradient, sizes, rank), rtol=1e-10, atol=1e-10
        )
        for key, gradient in actual_gradients.items():
            expected = cuts[key].shard(gradients[key], rank % shards, shards)
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
