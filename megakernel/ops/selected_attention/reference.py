"""From the formula, query by query."""

import torch
from torch import Tensor

from megakernel.ops.documents import token_positions
from megakernel.ops.landmark_attention import MISSING
from megakernel.ops.selected_attention.inputs import SelectedInputs, SelectionRule
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.window import rotate_keys


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: SelectedInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, D) in float32 or better, and the blocks that the last tile chose, as `SelectedInputs.choice`."""
    selection, cache, landmarks, _, choice, rotary, rotates_chosen, positions, ring = inputs
    if ring is not None:
        raise ValueError("backend='reference' reads whole sequences; take backend='chunked' for their shards")
    batch, heads, length, width = q.shape
    kv_heads, dtype = k.shape[1], accum_dtype(q.dtype)
    group, cached, size = heads // kv_heads, cache.keys.shape[2], selection.block_size
    at = token_positions(positions, length, q.device)
    near_q, near_k = q.to(dtype), torch.cat([cache.keys, k], 2).to(dtype)
    far_q, far_k = near_q, near_k
    if rotary is not None:
        near_q = rotary(near_q, at)
        near_k = torch.cat(rotate_keys(rotary, cache.keys.to(dtype), k.to(dtype), at), 2)
    if rotates_chosen:
        far_q, far_k = near_q, near_k
    elif rotary is not None:
        far_q, far_k = rotary.at_start(far_q), rotary.at_start(far_k)
    values = torch.cat([cache.values, v], 2).to(dtype)
    ends = landmarks.ends.expand(batch, -1).tolist()

    def chosen_ends(b: int, h: int, i: int, position: int) -> list[int]:
        """Ends of the k blocks before the window of token i, at `position`, with the largest scores."""
        limit, start = i - position % size - (selection.near - 1) * size, i - position
        seen = [s for s, end in enumerate(ends[b]) if start <= end < limit]
        if not seen:
            return []
        queries = q[b, h * group : (h + 1) * group, i].detach().to(dtype)
        return [ends[b][seen[s]] for s in _chosen(queries, landmarks.keys[b, h, seen].to(dtype), selection)]

    rows, after = [], choice.clone()
    for b in range(batch):
        for h in range(kv_heads):
            current = [end for end in choice[b, h].tolist() if end != MISSING]
            for i, position in enumerate(at.expand(batch, -1)[b].tolist()):
                if selection.unit == "token" or position % size == 0:
                    current = chosen_ends(b, h, i, position)
                oldest = max(0, (position // size - selection.near + 1) * size)
                window = list(range(cached + i - (position - oldest), cached + i + 1))
                sees = position >= selection.reach
                far = [cached + end - t for end in (current if sees else []) for t in range(size)]
                heads_of_key = slice(h * group, (h + 1) * group)
                near = near_q[b, heads_of_key, i] @ near_k[b, h, window].T
                chosen = far_q[b, heads_of_key, i] @ far_k[b, h, far].T
                weights = (torch.cat([near, chosen], -1) * width**-0.5).softmax(-1)
                rows.append(weights @ values[b, h, window + far])
            if selection.unit == "tile":
                kept = current if at.expand(batch, -1)[b, -1] >= selection.reach else []
                padding = [MISSING] * (selection.chosen - len(kept))
                after[b, h] = torch.tensor([end - length for end in kept] + padding)
    out = torch.stack(rows).view(batch, kv_heads, length, group, -1).transpose(2, 3).flatten(1, 2)
    return out, after


def _chosen(queries: Tensor, landmarks: Tensor, selection: SelectionRule) -> list[int]:
    """Indices of the blocks that queries (G, d) choose among all before their window, with landmarks (n, r, d)."""
    candidates, size = list(range(len(landmarks))), selection.group
    complete = len(landmarks) // size if size else 0
    if size and complete:
        parts = min(landmarks.shape[1], size)
        blocks = landmarks[: complete * size].mean(1).unflatten(0, (complete, size))
        part = torch.arange(size) * parts // size
        groups = torch.stack([blocks[:, part == i].mean(1) for i in range(parts)], 1)
        best = _best(queries, groups, selection)
        candidates = [z * size + t for z in best for t in range(size)] + candidates[complete * size :]
    return [candidates[i] for i in _best(queries, landmarks[candidates], selection)]


def _best(queries: Tensor, landmarks: Tensor, selection: SelectionRule) -> list[int]:
    """The k of n with landmarks (n, r, d) whose scores are the largest, in ascending order."""
    products = queries @ landmarks.flatten(0, 1).T * queries.shape[-1] ** -0.5
    products = products.view(len(queries), len(landmarks), -1)
    scores = products.amax(-1) if selection.score == "max" else products.logsumexp(-1)
    best = scores.amax(0).tolist()
    return sorted(sorted(range(len(best)), key=lambda s: (-best[s], s))[: selection.chosen])
