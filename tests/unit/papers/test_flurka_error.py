"""Theorem 1 of FLuRKA: the parts of its error, and their bound."""

import math

import pytest
import torch

from megakernel.papers.flurka.flurka_error import SAMPLES, error_parts, largest_row, smallest_epsilon
from megakernel.papers.skyformer.measurements import FEATURES, encoder_layer

TOKENS, WIDTH, HEADS = 48, 8, 2


@pytest.fixture(scope="module")
def qkv():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 1, HEADS, TOKENS, WIDTH, generator=draw, dtype=torch.float64)


@pytest.fixture(scope="module")
def parts(qkv):
    return dict(error_parts(*qkv))


@pytest.mark.parametrize("landmarks", FEATURES)
def test_the_parts_are_the_errors_of_the_layers(qkv, parts, landmarks):
    """FLuRKA's layer against Linformer's with the same E and F, and that against softmax's."""
    compression = {"rank": landmarks, "compress": "projected"}
    flurka = {"preset": "flurka_performer", "compression": compression, "feature_map": {"samples": SAMPLES}}
    linformer = {"preset": "linformer", "compression": compression}
    with torch.no_grad():
        outputs = {
            name: encoder_layer(form, qkv[0])(*qkv)
            for name, form in (("flurka", flurka), ("low rank", linformer), ("softmax", "softmax"))
        }
    for part, (of, against) in {
        "error": ("flurka", "softmax"),
        "kernel_part": ("flurka", "low rank"),
        "low_rank_part": ("low rank", "softmax"),
    }.items():
        expected = largest_row(outputs[of] - outputs[against]).flatten()
        torch.testing.assert_close(parts[landmarks][part], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parts[landmarks]["softmax"], largest_row(outputs["softmax"]).flatten())


def test_the_error_is_at_most_the_sum_of_its_parts_and_the_kernel_part_within_its_bound(parts):
    for found in parts.values():
        assert (found["error"] <= found["kernel_part"] + found["low_rank_part"]).all()
        assert (found["kernel_part"] <= found["kernel_bound"]).all()


def test_linformers_epsilon_solves_its_equation_where_that_has_a_solution():
    assert smallest_epsilon(37, 3) == math.inf, "34 log(3) is 37.1"
    assert smallest_epsilon(38, 3) < 2 / 3
    epsilon = smallest_epsilon(4096, 64)
    assert 0 < epsilon < 2 / 3
    assert epsilon**2 - epsilon**3 == pytest.approx(5 * math.log(64) / 4096, rel=1e-9)


def test_the_low_rank_bound_is_linformers(qkv, parts):
    q, k, v = qkv
    spectral = [torch.linalg.matrix_norm(x, ord=2) for x in ((q @ k.mT / WIDTH**0.5).softmax(-1), v)]
    for landmarks, found in parts.items():
        epsilon = smallest_epsilon(landmarks, WIDTH)
        expected = (epsilon * spectral[0] * spectral[1]).flatten()
        torch.testing.assert_close(found["low_rank_bound"], expected)
        torch.testing.assert_close(found["bound"], expected + found["kernel_bound"])
