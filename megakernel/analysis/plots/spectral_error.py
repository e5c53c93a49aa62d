"""How far approximations are from softmax attention on a run's own queries, keys and values (Skyformer, figure 1).

All mechanisms see both ways, as in the paper, whatever the run does, and nothing of them is learned: random features,
random projections, means. Their number of features is what the figure's d counts: samples, landmarks, compressed keys.
`uniform` is what costs nothing, the mean of all values.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megakernel.attention import AttentionLayer, build
from megakernel.attention.heads import generator
from megakernel.model import LanguageModel
from megakernel.ops.pseudo_inverse import exact_inverse, regularized_inverse

from .subject import CapturedAttention, Subject
from .table import Row

FEATURES = (16, 32, 64, 128, 256)
LENGTHS = (128, 256, 512)
"""Tokens from the start of a row; rows that are shorter than the first are taken whole."""


def measure(subject: Subject) -> list[Row]:
    """weights (trained or random), length, features, mechanism, layer, error: see `errors`."""
    rows: list[Row] = []
    for weights, model in (("trained", subject.model), ("random", subject.untrained())):
        rows += model_errors(weights, model, subject)
    return rows


def model_errors(weights: str, model: LanguageModel, subject: Subject) -> list[Row]:
    """Means over samples and heads, for each layer of `model` whose tokens have one key each."""
    sums: dict[tuple[int, int, str, int], float] = {}
    for _, layer, captured in subject.captured(model):
        if captured.core.compresses_input or captured.core.keys_per_head != 1:
            continue
        q, k, v = rotated(captured)
        for length in lengths(q.shape[2]):
            for (mechanism, features), error in errors(*(x[:, :, :length] for x in (q, k, v))).items():
                place = (length, features, mechanism, layer)
                sums[place] = sums.get(place, 0.0) + error / len(subject.batches)
    names = ("length", "features", "mechanism", "layer")
    return [{"weights": weights, **dict(zip(names, place)), "error": error} for place, error in sums.items()]


def lengths(tokens: int) -> list[int]:
    """Those of LENGTHS that a row has."""
    return [length for length in LENGTHS if length <= tokens] or [tokens]


def rotated(captured: CapturedAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (1, H, N, d), and keys and values of each query head, as the layer compares them; float64."""
    inputs = captured.inputs
    q, k = inputs.turned(inputs.q[:1].double(), inputs.k[:1].double())
    keys, values = (x.repeat_interleave(inputs.group, 1) for x in (k, inputs.v[:1].double()))
    return q, keys, values


@torch.no_grad()
def errors(q: Tensor, k: Tensor, v: Tensor) -> dict[tuple[str, int], float]:
    """(mechanism, features) -> |O' - O|_2 / |O|_2, spectral norms of outputs (N, D), O of softmax; the mean over heads.

    q, k, v: (1, H, N, d) float64. What needs more features than it can have is left out.
    """
    exact = _built("softmax", q)(q, k, v)
    uniform = v.mean(2, keepdim=True).expand_as(exact)
    found: dict[tuple[str, int], float] = {}
    for features in FEATURES:
        for name, output in outputs(q, k, v, features):
            found[name, features] = relative_error(output, exact)
        found["uniform", features] = relative_error(uniform, exact)
    return found


def relative_error(output: Tensor, exact: Tensor) -> float:
    """|O' - O|_2 / |O|_2 of (1, H, N, D), the mean over heads."""
    norms = torch.linalg.matrix_norm(torch.cat([output - exact, exact]), ord=2)
    return (norms[0] / norms[1]).mean().item()


def outputs(q: Tensor, k: Tensor, v: Tensor, features: int) -> Iterator[tuple[str, Tensor]]:
    """Name -> (1, H, N, D) of each approximation with so many features."""
    rank = {"rank": features, "compress": "projected"}
    phi = {"samples": features}
    forms: dict[str, dict[str, Any]] = {
        "performer": {"feature_map": phi},
        "linformer": {"compression": rank},
        "flurka_performer": {"compression": rank, "feature_map": phi},
        "nystromformer": {"nystromformer": {"landmarks": features}},
    }
    for preset, changes in forms.items():
        if preset != "nystromformer" or features <= q.shape[2]:
            yield preset, _built({"preset": preset, **changes}, q)(q, k, v)
    landmarks = draw_landmarks(q, features)
    for name, invert in (("skyformer", regularized_inverse), ("skyformer, exact inverse", exact_inverse)):
        yield name, softmax_nystrom(q, k, v, landmarks, invert)


def draw_landmarks(q: Tensor, features: int) -> Tensor:
    """Rows (H, features) of the 2 N queries and keys of each head, with replacement; the same in every call."""
    heads, length = q.shape[1:3]
    streams = [generator(0, head, "landmarks") for head in range(heads)]
    draws = [torch.randint(2 * length, (features,), generator=stream, device="cpu") for stream in streams]
    return torch.stack(draws).to(q.device)


def softmax_nystrom(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, invert: Callable[[Tensor], Tensor]
) -> Tensor:
    """Skyformer's approximation of softmax attention (1, H, N, D), as in its figure 1.

    Eq. 5 with the kernel A = exp(q.k / sqrt(d)) in place of the Gaussian, for A first and then for its sums.
    landmarks: (H, F) rows of [Q; K].
    """
    rows = torch.cat([q, k], 2).gather(2, landmarks[None, ..., None].expand(-1, -1, -1, q.shape[-1]))
    to_landmarks, between, from_keys = (
        (x @ y.transpose(-1, -2) * x.shape[-1] ** -0.5).exp() for x, y in ((q, rows), (rows, rows), (rows, k))
    )
    ones = torch.ones_like(v[..., :1])
    sums = to_landmarks @ (invert(between) @ (from_keys @ torch.cat([v, ones], -1)))
    return sums[..., :-1] / sums[..., -1:]


def _built(form: str | dict[str, Any], q: Tensor) -> AttentionLayer:
    heads, length, width = q.shape[1:]
    core = build(form, num_heads=heads, head_dim=width, causal=False, max_positions=length)
    return core.double().to(q.device).eval()
