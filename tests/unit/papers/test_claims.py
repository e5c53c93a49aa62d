"""FLuRKA's claims about operations, against the equations and against the FLOPs that torch counts in the modules."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megakernel.attention import build
from megakernel.ops.kernel_attention.chunked import CHUNK
from megakernel.papers.flurka.claims import (
    LayerSizes,
    flurka_operations,
    in_region_of_claim_1,
    in_region_of_claim_2,
    is_long_enough,
    kernel_operations,
    low_rank_operations,
    speedups,
)

GRID = [
    LayerSizes(tokens, rank, width, heads)
    for tokens, rank, width, heads in itertools.product(
        [256, 1000, 3000, 8000, 20_000, 65_536],
        [16, 60, 100, 128, 250, 500, 1000, 1500, 8000, 20_000],
        [64, 128, 256, 512, 800, 1024, 2600, 20_000],
        [1, 2, 4, 8, 16],
    )
]


def in_region_of_claim_3(sizes: LayerSizes) -> bool:
    """N > d_k (H + 2) and d_m > d_k."""
    return sizes.tokens > sizes.rank * (sizes.heads + 2) and sizes.width > sizes.rank


def holds_except_for_the_error_in_equation_10(in_region, advantage) -> bool:
    region = [sizes for sizes in GRID if in_region(sizes)]
    assert len(region) > 100
    exceptions = [sizes for sizes in region if advantage(sizes) <= 1]
    return len(exceptions) < len(region) / 100 and not any(map(is_long_enough, exceptions))


def test_claim_1_flurka_needs_fewer_operations_than_both_parents():
    assert holds_except_for_the_error_in_equation_10(in_region_of_claim_1, lambda sizes: min(speedups(sizes)))


def test_claim_2_flurka_needs_fewer_operations_than_low_rank():
    region = [sizes for sizes in GRID if in_region_of_claim_2(sizes)]
    assert len(region) > 500
    assert all(speedups(sizes)[0] > 1 for sizes in region)


def test_claim_3_flurka_needs_fewer_operations_than_its_kernel():
    assert holds_except_for_the_error_in_equation_10(in_region_of_claim_3, lambda sizes: speedups(sizes)[1])


def test_the_printed_bound_of_claims_1_and_3_is_too_low_if_width_barely_exceeds_rank():
    sizes = LayerSizes(tokens=3000, rank=250, width=256, heads=8)
    assert in_region_of_claim_1(sizes)
    assert in_region_of_claim_3(sizes)
    assert speedups(sizes)[1] < 1


def test_claim_1_is_inside_claims_2_and_3():
    assert all(
        in_region_of_claim_2(sizes) and in_region_of_claim_3(sizes)
        for sizes in GRID
        if in_region_of_claim_1(sizes)
    )


def test_outside_the_regions_a_parent_can_need_fewer_operations():
    few_keys = LayerSizes(tokens=20_000, rank=16, width=512, heads=4)
    assert not in_region_of_claim_2(few_keys)
    assert speedups(few_keys)[0] < 1
    more_keys_than_width = LayerSizes(tokens=20_000, rank=2048, width=512, heads=4)
    assert not in_region_of_claim_3(more_keys_than_width)
    assert speedups(more_keys_than_width)[1] < 1


def test_speedups_grow_along_the_papers_sweeps():
    over_low_rank = [speedups(LayerSizes(20_000, rank, 512, 4))[0] for rank in range(8000, 20_001, 3200)]
    over_kernel = [speedups(LayerSizes(20_000, 1000, width, 4))[1] for width in range(800, 20_001, 3200)]
    assert over_low_rank == sorted(over_low_rank)
    assert over_kernel == sorted(over_kernel)


SIZES = LayerSizes(tokens=1024, rank=48, width=64, heads=4)
"""Small sizes in the region of claim 1."""


def counted(preset: str, changes: dict) -> float:
    """FLOPs that torch counts in the projections and the mechanism of one layer."""
    config = {"preset": preset, **changes}
    core = build(
        config,
        num_heads=SIZES.heads,
        head_dim=int(SIZES.head_dim),
        causal=False,
        max_positions=SIZES.tokens,
    )
    x, weight = torch.zeros(SIZES.tokens, 1, SIZES.width), torch.zeros(SIZES.width, SIZES.width)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        keys = values = x
        if core.compresses_input:
            keys, values = core.compress(x, first=0, length=SIZES.tokens)
        q, k, v = (
            F.linear(tokens, weight).unflatten(-1, (SIZES.heads, -1)).permute(1, 2, 0, 3)
            for tokens in (x, keys, values)
        )
        core(q, k, v)
    return counter.get_total_flops()


def matrix_flops(operations: dict[str, float]) -> float:
    """FLOPs that torch counts for an equation: a multiplication and an addition per term of its matrix products."""
    return 2 * sum(count for part, count in operations.items() if part not in ("softmax", "feature_map"))


LOW_RANK = {"compression": {"rank": SIZES.rank}}


def test_linformer_executes_equation_6(monkeypatch):
    # Torch counts no FLOPs inside the fused softmax on a CPU.
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "reference")
    assert in_region_of_claim_1(SIZES)
    assert counted("linformer", LOW_RANK) == matrix_flops(low_rank_operations(SIZES))


def with_normalizer(operations: dict[str, float], keys: int) -> float:
    """Adds what the equations omit: the normalizer, a column of the state, and the sum of the chunks' states."""
    state = SIZES.head_dim * (SIZES.head_dim + 1) * SIZES.heads
    chunks = -(-keys // min(CHUNK, keys))
    column = (SIZES.head_dim + 1) / SIZES.head_dim
    products = {part: count * column for part, count in operations.items() if part in ("state", "readout")}
    padded = {"state": products["state"] * chunks * min(CHUNK, keys) / keys}
    return matrix_flops(operations | products | padded) + 2 * (chunks + 1) * state


def test_linear_attention_executes_equation_7():
    assert counted("linear", {}) == with_normalizer(kernel_operations(SIZES), SIZES.tokens)


def test_flurka_executes_equation_8():
    assert counted("flurka_rnn", LOW_RANK) == with_normalizer(flurka_operations(SIZES), SIZES.rank)


def test_compressing_after_the_projections_costs_projections_of_all_tokens():
    naive = {"compression": {"rank": SIZES.rank, "compress": "projected"}}
    saved = counted("flurka_rnn", naive) - counted("flurka_rnn", LOW_RANK)
    assert saved == 2 * 2 * (SIZES.tokens - SIZES.rank) * SIZES.width**2


@pytest.mark.parametrize("tokens", [20_000])
def test_the_speed_settings_of_the_paper_are_in_the_stated_regions(tokens):
    assert in_region_of_claim_1(LayerSizes(tokens, 1500, 2600, 8))
    assert all(in_region_of_claim_2(LayerSizes(tokens, rank, 512, 4)) for rank in (8000, 11_200, 14_400))
    assert all(in_region_of_claim_3(LayerSizes(tokens, 1000, width, 4)) for width in (4000, 10_400, 20_000))
