"""Encoder-decoders in one process: sources, targets, padding, and targets that are continued."""

import pytest
import torch
import torch.nn.functional as F

from megakernel import attention as attention_layers
from megakernel.config import Model
from megakernel.model import IGNORED, LanguageModel, ModelSettings
from megakernel.model.flops import forward_flops
from megakernel.model.layer import attention_cores
from megakernel.model.parameters import parameter_count

VOCAB, WIDTH, HEADS, SIZE, LENGTH = 40, 32, 4, 8, 24
FLURKA = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}}
STACKS = {
    "softmax": ("softmax", "softmax", "softmax"),
    "kernels": ("performer", "linear", "linear"),
    "kernels without a bound": ("hedgehog", "performer", "performer"),
    "FLuRKA": ({"preset": "flurka_performer", "compression": {"rank": 6}}, FLURKA, "hedgehog"),
    "mixtures": ("mgk", "mgk", "mlk"),
    "mixtures of projected keys": ("mlk", "mlk", {"preset": "mlk", "mixture": {"kind": "projected"}}),
}
"""Attention of the encoder, of the decoder, and from one to the other."""


def build(mesh, encoder, decoder, cross, *, recompute="none", **parts):
    """A model in float64, away from its small initial weights; two layers of each."""
    tree = {
        "kind": "encoder_decoder",
        "encoder": {"num_layers": 2, "attention": encoder, "cross_attention": cross},
        **{"num_layers": 2, "hidden_size": WIDTH, "num_heads": HEADS, "attention": decoder},
        **({"max_positions": LENGTH} if "flurka_performer" in str(encoder) else {}),
    }
    settings = ModelSettings(
        Model.model_validate(tree | parts), VOCAB, mesh, isolate_documents=False, recompute=recompute
    )
    model = LanguageModel(settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def batch(seed=0):
    """Rows of two sources of 20 and 9 tokens and their targets of 24 and 7, and the targets' labels."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (4, LENGTH), generator=draw)
    positions = torch.arange(LENGTH).repeat(4, 1)
    for row, length in enumerate((20, 24, 9, 7)):
        positions[row, length:] = -1
    labels = torch.randint(VOCAB, (2, LENGTH), generator=draw).where(positions[1::2] >= 0, IGNORED)
    return tokens, positions, labels, torch.tensor([24 + 7])


def padded_to(length):
    """`batch` in sequences of `length` tokens."""
    padding = (0, length - LENGTH)
    tokens, positions, labels, count = batch()
    fillers = ((tokens, 0), (positions, -1), (labels, IGNORED))
    return *(F.pad(x, padding, value=value) for x, value in fillers), count


def test_the_m_step_of_both_stacks_counts_no_padding(mesh):
    """Its priors depend on the texts, not on how long sequences may be."""
    mixture = {"preset": "mgk", "mixture": {"m_step": True}}
    found = []
    for length in (LENGTH, LENGTH + 16):
        model = build(mesh, mixture, mixture, "softmax").train()
        model(*padded_to(length))
        attention_layers.finish_step(model, lambda x: x)
        found.append([core.mixture.priors() for core in attention_cores(model).values()])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_hidden_states_are_those_of_targets(mesh):
    model, (tokens, positions, labels, count) = build(mesh, *STACKS["softmax"]), batch()
    with torch.no_grad():
        assert torch.equal(model.hidden(tokens, positions), model.body((tokens, positions, labels, count))[0])


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def attention(q, k, v, visible):
    """Softmax of (N, H, d) queries over the visible (N, S) of (S, H, d) keys, one query and head after the other."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    for token in range(len(q)):
        for head in range(q.shape[1]):
            seen = visible[token].nonzero().flatten()
            weights = (k[seen, head] @ q[token, head] / SIZE**0.5).softmax(0)
            out[token, head] = weights @ v[seen, head]
    return out.flatten(1)


def by_formula(weights, source, target):
    """Hidden states before the head of one pair, from docs/formulas.md alone."""

    def mlp(x, at):
        gate, up = (x @ weights[f"{at}.mlp.linear_fc1.weight"].T).chunk(2, -1)
        return F.silu(gate) * up @ weights[f"{at}.mlp.linear_fc2.weight"].T

    def of_itself(x, at, causal):
        rows = x @ weights[f"{at}.self_attention.qkv.weight"].T
        q, k, v = rows.view(len(x), HEADS, 3, SIZE).unbind(2)
        visible = torch.ones(len(x), len(x), dtype=torch.bool)
        out = attention(q, k, v, visible.tril() if causal else visible)
        return out @ weights[f"{at}.self_attention.output.weight"].T

    def of_source(x, memory, at):
        q = (x @ weights[f"{at}.cross_attention.query.weight"].T).view(len(x), HEADS, SIZE)
        rows = memory @ weights[f"{at}.cross_attention.key_value.weight"].T
        k, v = rows.view(len(memory), HEADS, 2, SIZE).unbind(2)
        out = attention(q, k, v, torch.ones(len(x), len(memory), dtype=torch.bool))
        return out @ weights[f"{at}.cross_attention.output.weight"].T

    embedding = weights["tied_modules.embedding.tokens.weight"]
    x, y = embedding[source], embedding[target]
    for at in (1, 2):
        x = x + of_itself(norm(x, weights[f"{at}.attention_norm.weight"]), at, causal=False)
        x = x + mlp(norm(x, weights[f"{at}.mlp_norm.weight"]), at)
    memory = norm(x, weights["3.norm.weight"])
    for at in (4, 5):
        y = y + of_itself(norm(y, weights[f"{at}.attention_norm.weight"]), at, causal=True)
        y = y + of_source(norm(y, weights[f"{at}.cross_norm.weight"]), memory, at)
        y = y + mlp(norm(y, weights[f"{at}.mlp_norm.weight"]), at)
    return norm(y, weights["6.norm.weight"])


def test_hidden_states_loss_and_gradients_are_those_of_the_formula(mesh):
    model = build(mesh, *STACKS["softmax"], position="none").train()
    weights = {name: x.detach().clone().requires_grad_() for name, x in model.named_parameters()}
    tokens, positions, labels, targets = inputs = batch()
    hidden = model.body(inputs)[0]
    total = torch.zeros((), dtype=torch.float64)
    for pair in range(2):
        lengths = (positions[2 * pair : 2 * pair + 2] >= 0).sum(1)
        source, target = (row[:length] for row, length in zip(tokens[2 * pair :], lengths))
        expected = by_formula(weights, source, target)
        torch.testing.assert_close(hidden[: lengths[1], pair], expected, atol=1e-11, rtol=1e-11)
        logits = expected @ weights["tied_modules.embedding.tokens.weight"][:VOCAB].T
        total = total + F.cross_entropy(logits, labels[pair, : lengths[1]], reduction="sum")
    loss, expected = model(*inputs), total / targets.item()
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-9)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, atol=1e-12, rtol=1e-9, msg=name)


@pytest.mark.parametrize("stack", STACKS)
def test_neither_padding_nor_later_tokens_nor_other_pairs_change_a_target(stack, mesh):
    model = build(mesh, *STACKS[stack])
    tokens, positions, *rest = batch()
    hidden = model.body((tokens, positions, *rest))[0]
    other = batch(seed=1)[0]
    changed = tokens.where(positions >= 0, other)
    changed[1, 15:] = other[1, 15:]
    changed[2:] = other[2:]
    found = model.body((changed, positions, *rest))[0]
    torch.testing.assert_close(found[:15, 0], hidden[:15, 0], atol=1e-12, rtol=0)
    assert (found[15:, 0] - hidden[15:, 0]).abs().max() > 1e-3
    changed = tokens.clone()
    changed[0, 19] = (tokens[0, 19] + 1) % VOCAB
    found = model.body((changed, positions, *rest))[0]
    assert (found[0, 0] - hidden[0, 0]).abs().max() > 1e-6, (
        "the first target sees the last token of its source"
    )


@pytest.mark.parametrize("stack", STACKS)
def test_a_target_that_is_continued_has_the_states_of_a_whole_one(stack, mesh):
    model = build(mesh, *STACKS[stack])
    tokens, positions, *rest = batch()
    whole = model.body((tokens, positions, *rest))[0]
    with torch.inference_mode():
        memory = model.encode(tokens[0::2], positions[0::2])
        states, start, found = None, 0, []
        for stop in (5, 6, 7, 13, 14, LENGTH):
            source = (memory, positions[0::2] >= 0) if states is None else ()
            hidden, states = model.extend_target(tokens[1::2, start:stop], start, states, *source)
            found.append(hidden)
            start = stop
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("stack", ["softmax", "FLuRKA"])
def test_recomputation_changes_no_gradient(stack, mesh):
    gradients = []
    for recompute in ("none", "full", "selective"):
        model = build(mesh, *STACKS[stack], recompute=recompute).train()
        model(*batch()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        for others in gradients[1:]:
            torch.testing.assert_close(others[name], gradient, atol=0, rtol=0)


@pytest.mark.parametrize(
    "parts",
    [
        {"norm_placement": "both"},
        {"norm_placement": "after", "norm": "layernorm", "bias": True, "qkv_bias": True},
        {"qk_norm": True, "num_kv_heads": 2, "attention_multiplier": 0.3},
        {"qk_norm": True, "qk_norm_width": "all", "position": "sinusoidal", "tie_embeddings": False},
        {"position": "learned", "max_positions": LENGTH, "activation": "gelu", "residual_multiplier": 0.5},
    ],
    ids=str,
)
def test_parts_of_layers_are_those_of_other_models(parts, mesh):
    """Each has an effect, and targets that are continued have the same states."""
    model = build(mesh, *STACKS["softmax"], **parts)
    tokens, positions, *rest = batch()
    whole = model.body((tokens, positions, *rest))[0]
    plain = build(mesh, *STACKS["softmax"]).body((tokens, positions, *rest))[0]
    assert (whole - plain).abs().max() > 1e-3
    with torch.inference_mode():
        memory = model.encode(tokens[0::2], positions[0::2])
        first, states = model.extend_target(tokens[1::2, :9], 0, None, memory, positions[0::2] >= 0)
        second, _ = model.extend_target(tokens[1::2, 9:], 9, states)
    real = positions[1::2].T >= 0
    torch.testing.assert_close(torch.cat([first, second])[real], whole[real], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("stack", STACKS)
def test_parameters_are_counted_without_building_them(stack, mesh):
    model = build(mesh, *STACKS[stack])
    settings = model.settings.model
    assert parameter_count(settings, VOCAB, LENGTH) == sum(x.numel() for x in model.parameters())


def test_operations_are_those_of_products_by_hand(mesh):
    """Per token of sources and targets: half of them pass through either side."""
    model = build(mesh, *STACKS["softmax"]).settings.model
    ffn = model.ffn_size
    projections = 2 * 2 * 4 * WIDTH * WIDTH  # of two layers, q, k, v and output
    cross = 2 * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH * LENGTH)  # all tokens of the source
    expected = {
        "projections": projections,
        "mlp": 2 * 2 * 3 * WIDTH * ffn,
        "near": 4 * WIDTH * LENGTH + 4 * WIDTH * (LENGTH + 1) / 2,
        "cross": cross / 2,
        "head": 2 * WIDTH * VOCAB / 2,
    }
    assert forward_flops(model, LENGTH, VOCAB) == pytest.approx(expected)
