"""Operands of matrix products that are overwritten too early are found in Triton's TTGIR."""

from benchmarks.kernels.races import overwritten_operands


def loop(buffer: str, slots: int = 1, copies_before: int = 1, wait: str = "", register: bool = False) -> str:
    """A loop whose product reads a slot of a buffer, into which each iteration then copies a later operand."""
    slot = f"ttg.memdesc_index %{buffer}[%c0] : !ttg.memdesc<{slots}x64x64xbf16, #s> -> !ttg.memdesc<64x64xbf16, #s>"
    copy = (
        "ttg.async_copy_global_to_local %p, %view mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16, #s>"
    )
    before = f"    %view = {slot}\n    %token = {copy}\n" * copies_before
    left = "      %x = arith.truncf %y : tensor<64x64xf32> to tensor<64x64xbf16>\n" * register
    return f"""
    %{buffer} = ttg.local_alloc : () -> !ttg.memdesc<{slots}x64x64xbf16, #s>
{before}    %out = scf.for %i = %a to %b step %c iter_args(%sum = %zero) -> (tensor<64x64xf32>)  : i32 {{
      %own = {slot}
{left}      %product = ttng.warp_group_dot {"%x" if register else "%k"}, %own, %sum {{isAsync = true}}
{wait}      %view = {slot}
      %token = {copy}
      scf.yield %product : tensor<64x64xf32>
    }} loc(#loc)
    %end = ttng.warp_group_dot_wait %out {{pendings = 0 : i32}} : tensor<64x64xf32>
"""


WAIT = "      %ended = ttng.warp_group_dot_wait %product {pendings = 0 : i32} : tensor<64x64xf32>\n"
WAIT_FOR_EARLIER = WAIT.replace("pendings = 0", "pendings = 1")


def test_one_slot_needs_a_wait_before_the_copy():
    assert len(overwritten_operands(loop("k"))) == 1
    assert len(overwritten_operands(loop("k", wait=WAIT_FOR_EARLIER))) == 1
    assert overwritten_operands(loop("k", wait=WAIT)) == []


def test_a_copy_into_the_slot_of_the_iteration_before_needs_that_product_to_have_ended():
    assert len(overwritten_operands(loop("k", slots=2))) == 1
    assert overwritten_operands(loop("k", slots=2, wait=WAIT_FOR_EARLIER)) == []


def test_copies_two_iterations_ahead_need_more_than_two_slots():
    assert len(overwritten_operands(loop("k", slots=2, copies_before=2, wait=WAIT_FOR_EARLIER))) == 1
    assert overwritten_operands(loop("k", slots=3, copies_before=2, wait=WAIT_FOR_EARLIER)) == []


def test_loops_side_by_side_may_use_the_same_names():
    raced = loop("first") + loop("second", wait=WAIT)
    (found,) = overwritten_operands(raced)
    assert "%first is overwritten" in found
    (found,) = overwritten_operands(loop("first", wait=WAIT) + loop("second"))
    assert "%second is overwritten" in found


def test_an_operand_in_registers_is_not_computed_before_the_product_of_the_iteration_before_has_ended():
    (found,) = overwritten_operands(loop("k", slots=2, wait=WAIT_FOR_EARLIER, register=True))
    assert "%x is overwritten" in found
    assert overwritten_operands(loop("k", slots=2, wait=WAIT, register=True)) == []
