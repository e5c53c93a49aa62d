"""Floating-point operations of a model: what its formulas need, not what some way of computing them executes.

Conventions, all per token of one sequence of `seq_len` tokens that is a single document:
* a multiplication and an addition count 2, matrix products alone are counted; norms, softmax, exponentials,
  rotations and the embedding lookup are not;
* full attention of an encoder counts N keys per token, padding included;
* causal attention counts the pairs it may look at, (N + 1) / 2 keys per token, half of what PaLM's appendix
  counts: a kernel that skips the other half does the same work;
* kernel attention counts one update and one reading of the state per token, D + 1 columns with the
  normalizer. The chunked op weighs pairs inside a chunk as well, which buys speed and is not necessary;
* training is forward and twice that for backward. What is recomputed to save memory is not counted in MFU.
"""

from collections import Counter
from typing import Literal

from megakernel.config import (
    Attention,
    BlockCompression,
    Compression,
    FeatureMap,
    LinformerCompression,
    Model,
    Near,
    PoolCompression,
)
from megakernel.config.eva import Eva
from megakernel.config.landmark import Nystromformer, Skyformer

BACKWARD = 2


def flops_per_token(model: Model, seq_len: int, vocab_size: int, predicted: float = 1.0) -> float:
    """Forward FLOPs per token. vocab_size: tokens of the tokenizer; padding rows are not necessary work.

    predicted: share of the tokens that a language model's head predicts, data.masking.rate of a masked_lm.
    """
    parts = forward_flops(model, seq_len, vocab_size)
    return sum(parts.values()) - (1 - predicted) * parts["head"]


def training_flops_per_token(model: Model, seq_len: int, vocab_size: int, predicted: float = 1.0) -> float:
    """Forward and backward FLOPs per token, the numerator of MFU."""
    return (1 + BACKWARD) * flops_per_token(model, seq_len, vocab_size, predicted)


def recomputed_flops_per_token(
    model: Model, seq_len: int, activation_checkpointing: Literal["none", "selective", "full"]
) -> float:
    """FLOPs per token that backward repeats because of training.activation_checkpointing."""
    if activation_checkpointing == "none":
        return 0.0
    parts = forward_flops(model, seq_len, vocab_size=0)
    if activation_checkpointing == "selective":
        del parts["projections"], parts["mlp"]
    return sum(parts.values())


def forward_flops(model: Model, seq_len: int, vocab_size: int) -> dict[str, float]:
    """Forward FLOPs per token by part, summed over the layers.

    projections (query, key, value, output), feature_map, landmarks, inverse, state, readout, near (exact attention,
    windowed or full), far (landmarks and chunks under softmax), summaries (of chunks), convolution, gate, mlp, head.
    Parts that no layer has are absent.
    """
    width, size = model.hidden_size, model.head_size
    matrices = 3 if model.activation == "swiglu" else 2
    parts: Counter[str] = Counter()
    for layer in range(model.num_layers):
        attention = model.layer_attention(layer)
        keys: float = (attention.keys_per_head + 1) * model.kv_heads
        if attention.compresses_input:
            assert attention.compression is not None
            keys = keys * landmarks_per_token(attention.compression, seq_len)
        projected = 2 * model.num_heads + keys
        parts.update({"projections": 2 * width * size * projected})
        parts["mlp"] += 2 * width * model.ffn_size * matrices
        parts.update(attention_flops(model, attention, seq_len))
    # A classifier's head works once for a document.
    parts["head"] += 0 if model.classifier is not None else 2 * width * vocab_size
    return dict(parts)


def attention_flops(model: Model, attention: Attention, seq_len: int) -> dict[str, float]:
    """Forward FLOPs per token of one layer's attention core, by part."""
    heads, kv_heads, size = model.num_heads, model.kv_heads, model.head_size
    phi, near, compression = attention.feature_map, attention.near, attention.compression
    if attention.mechanism == "skyformer":
        parts = skyformer_flops(attention.skyformer or Skyformer(), size, seq_len)
        return {name: heads * count for name, count in parts.items()}
    if attention.mechanism == "nystromformer":
        parts = nystromformer_flops(attention.nystromformer or Nystromformer(), size, seq_len)
        return {name: heads * count for name, count in parts.items()}
    if attention.mechanism == "eva":
        return _eva(model, attention, seq_len)
    if compression is not None and near is None:
        return _low_rank(model, attention, compression, seq_len)
    if compression is not None and phi is None:
        return _landmarks(model, attention, compression, near, seq_len)
    # One product for each key of a position, and one for its value.
    pair = 2 * (attention.keys_at_position + 1) * size
    if phi is None:
        block = attention.block_size or seq_len
        keys = mean_local_keys(seq_len, block, near.blocks if near else 1) if model.is_causal else seq_len
        if attention.window is not None:
            keys = mean_last_keys(seq_len, attention.window)
        return {"near": heads * keys * pair}

    features, mapping = phi.width(size), _mapping_flops(phi, size)
    one_state = 2 * features * (size + 1)
    if compression is None:
        return {
            "feature_map": (heads + kv_heads * attention.keys_at_position) * mapping,
            "state": kv_heads * one_state,
            "readout": heads * one_state,
        }
    assert near is not None
    assert isinstance(compression, BlockCompression)
    share = compression.rank / compression.block_size
    keys = mean_local_keys(seq_len, compression.block_size, near.blocks)
    mapped_keys = attention.keys_at_position * (share + (near.kind == "kernel"))
    parts = {
        "landmarks": compression_flops(model, attention),
        "feature_map": (heads + kv_heads * mapped_keys) * mapping,
        "state": kv_heads * share * one_state,
        "readout": heads * one_state,
        "near": heads * keys * (pair if near.kind == "softmax" else 2 * features + 2 * (size + 1)),
    }
    if near.kind == "softmax" and near.join == "gated" and near.gate == "token":
        parts["gate"] = heads * 2 * size
    return parts


def _low_rank(model: Model, attention: Attention, compression: Compression, seq_len: int) -> dict[str, float]:
    """Landmarks of whole rows, under softmax or a kernel."""
    heads, kv_heads, size = model.num_heads, model.kv_heads, model.head_size
    share, phi = landmarks_per_token(compression, seq_len), attention.feature_map
    parts = {"landmarks": compression_flops(model, attention)}
    if phi is None:
        return parts | {"far": heads * share * seq_len * 2 * (attention.keys_at_position + 1) * size}
    one_state = 2 * phi.width(size) * (size + 1)
    return parts | {
        "feature_map": (heads + kv_heads * share * attention.keys_at_position) * _mapping_flops(phi, size),
        "state": kv_heads * share * one_state,
        "readout": heads * one_state,
    }


def _landmarks(
    model: Model, attention: Attention, compression: Compression, near: Near | None, seq_len: int
) -> dict[str, float]:
    """A window and the landmarks of earlier blocks under softmax."""
    assert near is not None
    assert isinstance(compression, BlockCompression)
    heads, size, block = model.num_heads, model.head_size, compression.block_size
    pair = heads * 2 * (attention.keys_at_position + 1) * size
    parts = {
        "landmarks": compression_flops(model, attention),
        "near": mean_local_keys(seq_len, block, near.blocks) * pair,
        "far": compression.rank * mean_complete_blocks(seq_len, block, near.blocks) * pair,
    }
    if (near.join, near.gate) == ("gated", "token"):
        parts["gate"] = heads * 2 * size
    return parts


def _eva(model: Model, attention: Attention, seq_len: int) -> dict[str, float]:
    form = attention.eva or Eva()
    parts = eva_flops(
        model, attention, seq_len, mean_local_keys(seq_len, form.window_size, 2 if form.overlap else 1)
    )
    if attention.compression is not None:
        parts["landmarks"] = compression_flops(model, attention)
    return parts


def mean_local_keys(seq_len: int, block_size: int, blocks: int) -> float:
    """Keys that a token attends exactly, on average: its own block up to itself, and `blocks` - 1 before it.

    With block_size = seq_len this is (N + 1) / 2, full causal attention.
    """
    whole, rest = divmod(seq_len, block_size)
    own = whole * block_size * (block_size + 1) / 2 + rest * (rest + 1) / 2
    before = (blocks - 1) * max(seq_len - block_size, 0) * block_size
    return (own + before) / seq_len


def mean_last_keys(seq_len: int, window: int) -> float:
    """Keys that a token attends on average where it sees the last `window` tokens, its own included."""
    seen = min(seq_len, window)
    return (seen * (seen + 1) / 2 + (seq_len - seen) * seen) / seq_len


def _mapping_flops(feature_map: FeatureMap, head_dim: int) -> float:
    """FLOPs of phi for one vector of one head: its projection, if it has one.

    The frequencies omega themselves are made once for all tokens of a micro-batch, and are not counted. Of FastFood,
    whose transform takes the place of a matrix product, every multiplication and addition is: 3 n + 2 n log2 n for
    each block of n.
    """
    if feature_map.is_fastfood:
        exponent = (head_dim - 1).bit_length()
        blocks = feature_map.sample_count(head_dim) // head_dim
        return blocks * 2**exponent * (3 + 2 * exponent)
    rows = head_dim if feature_map.name == "hedgehog" else feature_map.frequencies(head_dim)
    return 2 * head_dim * rows


INVERSE_STEPS = 6
PRODUCTS_PER_STEP = 4


def skyformer_flops(form: Skyformer, head_dim: int, seq_len: int) -> dict[str, float]:
    """Forward FLOPs per token of one query head; of the exact inverse, which is for measurements, the products alone.

    Distances are counted as the products that they are made of.
    """
    return _through_landmarks(form.features, head_dim, seq_len, form.inverse == "iterative")


def nystromformer_flops(form: Nystromformer, head_dim: int, seq_len: int) -> dict[str, float]:
    """Forward FLOPs per token of one query head; the means are sums of tokens, no products."""
    parts = _through_landmarks(form.landmarks, head_dim, seq_len, iterative=True)
    if form.conv_kernel is not None:
        parts["convolution"] = 2 * form.conv_kernel * head_dim
    return parts


def _through_landmarks(count: int, size: int, seq_len: int, iterative: bool) -> dict[str, float]:
    inverse = INVERSE_STEPS * PRODUCTS_PER_STEP * 2 * count**3 if iterative else 0
    between = 2 * count * count * size
    return {
        # Queries and keys meet the landmarks; values go to them and come back.
        "landmarks": 2 * 2 * count * size,
        "readout": 2 * 2 * count * size,
        # Landmarks meet each other, and the inverse is applied to what they hold.
        "inverse": (2 * between + inverse) / seq_len,
    }


def landmarks_per_token(compression: Compression, seq_len: int) -> float:
    """L / N, compressed keys of one row of N tokens over its tokens."""
    if isinstance(compression, LinformerCompression):
        return compression.rank / seq_len
    rank = 1 if isinstance(compression, PoolCompression) else compression.rank
    return rank * -(-seq_len // compression.block_size) / seq_len


def compression_flops(model: Model, attention: Attention) -> float:
    """Forward FLOPs per token of E x and F x: every token takes part in the landmarks of its block or row."""
    compression = attention.compression
    assert compression is not None
    rank = 1 if isinstance(compression, PoolCompression) else compression.rank
    if not attention.compresses_input:
        return model.kv_heads * rank * 2 * (attention.keys_per_head + 1) * model.head_size
    matrices = 1 if getattr(compression, "share_kv", True) else 2
    return matrices * rank * 2 * model.hidden_size


def compression_parameters(compression: Compression, kv_heads: int, columns: int) -> int:
    """Entries of E and F; `columns` are Linformer's."""
    if isinstance(compression, PoolCompression):
        return 0
    owners = (kv_heads if compression.per_head else 1) * (1 if compression.share_kv else 2)
    width = columns if isinstance(compression, LinformerCompression) else compression.block_size
    return owners * compression.rank * width


def mean_complete_blocks(seq_len: int, size: int, skipped: int) -> float:
    """Blocks of `size` tokens that end before a token's own and the `skipped` - 1 before it, on average."""
    whole, rest = divmod(seq_len, size)
    seen = [max(0, block - skipped + 1) for block in range(whole + 1)]
    return (size * sum(seen[:whole]) + rest * seen[whole]) / seq_len


def eva_flops(model: Model, attention: Attention, seq_len: int, near_keys: float) -> dict[str, float]:
    """Forward FLOPs per token of EVA by part; near_keys: keys of a causal token's window, on average."""
    form, size = attention.eva or Eva(), model.head_size
    chunk, keys_per_token = form.chunk_size, 1.0
    chunks = mean_complete_blocks(seq_len, chunk, 1) if model.is_causal else -(-seq_len // chunk)
    if not model.is_causal:
        near_keys = form.window_size * (3 if form.overlap else 1)
    if attention.compression is not None:
        chunk = form.window_size
        chunks = -(-seq_len // chunk)
        keys_per_token = landmarks_per_token(attention.compression, seq_len)
        near_keys = keys_per_token * seq_len / chunks
    return {
        # W of the two means of a chunk, then scores and weighted values of every key.
        "summaries": model.num_heads * (4 * size * size / chunk + keys_per_token * 4 * size),
        "near": model.num_heads * near_keys * 4 * size,
        "far": model.num_heads * chunks * 4 * size,
    }


def eva_parameters(head_dim: int) -> int:
    """Two matrices with bias and LayerNorm, shared by the heads of a layer."""
    return 2 * (head_dim * head_dim + 3 * head_dim)
