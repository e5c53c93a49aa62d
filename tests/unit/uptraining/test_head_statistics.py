"""Statistics of attention heads, against loops over pairs of tokens."""

import math

import pytest
import torch

from megakernel.uptraining.head_statistics import HeadSums, HeadTag, head_statistics
from megakernel.uptraining.sampled_queries import CapturedInputs, SampledQueries

TOKENS, HEADS, BLOCK = 12, 2, 3
QUERIES = torch.tensor([2, 5, 8, 11])
POSITIONS = torch.stack([torch.arange(TOKENS), torch.cat([torch.arange(4), torch.arange(8)])])


@pytest.fixture(scope="module")
def example():
    """Sampled queries of packed sequences, weights that contain ties, and scores."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, TOKENS, 4, generator=draw, dtype=torch.float64)
    rows = SampledQueries.of(CapturedInputs(POSITIONS, q=q, k=k, v=v), QUERIES, causal=True)
    drawn = torch.randint(1, 4, (2, HEADS, len(QUERIES), TOKENS), generator=draw).double()
    weights = drawn * rows.visible[:, None]
    scores = rows.scores()
    return rows, weights / weights.sum(-1, keepdim=True), rows.softmax(scores), scores


def visible_keys(row, query):
    """Indices of the keys that a query sees."""
    return [j for j in range(query + 1) if POSITIONS[row, query] - POSITIONS[row, j] == query - j]


def mean_rank(values, x):
    return sum(y < x for y in values) + (sum(y == x for y in values) - 1) / 2


def spearman(a, b):
    ranks = torch.tensor([[mean_rank(x, y) for y in x] for x in (a, b)], dtype=torch.float64)
    return torch.corrcoef(ranks)[0, 1].item()


def reference(weights, scores, blocks):
    """Reference for one head: entropies, rank correlations and far weights of its queries."""
    entropies, correlations, far = [], [], []
    for row in range(2):
        for r, query in enumerate(QUERIES.tolist()):
            keys = visible_keys(row, query)
            of_keys = [weights[row, r, j].item() for j in keys]
            entropies.append(-sum(w * math.log(w) for w in of_keys))
            correlation = spearman(of_keys, [scores[row, r, j].item() for j in keys])
            correlations += [] if math.isnan(correlation) else [correlation]
            first = POSITIONS[row, query].item() // BLOCK - blocks + 1
            weights_beyond = [w for w, j in zip(of_keys, keys) if POSITIONS[row, j] // BLOCK < first]
            far += [sum(weights_beyond)] if weights_beyond else []
    return entropies, correlations, far


@pytest.mark.parametrize("blocks", [1, 2])
def test_statistics_equal_loops_over_pairs(example, blocks):
    rows, student, teacher, scores = example
    found = head_statistics(rows, student, teacher, scores, (BLOCK, blocks))
    for head in range(HEADS):
        entropies, correlations, far = reference(student[:, head], scores[:, head], blocks)
        of_teacher, _, far_of_teacher = reference(teacher[:, head], scores[:, head], blocks)
        expected = {
            "entropy": entropies,
            "teacher_entropy": of_teacher,
            "rank_correlation": correlations,
            "far_mass": far,
            "teacher_far_mass": far_of_teacher,
        }
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            sums, counts = found[name]
            assert counts[head] == len(values), name
            assert sums[head].item() == pytest.approx(sum(values), rel=1e-12), name


def test_a_layer_without_a_window_has_no_far_weight(example):
    found = head_statistics(*example, None)
    assert found.keys() == {"entropy", "teacher_entropy", "rank_correlation"}


def test_sums_of_all_ranks_give_the_means_of_all_heads():
    """Two tensor-parallel ranks of two data-parallel ranks each, and a layer on another pipeline stage."""
    parts = []
    for first_head, layer, scale in ((2, 0, 1.0), (0, 0, 2.0), (0, 0, 4.0), (2, 0, 3.0), (0, 1, 5.0)):
        sums = HeadSums()
        for _ in range(2):
            tag = HeadTag("error", layer, first_head)
            sums.add(tag, scale * torch.tensor([1.0, 2.0]), torch.tensor(4))
        parts.append(sums)

    gathered = []
    for part in parts:
        part.means(lambda own: gathered.append(own) or [own])
    means = parts[0].means(lambda own: gathered)
    assert means["error"][0].tolist() == [0.75, 1.5, 0.5, 1.0]
    assert means["error"][1].tolist() == [1.25, 2.5]
