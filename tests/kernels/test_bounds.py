"""Analysis of machine code: its loops, how often instructions run, and the clocks that each takes."""

import pytest

from benchmarks.kernel_bounds import Code, Instruction

SOURCE = """
for outer in range(5):
    for inner in range(outer):
        work(inner)
    rest(outer)
"""

LISTING = """
\t//## File "PLACE", line 3
 .L_x_0:
        /*0010*/                   MOV R1, R2 ;
\t//## File "PLACE", line 4
 .L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0030*/                   LDS.128 R4, [R2] ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
\t//## File "PLACE", line 5
        /*0050*/                   IMAD R3, R3, R3, R3 ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
\t//## File "PLACE", line 1
        /*0070*/                   MUFU.EX2 R1, R2 ;
        /*0080*/                   EXIT ;
        /*0090*/                   NOP ;
"""


def test_loops_are_found_with_their_instructions():
    code = Code(LISTING)
    assert [sorted(body) for body in code.loops] == [[0, 1, 2, 3, 4, 5], [1, 2, 3]]


def test_instructions_run_as_often_as_their_enclosing_loops(tmp_path):
    (tmp_path / "kernel.py").write_text(SOURCE)
    code = Code(LISTING.replace("PLACE", str(tmp_path / "kernel.py")))
    counts = code.execution_counts({"range(5)": 5.0, "range(outer)": 2.0}.__getitem__)
    # Unreachable instructions are not counted.
    assert counts == {0: 5, 1: 10, 2: 10, 3: 10, 4: 5, 5: 5, 6: 1, 7: 1}
    with pytest.raises(ValueError, match="no for statement for the loop at instruction 1"):
        Code(
            LISTING.replace("line 3", "line 1").replace("line 4", "line 1").replace("line 5", "line 1")
        ).execution_counts(lambda _: 1.0)


def test_passes_of_an_unrolled_loop_and_its_remainder_are_counted_once(tmp_path):
    (tmp_path / "kernel.py").write_text("for step in range(5):\n    work(step)\n")
    load, branch = "/*0010*/ LDG.E R2, [R4.64] ;", "/*0020*/ @!P0 BRA `(.L_x_{}) ;"
    lines = ['\t//## File "PLACE", line 2'.replace("PLACE", str(tmp_path / "kernel.py"))]
    for number, passes in enumerate((4, 1)):
        lines += [f" .L_x_{number}:", *(f"        {load}" for _ in range(passes))]
        lines += [
            "        /*0030*/ MOV R1, R2 ;",
            "        /*0030*/ MOV R1, R3 ;",
            "        " + branch.format(number),
        ]
    counts = Code("\n".join([*lines, "        /*0090*/ EXIT ;"])).execution_counts(lambda _: 8.0)
    assert [counts[i] for i in range(12)] == [*[2.0] * 7, *[0.0] * 4, 1.0]


def test_loops_that_wait_for_a_barrier_do_not_count():
    asks = LISTING.replace("LDS.128 R4, [R2]", "SYNCS.PHASECHK.TRANS64 P0, [R2], R4")
    assert [sorted(body) for body in Code(asks).loops] == []


def test_instructions_have_their_flops_bytes_and_clocks():
    wide = Instruction("@!UPT HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24")
    assert wide.flops == ("HGMMA", 2 * 64 * 128 * 16 / 4)
    assert wide.shared == (128 + 64) * 32 / 4
    assert Instruction("HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR4], R24").kind == "HGMMA"
    assert Instruction("HMMA.1688.F32.TF32 R4, R8, R10, R4").flops == ("TF32", 2 * 16 * 8 * 8)
    assert Instruction("LDSM.16.M88.4 R4, [R2]").shared == 512
    assert Instruction("LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]").shared == 512
    assert Instruction("@P0 MUFU.EX2 R1, R2").clocks["special"] == 2
    assert Instruction("IMAD.MOV.U32 R1, RZ, RZ, R2").clocks["integer"] == 0
    assert Instruction("IMAD R1, R2, R2, R2").clocks["integer"] == 0.5
