"""Attention over context-parallel and tensor-parallel ranks equals attention in one process."""

import pytest
import torch

from megakernel import attention
from megakernel.attention import AttentionInputs
from megakernel.config import PRESETS, Attention, expand_preset
from megakernel.config.section import merged
from megakernel.parallel import mark_head_parameters
from megakernel.parallel.tensor import head_shard
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.tiers import tiered

BATCH, HEADS, KEY_HEADS, TOKENS, DIM, BLOCK = 2, 8, 4, 64, 8, 8

ONE_BLOCK = TOKENS // BLOCK
"""The context-parallel size at which each shard is one block."""

BLOCKS = {"compression": {"block_size": BLOCK, "rank": 2}}


def is_sharded_by_tokens_and_heads(preset):
    """Whether a preset is causal and has one key per head; the others have tests of their own."""
    config = Attention.model_validate(expand_preset(preset))
    return config.mixes_future_tokens is None and config.keys_per_head == 1


CHOSEN = {"near": {"block_size": BLOCK}, "selection": {"blocks": 2, "landmarks": 2}}
TWO_BLOCKS = "flurka, two blocks, shared join, rotated landmarks"
MECHANISMS = {name: name for name in PRESETS if is_sharded_by_tokens_and_heads(name)} | {
    "flurka": {"preset": "flurka", "compression": {"block_size": BLOCK, "rank": 2}},
    "flurka_decay": {"preset": "flurka_decay", "compression": {"block_size": BLOCK, "rank": 2}},
    "flurka_kernel": {"preset": "flurka_kernel", "compression": {"block_size": BLOCK, "rank": 2}},
    "linformer_causal": {"preset": "linformer_causal", **BLOCKS},
    "eva": {"preset": "eva", "eva": {"window_size": BLOCK, "chunk_size": 4, "overlap": True}},
    "local": {"preset": "local", "near": {"block_size": BLOCK}},
    "selected": {"preset": "selected", **CHOSEN},
    "flurka_selected": {
        "preset": "flurka_selected",
        "compression": {"block_size": BLOCK, "rank": 2},
        "selection": {"blocks": 2},
    },
    "selected, each token": {"preset": "selected", **merged(CHOSEN, {"selection": {"unit": "token"}})},
    "simple_gla": {"mechanism": "simple_gla"},
    "a sliding window": {"preset": "softmax", "window": BLOCK + 1},
    "a sliding window, longer than the shortest shards": {"preset": "softmax", "window": 2 * BLOCK},
    "a sliding window with a soft cap": {"preset": "softmax", "window": 3, "softcap": 5.0},
    TWO_BLOCKS: {
        "preset": "flurka",
        "compression": {"block_size": BLOCK, "rank": 2, "per_head": True},
        "near": {"blocks": 2, "join": "shared"},
        "far_rope": "centroid",
    },
}


TWO_BLOCK_WINDOWS = (TWO_BLOCKS, "eva")
"""Mechanisms whose windows reach back by two blocks; a shard receives tokens from its left neighbor only."""


def inputs():
    """q, k, v, a weight for each output, and positions: a sequence of one document, and one of several."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, TOKENS, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    # Documents end inside shards, at their edges, and after several of them.
    packed = torch.cat([torch.arange(length) for length in (3, 13, 29, 3, 16)])
    return tensors, torch.stack([torch.arange(TOKENS), packed])


def further_of(module, k):
    """The further projection of a layer that needs one; here bounded channels of its keys."""
    return k[..., : module.spec.further].tanh() if module.spec.further else None


def layer(config, heads):
    module = attention.build(
        config, num_heads=HEADS, num_kv_heads=KEY_HEADS, head_dim=DIM, seed=(1, 2), heads=heads
    ).double()
    # Noise, because initial values do not differ between heads.
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            whole = (HEADS if len(parameter) == len(module.query_heads) else KEY_HEADS, *parameter.shape[1:])
            dimension = module.sharded_parameters().get(name)
            shape = parameter.shape if dimension is None else whole
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            parameter += noise if dimension is None else noise.chunk(heads.size, dimension)[heads.rank]
    return module


def outputs_and_gradients(config, heads=attention.ALL_HEADS, cp_shard=attention.WHOLE_SEQUENCE):
    def local_shard(x):
        return x.chunk(heads.size, 1)[heads.rank].chunk(cp_shard.size, 2)[cp_shard.rank]

    tensors, positions = inputs()
    q, k, v, weight = (local_shard(x).clone().requires_grad_() for x in tensors)
    module = layer(config, heads)
    out = module(
        q,
        k,
        v,
        AttentionInputs(
            positions=positions.chunk(cp_shard.size, 1)[cp_shard.rank],
            rotary=attention.Rotary(DIM),
            cp_shard=cp_shard,
            further=further_of(module, k),
        ),
    )
    (out * weight).sum().backward()
    parameters = {name: parameter.grad for name, parameter in module.named_parameters()}
    return (out.detach(), q.grad, k.grad, v.grad), parameters, module.sharded_parameters()


def all_mechanisms_on_ranks(sizes):
    with cpu_mesh(**sizes) as mesh:
        results = {}
        for name, config in MECHANISMS.items():
            if name in TWO_BLOCK_WINDOWS and mesh.cp.size == ONE_BLOCK:
                continue
            tensors, parameters, sharded = outputs_and_gradients(
                config, head_shard(mesh.tp), mesh.new_cp_shard()
            )
            results[name] = (
                tensors,
                {key: mesh.sum(grad, mesh.gradient) for key, grad in parameters.items()},
                sharded,
            )
        return results


LAYOUTS = [{"context": 2}, {"context": 4}, {"context": ONE_BLOCK}, {"tensor": 2, "context": 2}]
FIRST_TIER = [{"context": 4}]


@pytest.fixture(scope="module", params=tiered(LAYOUTS, FIRST_TIER), ids=str)
def layout(request):
    sizes = request.param
    heads, shards = sizes.get("tensor", 1), sizes["context"]
    return heads, shards, run_ranks(all_mechanisms_on_ranks, heads * shards, sizes)


@pytest.mark.parametrize("preset", MECHANISMS)
def test_attention_over_ranks_equals_attention_in_one_process(preset, layout):
    expected, gradients, sharded = outputs_and_gradients(MECHANISMS[preset])
    heads, shards, results = layout
    if preset not in results[0]:
        pytest.skip("a window of two blocks does not fit into a shard of one")
    for rank, (actual, parameters, _) in enumerate(result[preset] for result in results):
        head_shard, cp_shard = rank % heads, rank // heads
        for part, whole in zip(actual, expected):
            expected_part = whole.chunk(heads, 1)[head_shard].chunk(shards, 2)[cp_shard]
            # float64 sums in another order.
            torch.testing.assert_close(part, expected_part, rtol=1e-10, atol=1e-10)
        for name, gradient in parameters.items():
            whole = gradients[name]
            expected_part = whole.chunk(heads, sharded[name])[head_shard] if name in sharded else whole
            torch.testing.assert_close(gradient, expected_part, rtol=1e-10, atol=1e-10)


def tensor_parallel_flags(config):
    with cpu_mesh(tensor=2) as mesh:
        module = layer(config, head_shard(mesh.tp))
        mark_head_parameters(module)
        return {name: getattr(p, "tensor_model_parallel", False) for name, p in module.named_parameters()}


def test_head_parameters_are_marked_tensor_parallel_and_shared_ones_are_not():
    flags = run_ranks(tensor_parallel_flags, 2, MECHANISMS["flurka"])[0]
    assert {name for name, sharded in flags.items() if not sharded} == {"pool_keys", "pool_values"}
    assert {"gate_weight", "gate_bias"} <= {name for name, sharded in flags.items() if sharded}
