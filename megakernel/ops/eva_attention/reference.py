"""The same from its formula: one matrix of all windows' keys and all chunks."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.eva_attention.chunked import Chunks, Windows, by_query


def attend(q: Tensor, windows: Windows, chunks: Chunks) -> Tensor:
    """Arguments and result of `chunked.attend`."""
    dtype, length = accum_dtype(q.dtype), q.shape[2]
    count = windows.keys.shape[2]
    keys = torch.cat([windows.keys.flatten(2, 3), chunks.keys], 2).to(dtype)
    values = torch.cat([windows.values.flatten(2, 3), chunks.values], 2).to(dtype)
    own = torch.eye(count, dtype=torch.bool, device=q.device)[None, :, :, None] & windows.real[:, None]
    batch = max(len(own), len(chunks.seen))
    seen = torch.cat([own.flatten(2).expand(batch, -1, -1), chunks.seen.expand(batch, -1, -1)], 2)
    visible = by_query(seen, windows.queries, length)[:, None]
    scores = q.to(dtype) @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = torch.where(visible, scores, -torch.inf).softmax(-1)
    return (torch.where(visible, weights, 0.0) @ values).to(q.dtype)
