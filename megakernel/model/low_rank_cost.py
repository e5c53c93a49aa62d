"""Operations and parameters of low rank and EVA, per layer."""

from megakernel.config import Attention, LinformerCompression, Model, PoolCompression
from megakernel.config.compression import Compression
from megakernel.config.eva import Eva


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
