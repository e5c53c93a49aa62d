"""The parts around a mechanism: a short convolution before it, a norm and a gate per head after it."""

import pytest
import torch

from megakernel.config import Model
from megakernel.config.mechanisms import LayerShape
from megakernel.model.self_attention import SelfAttention, absent_in_dense
from megakernel.model.settings import ModelSettings, seeded_by
from megakernel.ops.short_convolution import short_convolution
from megakernel.parallel import OneProcess
from tests.unit.attention.shards import in_shards
from tests.unit.config.trees import problems

WIDTH, HEADS, KEY_HEADS, SIZE, TOKENS = 16, 4, 2, 6, 24
SHAPE = {
    "num_layers": 1,
    "hidden_size": WIDTH,
    "num_heads": HEADS,
    "num_kv_heads": KEY_HEADS,
    "head_dim": SIZE,
}
PARTS = {"short_convolution": 4, "output_norm": True, "output_gate": "silu"}
POSITIONS = torch.stack([torch.arange(TOKENS), torch.cat([torch.arange(n) for n in (2, 11, 1, 10)])])
TREES = {
    "decay": {"preset": "retnet", **PARTS},
    "kernel": {"preset": "linear", **PARTS},
    "sigmoid": {"preset": "linear", "output_gate": "sigmoid"},
    "norm": {"preset": "linear", "output_norm": True},
    "convolution": {"preset": "linear", "short_convolution": 2},
    "softmax": {"preset": "softmax", **PARTS},
}


def layer(tree, **sizes):
    model = Model.model_validate({**SHAPE, "position": "none", "attention": tree, **sizes})
    with seeded_by(0, "layer"):
        module = SelfAttention(ModelSettings(model, vocab_size=8, mesh=OneProcess()), 0).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return module


def hidden(seed=2):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, 2, WIDTH, generator=draw, dtype=torch.float64, requires_grad=True)


def convolved(weight, vectors, positions):
    """Convolution and SiLU of one head, token by token, without taps outside of the token's document."""
    rows = []
    for i, vector in enumerate(vectors):
        total = weight[:, -1] * vector
        for back in range(1, weight.shape[1]):
            if positions[i] >= back:
                total = total + weight[:, -1 - back] * vectors[i - back]
        rows.append(total / (1 + torch.exp(-total)))
    return torch.stack(rows)


def reference(module, tree, hidden, positions):
    """Equations 1.2, 9.1, 9.4, 10.1 and 10.2, one sequence, head and token at a time."""
    kind, tree = tree["preset"], {key: tree.get(key) for key in PARTS}
    whole = torch.zeros(TOKENS, 2, HEADS * SIZE, dtype=torch.float64)
    for row in range(2):
        row_positions = positions[row]
        for head in range(HEADS):
            key_head, query = divmod(head, HEADS // KEY_HEADS)
            matrix = module.qkv.weight.view(KEY_HEADS, -1, SIZE, WIDTH)[key_head]
            q, k, v = (hidden[:, row] @ matrix[part].T for part in (query, -2, -1))
            if tree["short_convolution"]:
                taps = module.short_convolution.weight[key_head]
                q, k, v = (
                    convolved(taps[part], x, row_positions) for part, x in ((query, q), (-2, k), (-1, v))
                )
            for i in range(TOKENS):
                numerator, denominator = torch.zeros(SIZE, dtype=torch.float64), 0.0
                for j in range(i - int(row_positions[i]), i + 1):
                    if kind == "retnet":
                        weight = (1 - 2.0 ** (-5 - key_head)) ** (i - j) * (q[i] @ k[j]) / SIZE**0.5
                    elif kind == "softmax":
                        weight = (q[i] @ k[j] / SIZE**0.5).exp()
                    else:
                        weight = (torch.nn.functional.elu(q[i]) + 1) @ (torch.nn.functional.elu(k[j]) + 1)
                    numerator, denominator = numerator + weight * v[j], denominator + weight
                denominator = 1.0 if kind == "retnet" else denominator
                if tree["output_norm"]:
                    # The norm of the numerator: the denominator is a positive number that only affects eps.
                    size = (numerator.square().mean() + 1e-5 * denominator**2).sqrt()
                    out = numerator / size * module.output_norm.weight
                else:
                    out = numerator / denominator
                if tree["output_gate"]:
                    logits = module.output_gate.weight[head * SIZE : (head + 1) * SIZE] @ hidden[i, row]
                    gate = 1 / (1 + torch.exp(-logits))
                    out = out * (gate * logits if tree["output_gate"] == "silu" else gate)
                whole[i, row, head * SIZE : (head + 1) * SIZE] = out
    return whole @ module.output.weight.T


@pytest.mark.parametrize("name", TREES)
def test_layer_values_and_gradients_equal_the_formulas(name):
    module, x = layer(TREES[name]), hidden()
    outputs = module(x, POSITIONS)[0], reference(module, TREES[name], x, POSITIONS)
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    leaves = [x, *module.parameters()]
    found, expected = (torch.autograd.grad(out.sin().sum(), leaves) for out in outputs)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


MIXED = {"preset": "mamba2", "short_convolution": 5}
FLURKA = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}, "mixture": {}, **PARTS}


def decoded(module, x, positions):
    """Outputs of decoding: one token, then several at once, then the rest one by one."""
    state, outputs = None, []
    for start, end in ((0, 1), (1, 3), (3, 12), *((i, i + 1) for i in range(12, TOKENS))):
        (out, _), state = module.extend(x[start:end], positions[:, start:end], state)
        outputs.append(out)
    return torch.cat(outputs)


@pytest.mark.parametrize("packed", [False, True])
def test_softmax_decodes_with_convolution_norm_and_gate(packed):
    module, x = layer(TREES["softmax"], position="rope"), hidden()
    positions = POSITIONS if packed else POSITIONS[:1].expand(2, -1)
    torch.testing.assert_close(decoded(module, x, positions), module(x, positions)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tree", [MIXED, FLURKA], ids=["mamba2", "flurka"])
@pytest.mark.parametrize("packed", [False, True])
def test_shards_and_decoding_equal_the_whole_sequence(tree, packed):
    module, x = layer(tree, position="rope"), hidden()
    positions = POSITIONS if packed else POSITIONS[:1].expand(2, -1)
    whole, _ = module(x, positions)

    def part(shard):
        sharded = layer(tree, position="rope")
        sharded.load_state_dict(module.state_dict())
        sharded.cp_shard = shard
        return sharded(x.chunk(shard.size)[shard.rank], positions.chunk(shard.size, 1)[shard.rank])[0]

    shards = torch.cat(in_shards(3, part))
    torch.testing.assert_close(shards, whole, rtol=1e-10, atol=1e-10)
    input_gradients = (
        torch.autograd.grad(out.sin().sum(), x, retain_graph=True)[0] for out in (shards, whole)
    )
    torch.testing.assert_close(*input_gradients, rtol=1e-10, atol=1e-10)

    torch.testing.assert_close(decoded(module, x, positions), whole, rtol=1e-10, atol=1e-10)


def test_a_convolution_does_not_cross_documents():
    draw = torch.Generator().manual_seed(0)
    x, weight, before = (torch.randn(s, generator=draw) for s in ((2, 9, 3), (2, 3, 4), (1, 2, 3, 3)))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    whole = short_convolution(x[None], weight, before, positions)
    for start, end in ((0, 4), (4, 7), (7, 9)):
        alone = short_convolution(x[None, :, start:end], weight, torch.zeros_like(before), 0)
        # The length of a sequence affects how SiLU is vectorized.
        torch.testing.assert_close(whole[:, :, start:end], alone, rtol=1e-6, atol=1e-6)


def test_state_operations_and_parameters_are_counted():
    plain, with_parts = (
        Model.model_validate({**SHAPE, "attention": {"preset": "linear", **parts}}) for parts in ({}, PARTS)
    )
    module, x = layer({"preset": "linear", **PARTS}), hidden()
    _, (core, before) = module.extend(x, POSITIONS, None)
    shape = LayerShape(HEADS, KEY_HEADS, SIZE, WIDTH)
    sizes = with_parts.attention.state_sizes(shape)
    assert sizes == (before[0].numel() + core.sums[0].numel(), 0)
    more = {
        k: n - plain.attention.flops(shape).get(k, 0) for k, n in with_parts.attention.flops(shape).items()
    }
    weights = {name: x.numel() for name, x in module.named_parameters()}
    assert more["convolution"] == 2 * weights["short_convolution.weight"]
    assert more["projections"] == 2 * weights["output_gate.weight"]
    assert with_parts.attention.optional_parameters(shape) == (weights["short_convolution.weight"], SIZE)


def test_a_convolution_with_a_bidirectional_mechanism_is_refused():
    tree = {"preset": "linformer", "short_convolution": 4}
    with pytest.raises(ValueError, match="short_convolution=4 looks back only, and linformer"):
        Model.model_validate({**SHAPE, "kind": "masked_lm", "attention": tree})


def test_attention_transfer_refuses_mechanisms_with_further_inputs():
    stages = {"init": {"from": "dense"}, "uptrain": {"transfer": {"steps": 4}}}
    found = problems(model={"attention": {"mechanism": "simple_gla"}}, **stages)["uptrain.transfer"]
    assert "a layer has further inputs" in found.reason
    assert "set null" in found.remedy
    assert "uptrain.transfer" not in problems(model={"attention": "retnet"}, **stages)


def test_context_parallel_shards_must_be_as_long_as_a_convolution():
    attention = {"preset": "mamba2", "short_convolution": 257}
    assert "training.seq_len" not in problems(model={"attention": attention}, parallel={"context": 2})
    attention["short_convolution"] = 258
    found = problems(model={"attention": attention}, parallel={"context": 2})["training.seq_len"]
    assert "windows of 257 tokens within each" in found.reason


def test_parameters_absent_in_dense_models_are_recognized():
    dense = dict(layer("softmax").named_parameters())
    with_parts = {"preset": "flurka_decay", **PARTS}
    new = {
        f"decoder.self_attention.{name}"
        for name, _ in layer(with_parts).named_parameters()
        if name not in dense
    }
    assert len({name.split(".")[2] for name in new}) == 5, "the core and the parts around it"
    assert all(absent_in_dense(name) for name in new)
    assert not any(absent_in_dense(f"decoder.self_attention.{name}") for name in dense)
