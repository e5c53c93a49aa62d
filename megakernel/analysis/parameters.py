"""Number of trained parameters of a model, before it is built."""

from megakernel.config import Attention, Classifier, FeatureMap, Model
from megakernel.config.mixture import Mixture

from .low_rank_cost import compression_parameters, eva_parameters


def parameter_count(model: Model, vocab_size: int, seq_len: int) -> int:
    """Trained parameters over all processes.

    vocab_size: tokens of the tokenizer, padded here to model.vocab_multiple as the embedding is.
    seq_len: rows of a learned position table where model.max_positions is not set.
    """
    width = model.hidden_size
    rows = -(-(vocab_size + model.special_ids) // model.vocab_multiple) * model.vocab_multiple
    count = rows * width
    if model.classifier is not None:
        count += _classifier(model.classifier, width)
    elif not model.tie_embeddings:
        count += rows * width
    if model.position == "learned":
        count += (model.max_positions or seq_len) * width
    layers = sum(_layer(model, model.layer_attention(layer), seq_len) for layer in range(model.num_layers))
    return count + layers + _norm(model)


def _classifier(form: Classifier, width: int) -> int:
    seen = width * (4 if form.documents == 2 else 1)
    if form.head == "linear":
        return (seen + 1) * form.num_classes
    return (seen + 1) * width + (width + 1) * form.num_classes


def _layer(model: Model, attention: Attention, seq_len: int) -> int:
    width, size = model.hidden_size, model.head_size
    projected = (model.num_heads + (attention.keys_per_head + 1) * model.kv_heads) * size
    inner = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    matrices = width * (projected + model.num_heads * size + inner + model.ffn_size)
    biases = projected if model.qkv_bias else 0
    if model.bias:
        biases += width + inner + width
    head_norms = 2 * size if model.qk_norm else 0
    return matrices + biases + head_norms + 2 * _norm(model) + _mechanism(model, attention, seq_len)


def _norm(model: Model) -> int:
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def _mechanism(model: Model, attention: Attention, seq_len: int) -> int:
    """What the attention itself learns: feature maps, landmarks, masses, gates."""
    heads, kv_heads, size = model.num_heads, model.kv_heads, model.head_size
    count = 0 if attention.feature_map is None else _feature_map(attention.feature_map, kv_heads, size)
    compression, near = attention.compression, attention.near
    if attention.mixture is not None:
        count += _mixture(attention.mixture, kv_heads, size)
    if attention.nystromformer is not None:
        count += heads * (attention.nystromformer.conv_kernel or 0)
    if attention.mechanism == "eva":
        count += eva_parameters(size)
    if compression is None:
        return count
    count += compression_parameters(compression, kv_heads, model.max_positions or seq_len)
    if near is None:
        return count
    if near.kind == "kernel":
        return count + kv_heads
    return count + heads * (size + 1 if (near.join, near.gate) == ("gated", "token") else 1)


def _mixture(form: Mixture, kv_heads: int, size: int) -> int:
    """Shifts, and priors that are learned by gradients."""
    shifts = form.keys * size if form.kind == "shifted" else 0
    priors = form.keys if form.estep == "soft" and not form.m_step else 0
    return kv_heads * (shifts + priors)


def _feature_map(form: FeatureMap, kv_heads: int, size: int) -> int:
    """What phi learns: per key head, but for the generator, which the heads of a layer share."""
    if form.name == "hedgehog":
        return kv_heads * size * size
    if form.is_gmm:
        spread = size * size if form.name == "gmm_rks" else size
        return kv_heads * (1 if form.is_tied else form.components) * (size + spread)
    if form.is_fastfood:
        diagonals = {"SGB": 3, "S": 1, "fixed": 0}[form.learn]
        return kv_heads * diagonals * form.sample_count(size) // size * 2 ** (size - 1).bit_length()
    if form.is_generative:  # 4 hidden layers with batch norm, 1 without
        return 5 * (size * size + size) + 4 * 2 * size
    return 0
