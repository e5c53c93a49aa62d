"""Causal layers that see landmarks alone, whose keys and values are projected from a pooled input."""

import pytest
import torch

from megakernel.attention import AttentionInputs, build
from megakernel.config import Model
from megakernel.config.mechanisms import LayerShape
from megakernel.model.flops import matrix_flops
from megakernel.model.self_attention import SelfAttention
from megakernel.model.settings import ModelSettings, seeded_by
from megakernel.parallel import OneProcess
from tests.unit.attention.shards import in_shards
from tests.unit.config.trees import problems

WIDTH, HEADS, KEY_HEADS, SIZE, TOKENS, BLOCK, RANK = 16, 4, 2, 6, 24, 4, 2
SHAPE = {
    "num_layers": 1,
    "hidden_size": WIDTH,
    "num_heads": HEADS,
    "num_kv_heads": KEY_HEADS,
    "head_dim": SIZE,
}
PARTS = {"short_convolution": 4, "output_norm": True, "output_gate": "silu"}
BLOCKS = {"kind": "block", "block_size": BLOCK, "rank": RANK}
ELU = {"similarity": "kernel", "feature_map": {"name": "elu"}}
TREES = {
    "plain": {**ELU, "compression": BLOCKS},
    "shared pool": {**ELU, "compression": {**BLOCKS, "share_kv": True}},
    "means": {**ELU, "compression": {"kind": "pool", "block_size": BLOCK}},
    "with parts around it": {**ELU, "compression": BLOCKS, **PARTS},
    "hedgehog, rotated": {"preset": "hedgehog", "compression": BLOCKS, "far_rope": "centroid", **PARTS},
    "mixture": {"preset": "mlk", "compression": BLOCKS},
}
DOCUMENTS = torch.stack([torch.cat([torch.arange(n) for n in rows]) for rows in ((24,), (2, 11, 1, 10))])


def layer(tree):
    position = "rope" if "far_rope" in tree else "none"
    model = Model.model_validate({**SHAPE, "position": position, "qkv_bias": True, "attention": tree})
    with seeded_by(0, "layer"):
        module = SelfAttention(ModelSettings(model, vocab_size=8, mesh=OneProcess()), 0).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return module


def hidden():
    draw = torch.Generator().manual_seed(2)
    return torch.randn(TOKENS, 2, WIDTH, generator=draw, dtype=torch.float64, requires_grad=True)


def phi(x):
    return torch.nn.functional.elu(x) + 1


def reference(module, hidden):
    """Equation 4.2 without a window, one sequence, head, token and earlier block at a time."""
    pools = module.core.compressor.pools(hidden).double()
    whole = torch.zeros(TOKENS, 2, HEADS * SIZE, dtype=torch.float64)
    weights = module.qkv.weight.view(KEY_HEADS, -1, SIZE, WIDTH)
    biases = module.qkv.bias.view(KEY_HEADS, -1, SIZE)
    for row in range(2):
        for head in range(HEADS):
            key_head, query = divmod(head, HEADS // KEY_HEADS)
            (w_q, w_k, w_v), (b_q, b_k, b_v) = (x[key_head][[query, -2, -1]] for x in (weights, biases))
            for i in range(TOKENS):
                start = i - int(DOCUMENTS[row, i])
                blocks = [slice(s, s + BLOCK) for s in range(start, i - BLOCK + 1, BLOCK) if s + BLOCK <= i]
                if not blocks:
                    continue
                q = phi(w_q @ hidden[i, row] + b_q)
                keys = torch.cat([pools[0] @ hidden[block, row] @ w_k.T + b_k for block in blocks])
                values = torch.cat([pools[-1] @ hidden[block, row] @ w_v.T + b_v for block in blocks])
                scores = phi(keys) @ q
                whole[i, row, head * SIZE : (head + 1) * SIZE] = scores @ values / scores.sum()
    return whole @ module.output.weight.T


@pytest.mark.parametrize("name", ["plain", "shared pool", "means"])
def test_values_and_gradients_equal_the_formula(name):
    """Biases are added to landmarks; a document's first block gives 0, and so does a document shorter than one."""
    module, x = layer(TREES[name]), hidden()
    outputs = module(x, DOCUMENTS)[0], reference(module, x)
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
    assert not outputs[0][:BLOCK].any()
    leaves = [x, *module.parameters()]
    found, expected = (torch.autograd.grad(out.sin().sum(), leaves) for out in outputs)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)
        assert wanted.any()


@pytest.mark.parametrize("name", TREES)
def test_shards_and_decoding_equal_the_whole_sequence(name):
    module, x = layer(TREES[name]), hidden()
    whole, _ = module(x, DOCUMENTS)

    def part(shard):
        sharded = layer(TREES[name])
        sharded.load_state_dict(module.state_dict())
        sharded.cp_shard = shard
        return sharded(x.chunk(shard.size)[shard.rank], DOCUMENTS.chunk(shard.size, 1)[shard.rank])[0]

    shards = torch.cat(in_shards(3, part))
    torch.testing.assert_close(shards, whole, rtol=1e-10, atol=1e-10)
    gradients = (torch.autograd.grad(out.sin().sum(), x, retain_graph=True)[0] for out in (shards, whole))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)

    state, outputs = None, []
    for start, end in ((0, 1), (1, 3), (3, 12), *((i, i + 1) for i in range(12, TOKENS))):
        (out, _), state = module.extend(x[start:end], DOCUMENTS[:, start:end], state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TREES)
def test_state_operations_and_parameters_are_counted(name):
    module, attention = (
        layer(TREES[name]),
        Model.model_validate({**SHAPE, "attention": TREES[name]}).attention,
    )
    _, state = module.extend(hidden(), DOCUMENTS, None)
    core, before = state if module.short_convolution is not None else (state, None)
    numbers = (
        core.far.sums[0].numel() + core.open_block[0].numel() + (0 if before is None else before[0].numel())
    )
    shape = LayerShape(HEADS, KEY_HEADS, SIZE, WIDTH)
    assert attention.state_sizes(shape) == (numbers, 0)
    filters = 0 if before is None else module.short_convolution.weight.numel()
    assert attention.flops(shape).get("convolution", 0) == 2 * filters
    assert attention.optional_parameters(shape)[0] == filters


def test_keys_and_values_cost_rank_over_block_size_of_those_of_every_token():
    pooled, whole = (
        Model.model_validate({**SHAPE, "attention": tree}) for tree in (TREES["plain"], {"preset": "linear"})
    )
    of_landmarks = matrix_flops(pooled, pooled.attention, RANK / BLOCK)["projections"]
    of_tokens = matrix_flops(whole, whole.attention)["projections"]
    keys_and_values = 2 * 2 * WIDTH * KEY_HEADS * SIZE
    assert of_tokens - of_landmarks == (1 - RANK / BLOCK) * keys_and_values


def test_context_parallel_shards_must_hold_a_block():
    def part(shard):
        sharded = layer(TREES["plain"])
        sharded.cp_shard = shard
        return sharded(hidden()[:3], DOCUMENTS[:, :3])[0]

    with pytest.raises(ValueError, match=r"a shard of 3 tokens is shorter than compression.block_size=4"):
        in_shards(2, part)


def test_what_compressed_inputs_cannot_do_is_refused_with_the_reason():
    alone = {"preset": "hedgehog", "compression": {"kind": "block"}}
    assert "model.attention" not in problems(model={"attention": alone})
    found = problems(model={"attention": {**alone, "similarity": "softmax", "feature_map": None}})
    assert "without a near window" in found["model.attention"].reason
    assert "similarity: kernel" in found["model.attention"].remedy
    found = problems(model={"attention": alone, "qk_norm": True})
    assert "compress the input" in found["model.qk_norm"].reason
    core = build(alone, num_heads=2, head_dim=SIZE)
    q, landmarks = torch.randn(1, 2, 128, SIZE), torch.randn(1, 2, 16, SIZE)
    assert core(q, landmarks, landmarks).shape == q.shape
    with pytest.raises(ValueError, match="padding_mask is not supported by a causal layer that compresses"):
        core(q, landmarks, landmarks, AttentionInputs(padding_mask=torch.ones(1, 128)))
    with pytest.raises(ValueError, match=r"extend is not supported .* MultiheadAttention.step"):
        core.extend(q, landmarks, landmarks)
