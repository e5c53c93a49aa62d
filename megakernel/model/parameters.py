"""Number of trained parameters of a model, before it is built."""

from typing import NamedTuple

from megakernel.config import Attention, Classifier, FeatureMap, LinformerCompression, Model, PoolCompression
from megakernel.config.compression import Compression
from megakernel.config.mixture import Mixture


class Parameters(NamedTuple):
    """Trained numbers of a part of the model, over all tensor ranks."""

    cut: int
    """Those of which every tensor rank holds an equal share."""

    copied: int = 0
    """Those that every tensor rank holds whole."""

    def plus(self, other: "Parameters") -> "Parameters":
        """Both parts together."""
        return Parameters(self.cut + other.cut, self.copied + other.copied)

    def on_rank(self, tensor: int) -> int:
        """What one of `tensor` ranks holds."""
        return self.cut // tensor + self.copied


def parameter_count(model: Model, vocab_size: int, seq_len: int) -> int:
    """Trained parameters over all processes.

    vocab_size: tokens of the tokenizer, padded here to model.vocab_multiple as the embedding is.
    seq_len: rows of a learned position table where model.max_positions is not set.
    """
    rows = embedding_rows(model, vocab_size)
    parts = [embedding(model, rows), positions(model, seq_len), norm(model), head(model, rows)]
    parts += [
        layer_parameters(model, model.layer_attention(layer), seq_len) for layer in range(model.num_layers)
    ]
    return sum(part.cut + part.copied for part in parts)


def embedding_rows(model: Model, vocab_size: int) -> int:
    """Rows of the embedding for a tokenizer of `vocab_size` ids: special ids added, padded."""
    return model.embedding_rows(vocab_size + model.special_ids)


def embedding(model: Model, rows: int) -> Parameters:
    """The token embedding."""
    return Parameters(rows * model.hidden_size)


def positions(model: Model, seq_len: int) -> Parameters:
    """The learned position table."""
    learned = model.position == "learned"
    return Parameters(0, (model.max_positions or seq_len) * model.hidden_size if learned else 0)


def head(model: Model, rows: int) -> Parameters:
    """The head, without the matrix that it shares with the embedding."""
    if model.classifier is not None:
        return Parameters(0, _classifier(model.classifier, model.hidden_size))
    return Parameters(0 if model.tie_embeddings else rows * model.hidden_size)


def norm(model: Model) -> Parameters:
    """One norm."""
    return Parameters(0, model.hidden_size * (2 if model.norm == "layernorm" else 1))


def layer_parameters(model: Model, attention: Attention, seq_len: int) -> Parameters:
    """One transformer layer with this attention."""
    width, size = model.hidden_size, model.head_size
    projected = (model.num_heads + (attention.keys_per_head + 1) * model.kv_heads) * size
    inner = model.ffn_size * (2 if model.activation == "swiglu" else 1)
    cut = width * (projected + model.num_heads * size + inner + model.ffn_size)
    cut += projected if model.qkv_bias else 0
    cut += model.kv_heads * (attention.spec.further * width + attention.spec.learned)
    copied = 2 * norm(model).copied + (2 * size if model.qk_norm else 0)
    if model.bias:  # behind products that are summed over the ranks there is one bias for all
        cut, copied = cut + inner, copied + 2 * width
    return Parameters(cut, copied).plus(_mechanism(model, attention, seq_len))


def _classifier(form: Classifier, width: int) -> int:
    seen = width * (4 if form.documents == 2 else 1)
    if form.head == "linear":
        return (seen + 1) * form.num_classes
    return (seen + 1) * width + (width + 1) * form.num_classes


def _mechanism(model: Model, attention: Attention, seq_len: int) -> Parameters:
    """What the attention itself learns: feature maps, landmarks, masses, gates."""
    heads, kv_heads, size = model.num_heads, model.kv_heads, model.head_size
    form = attention.feature_map
    learned = 0 if form is None else _feature_map(form, kv_heads, size)
    shared = form is not None and form.is_generative  # one network makes the frequencies of all heads
    count = Parameters(0, learned) if shared else Parameters(learned)
    compression, near = attention.compression, attention.near
    if attention.mixture is not None:
        count = count.plus(Parameters(_mixture(attention.mixture, kv_heads, size)))
    if attention.nystromformer is not None:
        count = count.plus(Parameters(heads * (attention.nystromformer.conv_kernel or 0)))
    if attention.mechanism == "eva":
        count = count.plus(Parameters(0, eva_parameters(size)))
    if compression is None:
        return count
    pools = compression_parameters(compression, kv_heads, model.max_positions or seq_len)
    per_head = getattr(compression, "per_head", False)
    count = count.plus(Parameters(pools) if per_head else Parameters(0, pools))
    if near is None:
        return count
    if near.kind == "kernel":
        return count.plus(Parameters(kv_heads))
    return count.plus(Parameters(heads * (size + 1 if (near.join, near.gate) == ("gated", "token") else 1)))


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


def compression_parameters(compression: Compression, kv_heads: int, columns: int) -> int:
    """Entries of E and F; `columns` are Linformer's."""
    if isinstance(compression, PoolCompression):
        return 0
    owners = (kv_heads if compression.per_head else 1) * (1 if compression.share_kv else 2)
    width = columns if isinstance(compression, LinformerCompression) else compression.block_size
    return owners * compression.rank * width


def eva_parameters(head_dim: int) -> int:
    """Two matrices with bias and LayerNorm, shared by the heads of a layer."""
    return 2 * (head_dim * head_dim + 3 * head_dim)
