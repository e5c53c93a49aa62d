"""FLuRKA's error against softmax and its bound (FLuRKA, theorem 1), on a run's queries, keys and values.

With weights A of softmax, landmarks K~ = E K and V~ = F V, weights B of softmax over landmarks, and the row-normalized
C = phi(Q) phi(K~)^T, the proof divides the error by the triangle inequality:

    |C V~ - A V|  <=  |C V~ - B V~|  +  |B V~ - A V|  <  e_4 |V~|  +  e_1 |A|_2 |V|_2
    error             kernel part       low-rank part

|.| is the largest sum of absolute values of a row, the norm of matrices for which the first term follows from
e_4 = |C - B|; |.|_2 is the spectral norm. e_4 is measured here. e_1 is not free: Linformer's theorem 2, which the
second term is from, needs k = 5 log(d) / (e^2 - e^3) landmarks, so e_1 is the smaller solution of that for the k at
hand. Below k = 34 log(d) there is none, as e^2 - e^3 is at most 4/27: the theorem says nothing there.

Layers are bidirectional, as in the paper, with Performer's features and untrained E and F, whatever the run's are.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megakernel.analysis.plots.subject import Subject
from megakernel.analysis.plots.table import Row
from megakernel.attention.low_rank import LowRankAttention
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.softmax_attention import softmax_attention
from megakernel.papers.skyformer.measurements import FEATURES, encoder_layer, rotated

SAMPLES = 256
"""Random features of the kernel."""


def measure_flurka_error(subject: Subject) -> list[Row]:
    """weights (trained or random), landmarks, layer, and the columns of `error_parts`: means over samples and heads."""
    rows: list[Row] = []
    for weights, model in (("trained", subject.model), ("random", subject.untrained())):
        sums: dict[tuple[int, int], dict[str, float]] = {}
        for _, layer, captured in subject.captured(model):
            if captured.core.compresses_input or captured.core.keys_per_head != 1:
                continue
            for landmarks, parts in error_parts(*rotated(captured)):
                total = sums.setdefault((landmarks, layer), dict.fromkeys(parts, 0.0))
                for name, values in parts.items():
                    total[name] += values.mean().item() / len(subject.batches)
        for (landmarks, layer), means in sums.items():
            # A table of numbers has no infinity: the cell of a bound that there is not stays empty.
            cells = {name: value if math.isfinite(value) else "" for name, value in means.items()}
            rows.append({"weights": weights, "landmarks": landmarks, "layer": layer, **cells})
    return rows


@torch.no_grad()
def error_parts(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Number of landmarks, and for it the norms (H,) of the theorem: q, k, v (1, H, N, d) float64.

    error, kernel_part, low_rank_part; softmax, the norm of A V; kernel_bound and low_rank_bound, the terms of the
    bound, and bound, their sum; the last two are infinite where Linformer's theorem has no e_1.
    """
    exact = softmax_attention(q, k, v, causal=False)[0]
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    spectral = (torch.linalg.matrix_norm(x, ord=2) for x in (weights, v))
    product = math.prod(spectral, start=torch.ones((), dtype=q.dtype, device=q.device))
    for landmarks in FEATURES:
        form = {"preset": "flurka_performer", "compression": {"rank": landmarks, "compress": "projected"}}
        layer = encoder_layer({**form, "feature_map": {"samples": SAMPLES}}, q)
        assert isinstance(layer, LowRankAttention)
        assert layer.projection is not None
        keys, values = layer.compressor((k, v), first=0, length=q.shape[2])
        unit = torch.eye(landmarks, dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
        softmax = softmax_attention(q, keys, unit, causal=False)[0]
        feature_map, projection = layer.projection.feature_map, layer.projection()
        kernel = kernel_attention(q, keys, unit, feature_map=feature_map, projection=projection, causal=False)
        assert isinstance(kernel, Tensor)
        low_rank, flurka = softmax @ values, kernel @ values
        kernel_bound = largest_row(kernel - softmax) * largest_row(values)
        low_rank_bound = smallest_epsilon(landmarks, q.shape[-1]) * product
        parts = {
            "error": largest_row(flurka - exact),
            "kernel_part": largest_row(flurka - low_rank),
            "low_rank_part": largest_row(low_rank - exact),
            "softmax": largest_row(exact),
            "kernel_bound": kernel_bound,
            "low_rank_bound": low_rank_bound,
            "bound": kernel_bound + low_rank_bound,
        }
        yield landmarks, {name: norms.flatten() for name, norms in parts.items()}


def largest_row(x: Tensor) -> Tensor:
    """The largest sum of absolute values of a row of matrices (..., N, D)."""
    return x.abs().sum(-1).amax(-1)


def smallest_epsilon(landmarks: int, width: int) -> float:
    """The smaller e with e^2 - e^3 = 5 log(width) / landmarks; infinity if there is none."""
    wanted = 5 * math.log(width) / landmarks
    low, high = 0.0, 2 / 3  # where e^2 - e^3 grows
    if wanted > high**2 - high**3:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle**2 - middle**3 < wanted else (low, middle)
    return high
