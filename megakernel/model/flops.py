"""Floating-point operations of a model: those its formulas need, not those an implementation executes.

Conventions, all per token of one sequence of `seq_len` tokens that is a single document:
* only matrix products count, a multiplication and an addition as 2; norms, softmax, exponentials, rotations and the
  embedding lookup do not;
* full attention of an encoder counts N keys per token, padding included;
* causal attention counts the visible pairs, (N + 1) / 2 keys per token, half of what PaLM's appendix counts;
* kernel attention counts one update and one read of the state per token, D + 1 columns with the normalizer; the pairs
  inside a chunk that the chunked op also weighs, for speed, do not count;
* training is forward plus backward, which counts twice the forward; recomputation to save memory does not count;
* the tokens of an encoder-decoder are those of sources and targets, equally many: half of them pass through the encoder
  and half through the decoder, each of which reads a source of `seq_len` tokens.
"""

from collections import Counter

from megakernel.config import Attention, Model
from megakernel.config.mechanisms import LayerShape, landmarks_per_token

BACKWARD = 2


def flops_per_token(model: Model, seq_len: int, vocab_size: int, predicted: float = 1.0) -> float:
    """Forward FLOPs per token.

    vocab_size: without padding. predicted: share of the tokens that a language model's head predicts; for a masked_lm
    it is data.masking.rate.
    """
    parts = forward_flops(model, seq_len, vocab_size)
    return sum(parts.values()) - (1 - predicted) * parts["head"]


def training_flops_per_token(model: Model, seq_len: int, vocab_size: int, predicted: float = 1.0) -> float:
    """Forward and backward FLOPs per token, the numerator of MFU."""
    return (1 + BACKWARD) * flops_per_token(model, seq_len, vocab_size, predicted)


def forward_flops(model: Model, seq_len: int, vocab_size: int) -> dict[str, float]:
    """Forward FLOPs per token by part, summed over the layers.

    projections (query, key, value, output, decay, output gate), feature_map, landmarks, inverse, state, readout, near
    (exact attention, windowed or full), cross (attention of targets to their source, with its projections), far
    (landmarks and chunks under softmax), summaries (of chunks), convolution, gate, mlp, head; parts that no layer has
    are absent.
    """
    parts: Counter[str] = Counter()
    for index, attention in enumerate(model.attentions):
        keys = 1.0
        if attention.compresses_input:
            assert attention.compression is not None
            keys = landmarks_per_token(attention.compression, seq_len)
        parts.update(matrix_flops(model, attention, keys))
        parts.update(attention_flops(model, attention, seq_len, model.is_causal_layer(index)))
    # A classifier's head runs once per document.
    parts["head"] += 0 if model.classifier is not None else 2 * model.hidden_size * vocab_size
    if model.encoder is None:
        return dict(parts)
    cross = model.encoder.cross_attention
    core = sum(attention_flops(model, cross, seq_len, causal=False).values())
    parts.update({"cross": model.num_layers * (core + matrix_flops(model, cross)["projections"])})
    return {name: part / 2 for name, part in parts.items()}


def matrix_flops(model: Model, attention: Attention, keys: float = 1.0) -> dict[str, float]:
    """Forward FLOPs per token of one layer's matrices; keys: projected key positions per token."""
    heads = 2 * model.num_heads + keys * (attention.keys_per_head + 1) * model.kv_heads
    matrices = 3 if model.is_mlp_gated else 2
    parts = {"projections": model.head_size * heads, "mlp": model.ffn_size * matrices}
    return {name: 2 * model.hidden_size * part for name, part in parts.items()}


def attention_flops(
    model: Model, attention: Attention, seq_len: int, causal: bool | None = None
) -> dict[str, float]:
    """Forward FLOPs per token of one layer's attention core, by part. causal: None: as all layers of the model are."""
    sizes = (model.num_heads, model.kv_heads, model.head_size, model.hidden_size)
    return attention.flops(LayerShape(*sizes, model.is_causal if causal is None else causal, seq_len))
