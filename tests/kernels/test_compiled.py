"""Properties of the compiled kernels: offsets do not overflow, and no thread loads overwritten elements."""

import json

import pytest
import torch

from benchmarks.kernels.cases import CASES
from megakernel.ops.kernels.launch import MAX_ROW_STRIDE, Rows, contiguous_rows, record_launches
from megakernel.ops.kernels.launcher import FEATURES_AT_ONCE
from megakernel.ops.kernels.primitives import padded
from tests.kernels.compiled import products, with_names, without_interpreter

KERNELS = 29
"""All kernels."""

REUSED = {
    (
        "flurka_attention.composed_kernels.pool_gradients",
        "dv_pointer",
    ): "a row is of one program, which has loaded it before",
    ("flurka_attention.decode_kernel.step", "landmarks"): "a barrier is in between",
    ("flurka_attention.merge_kernels.merge_backward", "dq_pointer"): "a barrier is in between",
    ("flurka_attention.merge_kernels.merge_backward", "queries_tokens_features"): "a barrier is in between",
    (
        "flurka_attention.merge_kernels.window_dq",
        "dq_pointer",
    ): "a row is of one program, which has loaded it before",
    ("flurka_attention.window_kernels.window_backward", "dk_pointer"): "a barrier is in between",
    ("kernel_attention.kernels.write_keys", "keys_tokens_features"): "a barrier is in between",
    ("kernel_attention.kernels.read", "scale"): "the old and the new value give the same maximum",
    ("kernel_attention.kernels.write_keys", "keys_tokens_logs"): "a barrier is in between",
    ("kernel_attention.query_kernels.bwd_dq", "queries_tokens_features"): "a barrier is in between",
    ("selected_attention.kernels.fwd", "out"): "a row is of one program, which has loaded it before",
    ("selected_attention.kernels.fwd", "lse"): "a row is of one program, which has loaded it before",
    ("selected_attention.kernels.bwd_dq", "dq"): "a row is of one program, which has loaded it before",
    (
        "kernels.states.pass_states",
        "added_sums",
    ): "the program has loaded a segment's before it overwrites them",
}
"""(kernel, argument) that is both loaded and stored -> why no thread loads what another has overwritten."""

OVERFLOWS = """
  tt.func public @read(%q: !tt.ptr<bf16>, %q_head: i32, %q_row: i32) {
    %rows = tt.make_range {end = 32 : i32, start = 0 : i32} : tensor<32xi32>
    %row = tt.splat %q_row : i32 -> tensor<32xi32>
    %inside = arith.muli %rows, %row : tensor<32xi32>
    %wide = arith.extsi %q_head : i32 to i64
    %enough = arith.muli %wide, %wide : i64
    %sum = arith.addi %q_head, %q_row : i32
    %short = arith.muli %sum, %g : i32
"""


def test_products_of_strides_are_found():
    assert products(OVERFLOWS) == ["%short = arith.muli %sum, %g : i32"]


def test_strides_in_tuples_have_their_names():
    numbered = OVERFLOWS.replace("%q:", "%q_0:").replace("%q_head", "%q_1").replace("%q_row", "%q_2")
    named = Rows(torch.empty(1), batch=1, head=32, row=64)  # a stride of 1 is not passed
    assert products(numbered) == []
    assert products(with_names(numbered, [named], ["q"])) == products(OVERFLOWS)


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, list[str], list[str]]]:
    """Of every launch: name, 32-bit products, and arguments that are both loaded and stored."""
    done = without_interpreter("tests.kernels.compiled")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({name for name, *_ in found}) == KERNELS
    return found


@pytest.mark.second
def test_no_kernel_multiplies_a_stride_in_32_bits(compiled):
    assert [(name, products) for name, products, _ in compiled if products] == []


@pytest.mark.second
def test_no_thread_loads_what_another_overwrites(compiled):
    assert {(name, x) for name, _, reused in compiled for x in reused} == set(REUSED)


@pytest.mark.parametrize("case", [name for name in CASES if "d=128" in name])
def test_programs_have_one_warpgroup_where_matrix_products_are_asynchronous(case):
    with record_launches(90) as launches:
        CASES[case]()
    assert {launch.warps for launch in launches} <= {1, 2, 4}


def test_tiles_of_states_have_an_element_for_every_thread():
    assert padded(1) * FEATURES_AT_ONCE >= 4 * 32  # warps of pass_states


@pytest.mark.parametrize(("apart", "copied"), [(MAX_ROW_STRIDE, False), (MAX_ROW_STRIDE + 1, True)])
def test_rows_that_lie_far_apart_are_copied(apart, copied):
    x = torch.empty(2 * apart)[: 2 * apart].as_strided((2, 16), (apart, 1))
    assert (contiguous_rows(x) is not x) is copied
