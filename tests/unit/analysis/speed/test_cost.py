"""Counts against arithmetic by hand; tests/kernels/test_counts.py holds them against what kernels do."""

import pytest

from megakernel.analysis.speed.cases import Case
from megakernel.analysis.speed.cost import Cost, needed
from megakernel.analysis.speed.passes import launched

BFLOAT16 = 2
CASE = Case(batch=2, tokens=1024, heads=4, head_dim=64)
ROWS = 2 * 1024 * 4
"""Vectors of 64 numbers in q, in k, in v and in the output."""


def test_the_least_reads_inputs_and_writes_outputs_once():
    forward, both = (needed("linear", CASE, BFLOAT16, backward) for backward in (False, True))
    assert forward.bytes == 4 * ROWS * 64 * 2  # q, k, v, out
    assert both.bytes == 11 * ROWS * 64 * 2  # and q, k, v, do once more, dq, dk, dv


def test_the_least_of_linear_attention_updates_and_reads_a_state_of_every_token():
    forward, both = (needed("linear", CASE, BFLOAT16, backward).flops for backward in (False, True))
    assert forward == ROWS * 2 * (2 * 64 * 65)
    assert both == 3 * forward


def test_the_least_of_softmax_is_half_of_all_pairs():
    assert needed("softmax", CASE, BFLOAT16, False).flops == ROWS * 1025 / 2 * 4 * 64


def test_our_launches_read_keys_and_values_twice_in_forward():
    states, outputs = launched("linear", CASE, BFLOAT16, False)
    assert states.cost.bytes == 2 * ROWS * 64 * 2
    assert outputs.cost.bytes == 4 * ROWS * 64 * 2 + ROWS * 4
    assert states.cost.flops == ROWS * 2 * 64 * 64
    # Chunks of 32 keys: weights and values; the state read, and carried on.
    assert outputs.cost.flops == ROWS * (2 * 32 * 128 + 2 * 2 * 64 * 64)


def test_our_launches_of_backward_by_hand():
    tensors = [one.cost.bytes / (ROWS * 64 * 2) for one in launched("linear", CASE, BFLOAT16, True)]
    number = 4 / (64 * 2)  # a float32 beside a vector of 64 numbers: 1 / den, and in backward do.o
    assert tensors == [2, 4 + number, 6 + 2 * number, 2 + 2 * number, 4 + 2 * number, 5 + 2 * number]


def test_a_state_too_large_for_one_program_is_cut_and_its_queries_and_keys_come_from_the_cache():
    wide = Case(batch=2, tokens=1024, heads=4, head_dim=128)
    vectors = [one.cost.bytes // (ROWS * 128 * 2) for one in launched("hedgehog", wide, BFLOAT16, True)]
    # Four blocks of values: q and k once, and gradients of q, k and of the map's arguments in four parts of float32,
    # which count twice.
    assert vectors == [2, 4, 5 + 16, 2, 4, 4 + 16, 2 * 16 + 4, 4]


def test_a_learned_map_costs_the_gradient_of_its_arguments():
    narrow = Case(batch=2, tokens=1024, heads=4, head_dim=32)
    plain, hedgehog = (launched(preset, narrow, BFLOAT16, True) for preset in ("linear", "hedgehog"))
    more = [b.cost.bytes - a.cost.bytes for a, b in zip(plain, hedgehog)]
    vector = ROWS * 32 * 2
    assert more == [0, 0, vector, 0, 0, vector]
    assert hedgehog[-1].cost.bytes == 4 * vector


def test_a_feature_map_with_a_matrix_costs_products_but_no_bytes():
    plain, hedgehog = (launched(preset, CASE, BFLOAT16, False) for preset in ("linear", "hedgehog"))
    assert [one.cost.bytes for one in plain] == [one.cost.bytes for one in hedgehog]
    # Twice the features, from a 64 x 64 matrix of two terms.
    assert hedgehog[0].cost.flops == ROWS * (2 * 2 * 64 * 64 + 2 * 128 * 64)


def test_operations_of_backward_by_hand():
    work = [one.cost.flops / ROWS for one in launched("linear", CASE, BFLOAT16, True)[2:]]
    state, pairs = 2 * 64 * 64, 2 * 32 * 64  # one product with the state; one of the pairs of a chunk
    # g.u, dphi(q) and the sum of keys in half a chunk, the state read and carried on; phi(q) g^T; then weights and dv,
    # and g.u and dphi(k), each with the gradient of the state read and carried on.
    assert work == [3 * pairs / 2 + 2 * state, state, 2 * pairs + 2 * state, 2 * pairs + 2 * state]


def test_flurka_s_forward_by_hand():
    pool, read = launched("flurka", CASE, BFLOAT16, False)
    blocks, rank, features = ROWS / 64, 8, 128
    handed_on = blocks * rank * (features * 2 + 64 * 4)  # phi(E K) in the dtype of tokens, F V in float32
    assert pool.cost.bytes == 2 * ROWS * 64 * 2 + handed_on + blocks * rank * 64 * 4  # and E K
    # The gate, and what sums over landmarks and over the window are measured by, are a float32 each.
    assert read.cost.bytes == ROWS * (4 * 64 * 2 + 3 * 4) + handed_on
    # Tiles have 16 rows at least, of landmarks too; E, F and the matrix are of two terms beside 16 bits.
    state, matrix = 2 * features * 64, 2 * 64 * 64
    assert pool.cost.flops == blocks * 16 * (2 * 2 * 64 * (64 + 64) + matrix + state)
    # The first 32 queries of a block meet 32 keys, the others 64.
    window = blocks * 32 * (32 + 64) * (2 * 64 + 2 * 64)
    assert read.cost.flops == window + ROWS * (2 * matrix + state) + blocks * 16 * state


def test_mechanisms_whose_kernels_are_not_counted_say_so():
    assert launched("softmax", CASE, BFLOAT16, True) is None
    assert launched("linformer_causal", CASE, BFLOAT16, True) is None
    assert launched("flurka_rnn", Case(1, 1000, 4, 8, rank=16), BFLOAT16, True) is None


def test_a_layer_counts_its_weights_and_every_input_once():
    case = Case(1, 1000, 4, 8, rank=16)
    cost = needed("flurka_rnn", case, BFLOAT16, False)
    weights = 4 * 32 * 32 + 2 * 32 * 512 + 2 * 1000 * 16
    assert cost.bytes == 2 * (2 * 1000 * 32 + weights)
    projections = (
        1000 * 2 * 32 * 32 * 2 + 16 * 2 * 32 * 32 * 2
    )  # q and output of tokens, k and v of landmarks
    compression = 2 * 2 * 1000 * 16 * 32
    state, readout = 16 * 4 * 2 * 8 * 9, 1000 * 4 * 2 * 8 * 9
    assert cost.flops == pytest.approx(projections + compression + state + readout + 1000 * 4 * 32 * 512)


def test_a_pass_takes_the_longer_of_its_two_times():
    assert Cost(bytes=100, flops=10).seconds(bandwidth=10, peak=10) == 10
    assert Cost(bytes=10, flops=100).seconds(bandwidth=10, peak=10) == 10
