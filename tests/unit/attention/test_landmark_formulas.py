"""What a query meets, one query at a time from the formulas: where windows lie, and how much a landmark counts."""

import pytest
import torch
from torch import Tensor

from megakernel.attention import build
from megakernel.ops.eva_attention import control_variates
from tests.unit.attention.mechanisms import assert_close

HEADS, WIDTH, LENGTH = 2, 4, 23

Met = list[tuple[Tensor, Tensor, float | Tensor]]
"""Keys (H, n, d) and values (H, n, d) that a query meets, and how many tokens each of them stands for."""

# A backend shares its windows and token counts with no other here.
pytestmark = pytest.mark.parametrize("backend", ["chunked", "reference"])


@pytest.fixture(autouse=True)
def _backend(backend, monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_BACKEND", backend)


def layer(tree: dict, *, causal: bool) -> torch.nn.Module:
    """With parameters away from their initial values, where token counts and nets would cancel."""
    module = build(tree, num_heads=HEADS, head_dim=WIDTH, causal=causal, max_positions=LENGTH).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return module


def tokens() -> list[Tensor]:
    return [torch.randn(1, HEADS, LENGTH, WIDTH, dtype=torch.float64) for _ in range(3)]


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(k @ q[..., None] * WIDTH**-0.5)[..., 0]


def elu(q: Tensor, k: Tensor) -> Tensor:
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    return (k @ q[..., None])[..., 0]


def mean(q: Tensor, met: Met, weigh=softmax) -> Tensor:
    """(H, d) of q (H, d): the mean of what it meets, weighted by token count and similarity."""
    weights = torch.cat(
        [weigh(q, k) * torch.as_tensor(token_count).view(-1, 1) for k, _, token_count in met], 1
    )
    return (weights[..., None] * torch.cat([v for _, v, _ in met], 1)).sum(1) / weights.sum(1, keepdim=True)


def assert_equals_each(module, q, k, v, met, weigh=softmax) -> None:
    expected = torch.stack([mean(q[0, :, i], met(i), weigh) for i in range(LENGTH)], 1)
    assert_close(module(q, k, v)[0], expected)


@pytest.mark.parametrize(("size", "rank"), [(4, 2), (6, 4), (5, 5)])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("weigh", [softmax, elu], ids=lambda weigh: weigh.__name__)
def test_a_landmark_counts_as_the_b_over_r_tokens_it_stands_for(size, rank, blocks, weigh):
    tree = {"compression": {"kind": "block", "block_size": size, "rank": rank}}
    if weigh is softmax:
        tree |= {
            "preset": "linformer_causal",
            "near": {"kind": "softmax", "join": "shared", "blocks": blocks},
        }
    else:
        tree |= {"preset": "flurka_kernel", "near": {"kind": "kernel", "blocks": blocks}}
        tree["feature_map"] = {"name": "elu"}
    module, (q, k, v) = layer(tree, causal=True), tokens()
    if weigh is softmax:
        pools, scale = module.compressor.pools(v), module.far_weight.exp()
    else:
        pools = [pool.softmax(-1) for pool in (module.pool_keys, module.pool_values)]
        scale = module.far_mass.exp()

    def met(i: int) -> Met:
        nearest = max(0, i // size - blocks + 1) * size
        found = [(k[0, :, nearest : i + 1], v[0, :, nearest : i + 1], 1.0)]
        for at in range(0, nearest, size):
            marks = [pool @ x[0, :, at : at + size] for pool, x in zip(pools, (k, v))]
            found.append((*marks, size / rank * scale))
        return found

    assert_equals_each(module, q, k, v, met, weigh)


@pytest.mark.parametrize("weigh", [softmax, elu], ids=lambda weigh: weigh.__name__)
def test_landmarks_of_a_short_block_count_as_its_tokens(weigh):
    size, rank = 5, 2
    tree = {"compression": {"kind": "block", "block_size": size, "rank": rank, "compress": "projected"}}
    if weigh is softmax:
        tree["similarity"] = "softmax"
    else:
        tree |= {"similarity": "kernel", "feature_map": {"name": "elu"}}
    module, (q, k, v) = layer(tree, causal=False), tokens()

    def marks(x: Tensor, pool: Tensor, at: int) -> Tensor:
        here = x[0, :, at : at + size]
        weights = pool[:, : here.shape[1]]
        return weights @ here / weights.sum(1, keepdim=True)

    def met(_: int) -> Met:
        pools = module.compressor.pools(v)
        return [
            (*(marks(x, pool, at) for x, pool in zip((k, v), pools)), min(size, LENGTH - at) / rank)
            for at in range(0, LENGTH, size)
        ]

    assert_equals_each(module, q, k, v, met, weigh)


def summary(module, share: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k_c and beta_c (H, 1, d) of a chunk's queries, keys and values (H, n, d)."""
    q_c, k_c = module.summaries.queries(q.mean(1)), module.summaries.keys(k.mean(1))
    beta = control_variates((share * (q_c + k_c))[None, :, None], k[None, :, None], v[None, :, None])
    return k_c[:, None], beta[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize(("window", "chunk"), [(6, 2), (6, 4), (4, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_eva_meets_its_window_and_the_chunks(overlap, exclude, window, chunk, causal):
    settings = {"window_size": window, "chunk_size": chunk, "overlap": overlap, "exclude_window": exclude}
    module, (q, k, v) = layer({"preset": "eva", "eva": settings}, causal=causal), tokens()
    reach = window if overlap else 0

    def met(i: int) -> Met:
        first = max(0, i // window * window - reach)
        end = i + 1 if causal else min(LENGTH, (i // window + 1) * window + reach)
        found = [(k[0, :, first:end], v[0, :, first:end], 1.0)]
        for at in range(0, LENGTH, chunk):
            past = min(LENGTH, at + chunk)
            if causal and past > i // chunk * chunk:
                continue
            # Where nothing later is seen, a chunk that ends in the window leaves; else one that lies in it.
            inside = past > first if causal else first <= at and past <= end
            if not (exclude and inside):
                rows = (x[0, :, at:past] for x in (q, k, v))
                found.append((*summary(module, 1.0 if causal else 0.5, *rows), 1.0))
        return found

    assert_equals_each(module, q, k, v, met)


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("rank", [4, 7, 9])
def test_flurka_eva_shares_its_landmarks_among_windows(exclude, rank):
    window = 6
    tree = {"preset": "flurka_eva", "compression": {"rank": rank, "compress": "projected"}}
    tree["eva"] = {"window_size": window, "exclude_window": exclude}
    module, (q, k, v) = layer(tree, causal=False), tokens()
    share = -(-rank // -(-LENGTH // window))

    def met(i: int) -> Met:
        keys, values = (matrix @ x[0] for matrix, x in zip(module.compressor.pools(v), (k, v)))
        own = slice(i // window * share, (i // window + 1) * share)
        found = [(keys[:, own], values[:, own], 1.0)]
        for at in range(0, LENGTH, window):
            of = slice(at // window * share, (at // window + 1) * share)
            if keys[:, of].shape[1] and not (exclude and of == own):
                rows = q[0, :, at : at + window], keys[:, of], values[:, of]
                found.append((*summary(module, 0.5, *rows), 1.0))
        return found

    assert_equals_each(module, q, k, v, met)
