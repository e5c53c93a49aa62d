"""A measured step beside its counted budget; the whole path is in test_gpu_check.py."""

import pytest
import torch

from benchmarks.kernels.budget import PartBudget, Peaks, StepBudget
from benchmarks.kernels.counter import CORE, HEAD
from benchmarks.kernels.step import Interval, analyze
from benchmarks.step_profile import ELSE, PRODUCTS, MeasuredRun, beside, family, headline, packed_batch, page
from benchmarks.training_runs import benchmark_config
from megakernel.parallel import prepare_device
from tests.distributed.processes import run_ranks

CONFIG = benchmark_config(
    {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "attention": "softmax"},
    {"seq_len": 4000, "micro_batch_size": 2, "global_batch_size": 4, "dtype": "bfloat16"},
    parallel={"zero_stage": 1},
)
PEAKS = Peaks("given", 100, 1)
WORK = [
    Interval(0, 3000, "merge"),
    Interval(3000, 7000, "nvjet_tst_128x128"),
    Interval(8000, 9000, "triton_poi_fused_add"),
]
PARTS = [
    PartBudget("MLP", 1e11, 0, 12, 0),
    PartBudget(HEAD, 2e11, 0, 3, 2),
    PartBudget(CORE, 0, 2e9, 9, 4),
    PartBudget("optimizer", 0, 5e8, 0, 0),
]


def results(device="NVIDIA H200"):
    times = analyze(WORK, [Interval(0, 10_000, "step 0")])
    run = MeasuredRun(device, "bfloat16", [0.008, 0.009, 0.5], 3.0, 1, 2.5, times, 4e9)
    return run, StepBudget(CONFIG, 257, PARTS, {"merge": CORE})


def test_kernels_are_told_apart_by_their_names():
    names = {
        "merge": CORE,
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>": CORE,
        "aten::_scaled_dot_product_flash_attention_for_cpu": CORE,
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT": PRODUCTS,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": PRODUCTS,
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": PRODUCTS,
        "aten::addmm": PRODUCTS,
        "aten::mm_out_of_something_else": ELSE,
        "triton_poi_fused_add_0": ELSE,
        "at::native::vectorized_elementwise_kernel<4>": ELSE,
    }
    assert {name: family(name, {"merge": CORE}) for name in names} == names


def test_both_columns_add_up():
    run, budget = results()
    rows = {row.split(" | ")[0].strip("| "): row for row in beside(run, budget, PEAKS)}
    assert rows[PRODUCTS] == f"| {PRODUCTS} | 4 | 3 |"
    assert rows[CORE] == f"| {CORE} | 3 | 2 |"
    assert rows[ELSE] == f"| {ELSE} | 1 | 0.5 |"
    assert rows["gaps"] == "| gaps | 2 | - |"
    assert rows["sum"] == "| sum | 10 | 5.5 |"


def test_the_page_has_mfu_only_of_a_known_peak():
    run, budget = results()
    text = headline(run, budget, PEAKS)
    assert f"{budget.flops / 0.009 / 1e14:.1%} MFU of 100 TFLOP/s" in text
    assert f"{4 * 4000 / 0.009:,.0f} tokens/s" in text
    assert "works 80% of the profiled steps" in text
    unknown = headline(*results("cpu"), None)
    assert "no MFU, as the peak of cpu is not known (give --tflops and --bandwidth)" in unknown
    whole = page(run, budget, None, "command")
    assert all(f"## {title}" in whole for title in ("Measured beside counted", "Counted", "Measured"))
    assert "Counted, not measured: at 989 TFLOP/s" in whole


def test_a_batch_is_of_packed_documents():
    batch = packed_batch(CONFIG, 257, 0)
    assert batch.tokens.shape == batch.positions.shape == (2, 4000)
    starts = (batch.positions == 0).sum(1)
    assert torch.all(starts > 1)
    assert torch.all(starts < 20)
    inner = batch.positions[:, 1:]
    assert torch.all((inner == 0) | (inner == batch.positions[:, :-1] + 1))
    assert not torch.equal(batch.tokens, packed_batch(CONFIG, 257, 1).tokens)


def measured_steps():
    from benchmarks.step_profile import measure
    from benchmarks.training_runs import benchmark_config

    config = benchmark_config(
        {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "attention": "flurka"},
        {"seq_len": 128, "micro_batch_size": 1, "global_batch_size": 2},
    )
    run = measure(config, 100, prepare_device("cpu", 0), (1, 2, 2))
    return run.seconds, run.loss, run.times


@pytest.mark.second
def test_real_steps_are_timed_and_profiled():
    ((seconds, loss, times),) = run_ranks(measured_steps, 1)
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert loss == pytest.approx(4.6, abs=0.5)
    assert (times.steps, times.on_gpu) == (2, False)
    assert 0 < times.busy_share <= 1
    assert times.wall == pytest.approx(times.busy + sum(gap.end - gap.start for gap in times.gaps))
    # 2 steps of 2 micro-batches, each with 3 products of 4 matrices and 2 of the head, whose third is a sum.
    assert len(times.spent["aten::mm"]) == 2 * 2 * 14
    assert {gap.host for gap in times.gaps} >= {"forward", "backward", "optimizer"}
