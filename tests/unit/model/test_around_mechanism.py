"""What a layer has around its mechanism: a short convolution before, a norm and a gate of each head behind."""

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


def filtered(weight, vectors, positions):
    """Of one head, token by token: the taps that lie in the token's own document, and SiLU."""
    rows = []
    for i, vector in enumerate(vectors):
        total = weight[:, -1] * vector
        for back in range(1, weight.shape[1]):
            if positions[i] >= back:
                total = total + weight[:, -1 - back] * vectors[i - back]
        rows.append(total / (1 + torch.exp(-total)))
    return torch.stack(rows)


def by_hand(module, tree, hidden, positions):
    """Equations 1.2, 9.1, 9.4, 10.1 and 10.2, one sequence, head and token at a time."""
    kind, tree = tree["preset"], {key: tree.get(key) for key in PARTS}
    whole = torch.zeros(TOKENS, 2, HEADS * SIZE, dtype=torch.float64)
    for row in range(2):
        at = positions[row]
        for head in range(HEADS):
            key_head, query = divmod(head, HEADS // KEY_HEADS)
            matrix = module.qkv.weight.view(KEY_HEADS, -1, SIZE, WIDTH)[key_head]
            q, k, v = (hidden[:, row] @ matrix[part].T for part in (query, -2, -1))
            if tree["short_convolution"]:
                taps = module.short_convolution.weight[key_head]
                q, k, v = (filtered(taps[part], x, at) for part, x in ((query, q), (-2, k), (-1, v)))
            for i in range(TOKENS):
                numerator, denominator = torch.zeros(SIZE, dtype=torch.float64), 0.0
                for j in range(i - int(at[i]), i + 1):
                    if kind == "retnet":
                        weight = (1 - 2.0 ** (-5 - key_head)) ** (i - j) * (q[i] @ k[j]) / SIZE**0.5
                    elif kind == "softmax":
                        weight = (q[i] @ k[j] / SIZE**0.5).exp()
                    else:
                        weight = (torch.nn.functional.elu(q[i]) + 1) @ (torch.nn.functional.elu(k[j]) + 1)
                    numerator, denominator = numerator + weight * v[j], denominator + weight
                denominator = 1.0 if kind == "retnet" else denominator
                if tree["output_norm"]:
                    # That of the numerator: the denominator is one positive number, which only eps could feel.
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
def test_a_layer_is_the_formulas_in_values_and_gradients(name):
    module, x = layer(TREES[name]), hidden()
    outputs = module(x, POSITIONS)[0], by_hand(module, TREES[name], x, POSITIONS)
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    learned = [x, *module.parameters()]
    found, expected = (torch.autograd.grad(out.sin().sum(), learned) for out in outputs)
    for mine, naive in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, naive, rtol=1e-9, atol=1e-9)


MIXED = {"preset": "mamba2", "short_convolution": 5}
FLURKA = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}, "mixture": {}, **PARTS}


def decoded(module, x, positions):
    """A token, some together, and the rest one by one."""
    state, outputs = None, []
    for start, end in ((0, 1), (1, 3), (3, 12), *((i, i + 1) for i in range(12, TOKENS))):
        (out, _), state = module.extend(x[start:end], positions[:, start:end], state)
        outputs.append(out)
    return torch.cat(outputs)


@pytest.mark.parametrize("packed", [False, True])
def test_softmax_decodes_with_its_parts_around(packed):
    module, x = layer(TREES["softmax"], position="rope"), hidden()
    positions = POSITIONS if packed else POSITIONS[:1].expand(2, -1)
    torch.testing.assert_close(decoded(module, x, positions), module(x, positions)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tree", [MIXED, FLURKA], ids=["mamba2", "flurka"])
@pytest.mark.parametrize("packed", [False, True])
def test_shards_and_decoding_are_the_whole_sequence(tree, packed):
    module, x = layer(tree, position="rope"), hidden()
    positions = POSITIONS if packed else POSITIONS[:1].expand(2, -1)
    whole, _ = module(x, positions)

    def part(shard):
        mine = layer(tree, position="rope")
        mine.load_state_dict(module.state_dict())
        mine.cp_shard = shard
        return mine(x.chunk(shard.size)[shard.rank], positions.chunk(shard.size, 1)[shard.rank])[0]

    shards = torch.cat(in_shards(3, part))
    torch.testing.assert_close(shards, whole, rtol=1e-10, atol=1e-10)
    slopes = (torch.autograd.grad(out.sin().sum(), x, retain_graph=True)[0] for out in (shards, whole))
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)

    torch.testing.assert_close(decoded(module, x, positions), whole, rtol=1e-10, atol=1e-10)


def test_a_document_does_not_feel_what_lies_before_it_in_its_row():
    draw = torch.Generator().manual_seed(0)
    x, weight, before = (torch.randn(s, generator=draw) for s in ((2, 9, 3), (2, 3, 4), (1, 2, 3, 3)))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    whole = short_convolution(x[None], weight, before, positions)
    for start, end in ((0, 4), (4, 7), (7, 9)):
        alone = short_convolution(x[None, :, start:end], weight, torch.zeros_like(before), 0)
        # A sequence's length decides which tokens SiLU is vectorized over.
        torch.testing.assert_close(whole[:, :, start:end], alone, rtol=1e-6, atol=1e-6)


def test_state_and_operations_are_counted():
    plain, around = (
        Model.model_validate({**SHAPE, "attention": {"preset": "linear", **parts}}) for parts in ({}, PARTS)
    )
    module, x = layer({"preset": "linear", **PARTS}), hidden()
    _, (core, before) = module.extend(x, POSITIONS, None)
    shape = LayerShape(HEADS, KEY_HEADS, SIZE, WIDTH)
    sizes = around.attention.state_sizes(shape)
    assert sizes == (before[0].numel() + core.sums[0].numel(), 0)
    more = {k: n - plain.attention.flops(shape).get(k, 0) for k, n in around.attention.flops(shape).items()}
    weights = {name: x.numel() for name, x in module.named_parameters()}
    assert more["convolution"] == 2 * weights["short_convolution.weight"]
    assert more["projections"] == 2 * weights["output_gate.weight"]
    assert around.attention.optional_parameters(shape) == (weights["short_convolution.weight"], SIZE)


def test_a_convolution_beside_a_mechanism_that_sees_later_tokens_is_refused():
    tree = {"preset": "linformer", "short_convolution": 4}
    with pytest.raises(ValueError, match="short_convolution=4 looks back only, and linformer"):
        Model.model_validate({**SHAPE, "kind": "masked_lm", "attention": tree})


def test_attention_transfer_refuses_a_state_that_reads_more_than_its_teachers_do():
    stages = {"init": {"from": "dense"}, "uptrain": {"transfer": {"steps": 4}}}
    found = problems(model={"attention": {"mechanism": "simple_gla"}}, **stages)["uptrain.transfer"]
    assert "a layer has further inputs" in found.reason
    assert "set null" in found.remedy
    assert "uptrain.transfer" not in problems(model={"attention": "retnet"}, **stages)


def test_shards_hold_what_a_convolution_of_the_next_one_looks_back_at():
    attention = {"preset": "mamba2", "short_convolution": 257}
    assert "training.seq_len" not in problems(model={"attention": attention}, parallel={"context": 2})
    attention["short_convolution"] = 258
    found = problems(model={"attention": attention}, parallel={"context": 2})["training.seq_len"]
    assert "windows of 257 tokens within each" in found.reason


def test_what_a_dense_model_lacks_is_new_to_a_model_that_starts_from_it():
    dense = dict(layer("softmax").named_parameters())
    around = {"preset": "flurka_decay", **PARTS}
    new = {
        f"decoder.self_attention.{name}" for name, _ in layer(around).named_parameters() if name not in dense
    }
    assert len({name.split(".")[2] for name in new}) == 5, "the core, and what is around it"
    assert all(absent_in_dense(name) for name in new)
    assert not any(absent_in_dense(f"decoder.self_attention.{name}") for name in dense)
