"""Windows and landmarks that each query attends to, and the token counts of landmarks, from the formulas."""

import pytest
import torch
from torch import Tensor

from megakernel.attention import build
from megakernel.papers.flurka.eva_attention import control_variates
from tests.unit.attention.mechanisms import assert_close

HEADS, WIDTH, LENGTH = 2, 4, 23

Attended = list[tuple[Tensor, Tensor, float | Tensor]]
"""Keys (H, n, d) and values (H, n, d) that a query attends to, and the number of tokens that each represents."""

# Both backends, because each computes windows and token counts itself.
pytestmark = pytest.mark.usefixtures("each_backend")


def layer(tree: dict, *, causal: bool) -> torch.nn.Module:
    """A layer with parameters away from their initial values, at which token counts and networks have no effect."""
    sizes = {"num_heads": HEADS, "head_dim": WIDTH, "max_positions": LENGTH}
    module = build(tree, causal=causal, rotary=False, **sizes).double().eval()
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


def weighted_mean(q: Tensor, attended: Attended, weigh=softmax) -> Tensor:
    """(H, d) for q (H, d): the mean of the attended values, weighted by token count and similarity."""
    weights = torch.cat(
        [weigh(q, k) * torch.as_tensor(token_count).view(-1, 1) for k, _, token_count in attended], 1
    )
    return (weights[..., None] * torch.cat([v for _, v, _ in attended], 1)).sum(1) / weights.sum(
        1, keepdim=True
    )


def assert_every_query_equals(module, q, k, v, attended, weigh=softmax) -> None:
    expected = torch.stack([weighted_mean(q[0, :, i], attended(i), weigh) for i in range(LENGTH)], 1)
    assert_close(module(q, k, v)[0], expected)


@pytest.mark.parametrize(("size", "rank"), [(4, 2), (6, 4), (5, 5)])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("weigh", [softmax, elu], ids=lambda weigh: weigh.__name__)
def test_a_landmark_counts_as_b_over_r_tokens(size, rank, blocks, weigh):
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

    def attended(i: int) -> Attended:
        nearest = max(0, i // size - blocks + 1) * size
        found = [(k[0, :, nearest : i + 1], v[0, :, nearest : i + 1], 1.0)]
        for start in range(0, nearest, size):
            landmarks = [pool @ x[0, :, start : start + size] for pool, x in zip(pools, (k, v))]
            found.append((*landmarks, size / rank * scale))
        return found

    assert_every_query_equals(module, q, k, v, attended, weigh)


@pytest.mark.parametrize("weigh", [softmax, elu], ids=lambda weigh: weigh.__name__)
def test_landmarks_of_a_short_block_count_as_its_tokens(weigh):
    size, rank = 5, 2
    tree = {"compression": {"kind": "block", "block_size": size, "rank": rank, "compress": "projected"}}
    if weigh is softmax:
        tree["similarity"] = "softmax"
    else:
        tree |= {"similarity": "kernel", "feature_map": {"name": "elu"}}
    module, (q, k, v) = layer(tree, causal=False), tokens()

    def landmarks(x: Tensor, pool: Tensor, start: int) -> Tensor:
        block = x[0, :, start : start + size]
        weights = pool[:, : block.shape[1]]
        return weights @ block / weights.sum(1, keepdim=True)

    def attended(_: int) -> Attended:
        pools = module.compressor.pools(v)
        return [
            (*(landmarks(x, pool, start) for x, pool in zip((k, v), pools)), min(size, LENGTH - start) / rank)
            for start in range(0, LENGTH, size)
        ]

    assert_every_query_equals(module, q, k, v, attended, weigh)


def summary(module, share: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Summary k_c and beta_c (H, 1, d) of the queries, keys and values (H, n, d) of a chunk."""
    q_c, k_c = module.summaries.queries(q.mean(1)), module.summaries.keys(k.mean(1))
    beta = control_variates((share * (q_c + k_c))[None, :, None], k[None, :, None], v[None, :, None])
    return k_c[:, None], beta[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize(("window", "chunk"), [(6, 2), (6, 4), (4, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_eva_attends_to_its_window_and_the_chunks(overlap, exclude, window, chunk, causal):
    settings = {"window_size": window, "chunk_size": chunk, "overlap": overlap, "exclude_window": exclude}
    module, (q, k, v) = layer({"preset": "eva", "eva": settings}, causal=causal), tokens()
    reach = window if overlap else 0

    def attended(i: int) -> Attended:
        first = max(0, i // window * window - reach)
        end = i + 1 if causal else min(LENGTH, (i // window + 1) * window + reach)
        found = [(k[0, :, first:end], v[0, :, first:end], 1.0)]
        for start in range(0, LENGTH, chunk):
            stop = min(LENGTH, start + chunk)
            if causal and stop > i // chunk * chunk:
                continue
            # Causal attention excludes chunks that end in the window, bidirectional attention those inside it.
            inside = stop > first if causal else first <= start and stop <= end
            if not (exclude and inside):
                rows = (x[0, :, start:stop] for x in (q, k, v))
                found.append((*summary(module, 1.0 if causal else 0.5, *rows), 1.0))
        return found

    assert_every_query_equals(module, q, k, v, attended)


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("rank", [4, 7, 9])
def test_flurka_eva_divides_its_landmarks_among_windows(exclude, rank):
    window = 6
    tree = {"preset": "flurka_eva", "compression": {"rank": rank, "compress": "projected"}}
    tree["eva"] = {"window_size": window, "exclude_window": exclude}
    module, (q, k, v) = layer(tree, causal=False), tokens()
    share = -(-rank // -(-LENGTH // window))

    def attended(i: int) -> Attended:
        keys, values = (matrix @ x[0] for matrix, x in zip(module.compressor.pools(v), (k, v)))
        own = slice(i // window * share, (i // window + 1) * share)
        found = [(keys[:, own], values[:, own], 1.0)]
        for start in range(0, LENGTH, window):
            other = slice(start // window * share, (start // window + 1) * share)
            if keys[:, other].shape[1] and not (exclude and other == own):
                rows = q[0, :, start : start + window], keys[:, other], values[:, other]
                found.append((*summary(module, 0.5, *rows), 1.0))
        return found

    assert_every_query_equals(module, q, k, v, attended)
