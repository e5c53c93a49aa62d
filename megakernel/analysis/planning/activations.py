"""Bytes that forward keeps for backward, counted tensor by tensor.

All are of one device and one micro-batch. Parts that the model's code makes for every token are sums of widths; what a
scan over groups of tokens keeps at the groups' bounds is the attention's state.
"""

from typing import NamedTuple

from megakernel.config import Attention

from .layout import Job

FLOAT32 = 4
GROUP = 2048
"""Tokens of a group of a scan (`ops.*.chunked.GROUP`); a state is kept at each group's start."""

CHUNK = 64
"""Keys that plain kernel attention weighs one by one (`ops.kernel_attention.chunked.CHUNK`)."""

SHORT = 512
"""Tokens up to which a scan is plain autograd (`ops.groups.SHORT`)."""

SHORT_COPIES = 5
"""How many times q, k and v in float32 such a graph takes (`ops.groups` measured 4 to 6)."""


class SavedActivations(NamedTuple):
    """Bytes kept by a part of the model."""

    tokens: float
    """For tokens, whatever attends them."""

    states: float = 0.0
    """What attention keeps beside q, k, v and its output: states, tails of windows, masks of documents."""

    def plus(self, other: "SavedActivations") -> "SavedActivations":
        """Both parts together."""
        return SavedActivations(self.tokens + other.tokens, self.states + other.states)

    @property
    def total(self) -> float:
        """All of it."""
        return self.tokens + self.states


def layer(job: Job, attention: Attention) -> SavedActivations:
    """One transformer layer, as training.activation_checkpointing says."""
    recompute = job.layout.recompute
    if recompute == "full" and job.config.training.checkpoint_offload and job.stack.on_gpu:
        return SavedActivations(0, _start(job, attention))
    if recompute == "full":
        return SavedActivations(
            job.sharded_tokens * job.model.hidden_size * job.element, _start(job, attention)
        )
    outside = 2 * norm(job) + residuals(job) + projections(job, attention) + mlp(job)
    if recompute == "selective":
        return SavedActivations(outside, _start(job, attention))
    return SavedActivations(outside).plus(core(job, attention))


def whole_layer(job: Job, attention: Attention) -> SavedActivations:
    """The layer when backward has run it again."""
    outside = 2 * norm(job) + residuals(job) + projections(job, attention) + mlp(job)
    return SavedActivations(outside).plus(core(job, attention))


def norm(job: Job) -> float:
    """One norm: its output, and what its backward needs beside the input."""
    width, tokens = job.model.hidden_size, job.sharded_tokens
    output = width * job.element
    if job.model.norm == "layernorm":
        return tokens * (output + 2 * FLOAT32)
    # The one that torch runs (ops/layers/plain.py) finds the scale of a token again.
    return tokens * (output + (FLOAT32 if job.stack.on_gpu else 0))


def residuals(job: Job) -> float:
    """The two sums, which are the inputs of norms."""
    return 2 * job.sharded_tokens * job.model.hidden_size * job.element


def projections(job: Job, attention: Attention) -> float:
    """Queries, keys and values in one tensor, and the heads' outputs beside each other."""
    vectors = job.heads
    if job.layout.recompute == "selective" or not _trades(job, attention):
        vectors += job.heads + (attention.keys_per_head + 1) * job.kv_heads
        # Query heads that share a key head lie apart in that tensor, and are copied where they are used as they are.
        vectors += job.heads if job.heads != job.kv_heads and not _rotates_at_once(job, attention) else 0
    return job.tokens * vectors * job.model.head_size * job.element


def _trades(job: Job, attention: Attention) -> bool:
    """Whether whole rows of some heads take the place of a shard of all heads."""
    trades = job.exchange == "own" and attention.trades_heads(job.model.is_causal)
    return trades and job.layout.context > 1 and not job.passes_keys_round(attention)


def _rotates_at_once(job: Job, attention: Attention) -> bool:
    """Whether rotated queries and keys of all tokens are made, rather than those of a group at a time."""
    return job.model.position == "rope" and attention.near is None


def mlp(job: Job) -> float:
    """The inner activations, of a chunk where backward computes them again.

    Eager SwiGLU keeps both halves, silu and the product; the fused one of a GPU what goes in and what comes out.
    """
    copies = (3 if job.stack.on_gpu else 4) if job.model.activation == "swiglu" else 2
    tokens = min(job.tokens, (job.config.training.mlp_chunk_size or job.cp_shard) * job.rows)
    return tokens * copies * job.model.ffn_size / job.layout.tensor * job.element


def core(job: Job, attention: Attention) -> SavedActivations:
    """The attention itself, beside its inputs q, k, v."""
    size, element = job.model.head_size, job.element
    keys = attention.keys_per_head * job.kv_heads
    values = job.heads * size * element
    scans = attention.near is not None or attention.feature_map is not None
    if attention.near is not None:
        kept = SavedActivations(job.tokens * values if job.stack.on_gpu else 0)
        return kept.plus(_windows(job, attention))
    rotated = 0.0
    if _rotates_at_once(job, attention):
        # Sines and cosines in float32, for queries and keys together.
        rotated = (job.heads + keys) * size * element + size * FLOAT32
    if scans:
        output = values + 2 * job.heads * FLOAT32 if job.stack.on_gpu else 0
        return SavedActivations(job.tokens * (rotated + output)).plus(_states(job, attention))
    traded = 0.0
    if _trades(job, attention):
        # Neither the projections nor the rotated shards are needed any more.
        cut = job.kv_heads % job.layout.context == 0
        traded = (job.heads + (keys + job.kv_heads if cut else 2 * job.heads)) * size * element
        rotated = size * FLOAT32 if rotated else 0
    output = values + job.heads * FLOAT32
    masks = _mask(job, attention) if attention.is_full_softmax else 0.0
    return SavedActivations(job.tokens * (rotated + traded + output), masks)


def _mask(job: Job, attention: Attention) -> float:
    """Packed rows under softmax: which tokens a block of queries sees, as numbers, for all blocks."""
    if not job.isolates or job.passes_keys_round(attention) or not job.model.is_causal:
        return 0.0
    return job.rows * job.seq_len * (job.seq_len + 512) / 2 * job.element


def state(job: Job, attention: Attention) -> float:
    """The kernel state of one micro-batch: F (D + 1) float32 for each key head, and its log scale."""
    form = attention.feature_map
    if form is None:
        return 0.0
    size = job.model.head_size
    return job.rows * job.kv_heads * (form.width(size) * (size + 1) + 1) * FLOAT32


def _start(job: Job, attention: Attention) -> float:
    """The empty state before the first landmark, which the scan that will run again refers to."""
    return state(job, attention) if attention.near is not None else 0.0


def scanned(job: Job, attention: Attention) -> float:
    """Bytes of features, pairs and sums that a scan makes for one token, all heads together.

    How many there are at once was measured (`benchmarks/plan_calibration.py`), not counted.
    """
    if attention.feature_map is None and attention.near is None:
        return 0.0
    size = job.model.head_size
    features = 0 if attention.feature_map is None else attention.feature_map.width(size)
    sums = 10 if attention.near is None else 15  # a window has sums of its own
    return job.heads * (8 * features + sums * (size + 1)) * FLOAT32


def tail(job: Job, attention: Attention) -> float:
    """Keys and values before a group that its window reaches."""
    near, block = attention.near, attention.block_size
    if near is None or block is None:
        return 0.0
    vectors = (attention.keys_per_head + 1) * job.kv_heads * block * near.blocks
    return job.rows * vectors * job.model.head_size * job.element


def _groups(job: Job, block: int = 1) -> int:
    """Groups of a scan over a shard; a group holds whole chunks of the far scan."""
    span = max(1, 256 // block) * block if block > 1 else GROUP
    group = span * max(1, GROUP // span)
    return -(-job.cp_shard // group)


def _short(job: Job, attention: Attention) -> float:
    vectors = job.heads + (attention.keys_per_head + 1) * job.kv_heads
    return SHORT_COPIES * job.tokens * vectors * job.model.head_size * FLOAT32


def _states(job: Job, attention: Attention) -> SavedActivations:
    """Kernel attention: a state for each group, and the local sums where shards exchange states."""
    if job.cp_shard <= SHORT:
        return SavedActivations(_short(job, attention), state(job, attention))
    scans, sums = 1, 0.0
    if job.layout.context > 1 or not job.model.is_causal:
        scans = 2  # keys are written before queries read, in groups of their own
        sums = job.tokens * job.heads * (job.model.head_size + 2) * FLOAT32
    return SavedActivations(sums, (scans * _groups(job) + 1) * state(job, attention))


def _windows(job: Job, attention: Attention) -> SavedActivations:
    """A window, alone or with landmarks: tails and states for each group, a gate, sums where shards exchange."""
    near, block = attention.near, attention.block_size
    assert near is not None
    assert block is not None
    if job.cp_shard <= SHORT:
        return SavedActivations(_short(job, attention), state(job, attention))
    gated = attention.compression is not None and (near.join, near.gate) == ("gated", "token")
    kept = job.tokens * job.heads * job.element if gated and near.kind == "softmax" else 0.0
    scans = 1
    if job.layout.context > 1 and attention.feature_map is not None:
        scans = 2
        kept += job.tokens * 2 * job.heads * (job.model.head_size + 2) * FLOAT32
    if attention.compression is not None and attention.feature_map is None:
        # Landmarks of the whole shard at once, as sums of tokens in float32.
        vectors = (attention.keys_per_head + 1) * job.kv_heads
        kept += job.tokens * vectors * job.model.head_size * FLOAT32
    at_bounds = state(job, attention) + tail(job, attention)
    return SavedActivations(kept, (scans * _groups(job, block) + 1) * at_bounds)
