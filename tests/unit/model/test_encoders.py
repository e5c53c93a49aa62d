"""Encoders in one process: attention, padding, losses and heads."""

import pytest
import torch

from megakernel.checkpoint.dense.checkpoint import vocabulary_names
from megakernel.config import PRESETS, Attention, Model, expand_preset
from megakernel.model import IGNORED, LanguageModel, ModelSettings
from megakernel.model.layer import TransformerLayer

VOCAB, CLASSES, LENGTH = 64, 3, 12
PADDING = -1
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_multiple": 64}
MECHANISMS = ["softmax", "linear", "performer", "hedgehog"]
POSITIONS = ["rope", "learned", "sinusoidal", "none"]


def build(mesh, **parts):
    if parts.get("position") == "learned":
        parts["max_positions"] = 64
    settings = ModelSettings(Model(**SIZES | parts), vocab_size=VOCAB, mesh=mesh, isolate_documents=False)
    model = LanguageModel(settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        # With the small initial weights, tokens would hardly affect each other.
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def classifier(mesh, pooling="mean", head="linear", documents=1, **parts):
    config = {"num_classes": CLASSES, "pooling": pooling, "head": head, "documents": documents}
    return build(mesh, kind="classifier", classifier=config, **{"attention": "softmax", **parts})


def logits(model, tokens, positions):
    """Logits of the classes."""
    layer_inputs = (tokens, positions)
    with torch.no_grad():
        for layer in model.layers[:-1]:
            layer_inputs = layer(layer_inputs)
        return model.layers[-1].logits(*layer_inputs)


def draw(*shape, seed=0):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def padded(document, indices, length):
    """A sequence with the document's tokens at these indices and random padding elsewhere."""
    tokens, positions = draw(1, length, seed=len(indices)), torch.full((1, length), PADDING)
    tokens[0, indices], positions[0, indices] = document[0], torch.arange(document.shape[1])
    return tokens, positions


def bidirectional_presets():
    """Every preset for encoders, with fewer landmarks than a short document has tokens."""
    for name in PRESETS:
        config = Attention.model_validate(expand_preset(name))
        if config.looks_back_only is None:
            yield name if config.compression is None else {"preset": name, "compression": {"rank": 4}}


@pytest.mark.parametrize(
    ("attention", "position"),
    [("softmax", position) for position in POSITIONS]
    + [(config, "learned") for config in bidirectional_presets()],
    ids=str,
)
def test_padding_anywhere_does_not_change_the_logits(attention, position, mesh):
    for pooling in ("mean", "cls"):
        model = classifier(mesh, pooling, attention=attention, position=position)
        document = draw(1, LENGTH, seed=3)
        alone = logits(model, document, torch.arange(LENGTH)[None])
        padding_after = padded(document, torch.arange(LENGTH), LENGTH + 5)
        padding_before = padded(document, torch.arange(LENGTH) + 5, LENGTH + 5)
        padding_between = padded(document, torch.arange(LENGTH) * 2 + 1, 2 * LENGTH + 3)
        for tokens, positions in (padding_after, padding_before, padding_between):
            # float64 sums in another order; the pooled document and its logits are float32.
            torch.testing.assert_close(logits(model, tokens, positions), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", MECHANISMS)
@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm"])
def test_masked_models_are_bidirectional_and_causal_models_causal(kind, attention, mesh):
    model = build(mesh, kind=kind, attention=attention)
    tokens, positions, ones = draw(1, LENGTH), torch.arange(LENGTH)[None], torch.ones(1)
    other = tokens.clone()
    other[0, 6] += 1
    with torch.no_grad():
        before, after = (model.losses(row, positions, tokens, ones) for row in (tokens, other))
    changed = (before != after)[0]
    assert changed[6:].all()
    assert changed[:6].any() == (kind == "masked_lm")


def test_the_loss_of_a_masked_model_counts_only_hidden_tokens(mesh):
    model = build(mesh, kind="masked_lm", attention="softmax")
    tokens, positions = draw(2, LENGTH), torch.arange(LENGTH).expand(2, -1)
    labels = torch.full_like(tokens, IGNORED)
    labels[0, 3], labels[1, :5] = 7, torch.arange(5)
    with torch.no_grad():
        loss = model(tokens, positions, labels, torch.tensor([6]))
        each = model.losses(tokens, positions, labels, torch.tensor([6]))
    torch.testing.assert_close(loss.float(), each.sum() / 6)  # Megatron's cross entropy of a token is float32
    assert ((each != 0) == (labels != IGNORED)).all()
    nothing = model(tokens, positions, torch.full_like(tokens, IGNORED), torch.tensor([6]))
    assert nothing == 0


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm"])
def test_normalized_residual_adds_attention_to_the_normed_input(normalized, kind, mesh):
    model = build(mesh, kind=kind, attention="softmax", norm="layernorm", normalized_residual=normalized)
    layer = next(part for part in model.layers if isinstance(part, TransformerLayer))
    positions, hidden = torch.arange(LENGTH)[None], torch.randn(LENGTH, 1, 32, dtype=torch.float64)
    with torch.no_grad():
        normed = layer.attention_norm(hidden)
        attended = (normed if normalized else hidden) + layer.self_attention(normed, positions)[0]
        expected = attended + layer.mlp(layer.mlp_norm(attended))[0]
        torch.testing.assert_close(layer((hidden, positions))[0], expected)
        if kind == "causal_lm":
            torch.testing.assert_close(layer.extend(hidden, positions, None)[0], expected)


def test_normalized_residual_with_a_parallel_mlp_is_refused():
    parts = {"parallel_residual": True, "normalized_residual": True}
    with pytest.raises(ValueError, match="normalized_residual=True leaves no unnormalized input"):
        Model(**SIZES | parts)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_a_classifier_returns_loss_and_accuracy_of_the_counted_examples(head, mesh):
    model = classifier(mesh, head=head)
    tokens, positions = draw(5, LENGTH), torch.arange(LENGTH).expand(5, -1)
    found = logits(model, tokens, positions)
    labels = found.argmax(-1)
    labels[1], labels[4] = (labels[1] + 1) % CLASSES, IGNORED
    with torch.no_grad():
        measured = model(tokens, positions, labels, torch.tensor([4]))
        loss = model.train()(tokens, positions, labels, torch.tensor([4]))
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(found[:4], labels[:4]))
    torch.testing.assert_close(measured, torch.stack([loss, torch.tensor(3 / 4)]))


def test_two_documents_are_encoded_separately_and_compared(mesh):
    model = classifier(mesh, documents=2, position="sinusoidal")
    head = model.layers[-1]
    assert head.output.in_features == 4 * SIZES["hidden_size"]
    tokens, positions = draw(4, LENGTH), torch.arange(LENGTH).expand(4, -1)
    both = logits(model, tokens, positions)
    torch.testing.assert_close(logits(model, tokens[2:], positions[2:]), both[1:])
    with torch.no_grad():
        layer_inputs = (tokens, positions)
        for layer in model.layers[:-1]:
            layer_inputs = layer(layer_inputs)
        a, b = layer_inputs[0].mean(0).float().view(2, 2, -1).unbind(1)
        expected = torch.cat([a, b, a * b, a - b], -1).double() @ head.output.weight.T + head.output.bias
    torch.testing.assert_close(both, expected.float())


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("tied", [True, False])
def test_layer_numbers_are_those_that_checkpoints_use(mesh, position, tied):
    model = build(mesh, kind="masked_lm", attention="softmax", position=position, tie_embeddings=tied)
    config = model.settings.model
    assert isinstance(model.layers[config.first_layer], TransformerLayer)
    assert not isinstance(model.layers[config.first_layer - 1], TransformerLayer)
    assert set(vocabulary_names(config)) <= model.state_dict().keys()


def test_sinusoidal_positions_have_the_scale_of_the_embeddings(mesh):
    model = build(mesh, kind="masked_lm", attention="softmax", position="sinusoidal", init_std=0.3)
    hidden, positions = torch.zeros(5, 1, 32, dtype=torch.float64), torch.tensor([[0, 1, 7, 300, 10**6]])
    waves = model.layers[1]((hidden, positions))[0][:, 0]
    assert waves.square().mean(1).sqrt().tolist() == pytest.approx([0.3] * 5), "at every position"
    for wave, length in enumerate(10_000 ** (torch.arange(0, 32, 2).double() / 32)):
        angle = positions[0] / length
        torch.testing.assert_close(waves[:, wave], 0.3 * 2**0.5 * angle.sin())
        torch.testing.assert_close(waves[:, 16 + wave], 0.3 * 2**0.5 * angle.cos())
