"""Lower bounds of bytes and operations against hand-computed values."""

import pytest

from benchmarks.kernels.attention.cases import Case, Cost, lower_bound

BFLOAT16 = 2
CASE = Case(batch=2, tokens=1024, heads=4, head_dim=64)
ROWS = 2 * 1024 * 4
"""Vectors of 64 numbers in q, in k, in v and in the output."""


def test_the_lower_bound_reads_inputs_and_writes_outputs_once():
    forward, both = (lower_bound("linear", CASE, BFLOAT16, backward) for backward in (False, True))
    assert forward.bytes == 4 * ROWS * 64 * 2  # q, k, v, out
    assert both.bytes == 11 * ROWS * 64 * 2  # and again q, k, v, dO, then dq, dk, dv


def test_the_lower_bound_of_linear_attention_updates_and_reads_a_state_per_token():
    forward, both = (lower_bound("linear", CASE, BFLOAT16, backward).flops for backward in (False, True))
    assert forward == ROWS * 2 * (2 * 64 * 65)
    assert both == 3 * forward


def test_the_lower_bound_of_softmax_is_half_of_all_pairs():
    assert lower_bound("softmax", CASE, BFLOAT16, False).flops == ROWS * 1025 / 2 * 4 * 64


def test_a_layer_counts_its_weights_and_every_input_once():
    case = Case(1, 1000, 4, 8, rank=16)
    cost = lower_bound("flurka_rnn", case, BFLOAT16, False)
    weights = 4 * 32 * 32 + 2 * 32 * 512 + 2 * 1000 * 16
    assert cost.bytes == 2 * (2 * 1000 * 32 + weights)
    projections = (
        1000 * 2 * 32 * 32 * 2 + 16 * 2 * 32 * 32 * 2
    )  # q and output of tokens, k and v of landmarks
    compression = 2 * 2 * 1000 * 16 * 32
    state, readout = 16 * 4 * 2 * 8 * 9, 1000 * 4 * 2 * 8 * 9
    assert cost.flops == pytest.approx(projections + compression + state + readout + 1000 * 4 * 32 * 512)


def test_a_computation_takes_the_longer_of_memory_and_compute_time():
    assert Cost(bytes=100, flops=10).seconds(bandwidth=10, peak=10) == 10
    assert Cost(bytes=10, flops=100).seconds(bandwidth=10, peak=10) == 10
