"""The counted budget of a step, against formulas, a real optimizer step and tensors counted by hand."""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import budget, counter
from benchmarks.kernels.budget import (
    FIRST_GRADIENT_BYTES,
    GRADIENT_BYTES,
    UPDATE_BYTES,
    Peaks,
    count_step,
    on_one_device,
)
from benchmarks.kernels.counter import CORE, EMBEDDINGS, HEAD
from benchmarks.real_runs import random_batch
from benchmarks.training_runs import benchmark_config
from megakernel.analysis.planning.part_costs import CostMeter, PartShape
from megakernel.config import UserError
from megakernel.model.flops import forward_flops
from megakernel.model.settings import model_settings
from megakernel.parallel import prepare_device
from megakernel.training.engine import Engine
from tests.distributed.processes import cpu_mesh, run_ranks

CONFIGS = Path(__file__).parents[3] / "configs"
TOKENS, VOCAB, WIDTH = 512, 1000, 128


@pytest.fixture(autouse=True, scope="module")
def on_cpu():
    prepare_device("cpu", 0)


def small(attention, **training):
    return benchmark_config(
        {"num_layers": 2, "hidden_size": WIDTH, "num_heads": 2, "attention": attention},
        {"seq_len": TOKENS, "dtype": "bfloat16", **training},
        parallel={"zero_stage": 1},
    )


def work_of(config, part, outside="outside"):
    shape = PartShape(1, TOKENS, 1, False, 1, config.training.activation_checkpointing, "auto", True)
    with CostMeter(config, VOCAB).shape_only(part, shape) as (model, inputs, ledger, _):
        return counter.count(model, inputs, ledger, outside)


def moved(work, part, name):
    return [x.bytes for x in work if (x.part, x.name) == (part, name)]


@pytest.mark.parametrize("attention", ["softmax", "flurka", {"preset": "linear", "output_gate": "silu"}])
def test_products_of_the_matrices_are_those_of_the_formulas(attention):
    config = small(attention)
    formulas = forward_flops(config.model, TOKENS, VOCAB)
    flops = Counter()
    for part, outside in ((0, "outside"), ("last", HEAD)):
        for x in work_of(config, part, outside):
            flops[x.part] += x.flops
    layers, rows = config.model.num_layers, config.model.padded_vocab_size(VOCAB)
    assert flops["projections"] == 3 * TOKENS * formulas["projections"] / layers
    assert flops["MLP"] == 3 * TOKENS * formulas["mlp"] / layers
    assert flops[HEAD] == pytest.approx(3 * TOKENS * formulas["head"] * rows / VOCAB)


def test_kernels_belong_to_the_part_that_starts_them():
    work = work_of(small({"preset": "flurka", "short_convolution": 4}), 0)
    launches = {(x.part, x.name, x.backward) for x in work if x.is_launch}
    assert (CORE, "merge", False) in launches
    assert {(CORE, name, True) for name in ("merge_backward", "window_backward", "bwd_dkv")} <= launches
    assert ("short convolution", "convolve", False) in launches
    assert ("short convolution", "convolve_backward", True) in launches
    assert {part for part, name, _ in launches if name.startswith("swiglu")} == {"activation of the MLP"}
    assert sum(x.name == "merge" for x in work) == 1, "the pass that makes the tables is not counted"


def test_bytes_are_those_of_every_tensor_that_is_read_or_written():
    config = small("softmax")
    layer, first = work_of(config, 0), work_of(config, "first", EMBEDDINGS)
    hidden, inner = 2 * TOKENS * WIDTH, 2 * TOKENS * config.model.ffn_size
    assert moved(layer, "activation of the MLP", "swiglu") == [3 * inner]
    assert moved(layer, "activation of the MLP", "swiglu backward") == [5 * inner]
    norm, added = 2 * hidden + 2 * WIDTH, 4 * hidden + 2 * WIDTH
    assert moved(layer, "norms and residual", "rms_norm") == [norm]
    assert moved(layer, "norms and residual", "add_rms_norm") == [added]
    # Both gradients, what is normed and its gradient; the two tensors of a sum have the same gradient.
    for name in ("rms_norm backward", "add_rms_norm backward"):
        assert moved(layer, "norms and residual", name) == [4 * hidden + 4 * WIDTH]
    weights = (2 * WIDTH * 2 * config.model.ffn_size, 2 * WIDTH * config.model.ffn_size)
    up, down = hidden + 2 * inner + weights[0], inner + hidden + weights[1]
    assert sorted(moved(layer, "MLP", "mm")) == sorted([up] * 3 + [down] * 3)
    assert moved(first, EMBEDDINGS, "embedding") == [2 * hidden], "rows of the tokens, not the whole matrix"


def test_gradients_are_neither_joined_nor_added_by_passes_of_their_own():
    work = work_of(small({"preset": "flurka", "short_convolution": 4}), 0)
    assert [x.name for x in work if x.backward and x.part != CORE and x.name in ("cat", "add", "copy")] == []
    assert moved(work, "short convolution", "new_zeros") == []


def test_a_filled_tensor_is_written_and_its_model_is_not_read():
    seen = counter.Counter([], "here")
    with seen:
        x = torch.empty(4, 8)
        x.new_zeros(3), torch.ones_like(x), x.zero_(), torch.zeros_like(x, dtype=torch.float64)
    assert [x.bytes for x in seen.work] == [12, 128, 128, 256]


def test_recomputed_attention_counts_twice_and_its_flops_do_not():
    whole, again = (work_of(small("flurka", activation_checkpointing=x), 0) for x in ("none", "selective"))
    assert [sum(x.name == "merge" for x in work) for work in (whole, again)] == [1, 2]
    steps = [count_step(small("flurka", activation_checkpointing=x), VOCAB) for x in ("none", "selective")]
    assert steps[0].flops == steps[1].flops


def bytes_of_a_step(config):
    """Bytes per parameter of a real step's update and of its sums of gradients, and the parameters."""
    with cpu_mesh() as mesh:
        engine = Engine(config, model_settings(config, mesh, VOCAB))
        batches = [random_batch(config, VOCAB, mesh)] * engine.micro_batches
        engine.train_step(batches, 1e-3)
        seen = counter.Counter([], "step")
        phases = Counter()
        phase_of = engine._phase

        @contextmanager
        def counted(name):
            before = len(seen.work)
            with phase_of(name):
                yield
            phases[name] += sum(x.bytes for x in seen.work[before:])

        optimizer = engine.engine.optimizer
        add = optimizer._update_hp_grad

        def counted_add(*arguments, **options):
            before = len(seen.work)
            add(*arguments, **options)
            phases["sums"] += sum(x.bytes for x in seen.work[before:])

        engine._phase, optimizer._update_hp_grad = counted, counted_add
        with seen:
            engine.train_step(batches, 1e-3)
        count = sum(x.numel() for x in engine.engine.module.parameters())
        return phases["optimizer"] / count, phases["sums"] / count, count


@pytest.mark.second
def test_the_optimizers_bytes_are_those_of_a_real_step():
    (result,) = run_ranks(bytes_of_a_step, 1, small("softmax", seq_len=32, global_batch_size=2))
    found, of_sums, parameters = result
    # Of the 32 bytes that its schema gives AdamW, 4 are gradients that it writes only if it unscales them.
    assert found == pytest.approx(UPDATE_BYTES + 4, rel=0.01)
    step = count_step(small("softmax", seq_len=32, global_batch_size=2), VOCAB)
    parts = {x.part: x.bytes for x in step.parts}
    assert parts[budget.UPDATE] == pytest.approx(parameters * UPDATE_BYTES, rel=0.01)
    assert of_sums == FIRST_GRADIENT_BYTES + GRADIENT_BYTES
    assert parts[budget.SUMS] == pytest.approx(parameters * of_sums, rel=0.01)


def test_a_step_has_its_layers_and_micro_batches():
    one = count_step(small("flurka"), VOCAB)
    two = count_step(small("flurka", global_batch_size=2), VOCAB)
    core = [next(x for x in step.parts if x.part == CORE) for step in (one, two)]
    assert core[1].kernels == 2 * core[0].kernels
    assert two.flops == pytest.approx(sum(x.flops for x in two.parts), rel=0.03)  # the padding of the head
    lines = budget.budget_table(one, Peaks("given", 100, 1))
    assert lines[-2].startswith("| sum |")
    least = one.milliseconds(Peaks("given", 100, 1))
    assert least[budget.UPDATE] == pytest.approx(1e3 * one.parts[-1].bytes / 1e12)


def test_peaks_are_those_of_the_named_gpu():
    assert Peaks.of("NVIDIA H200") == Peaks.of("h200") == Peaks("H200", 989.0, 4.8)
    assert Peaks.of("NVIDIA H100 PCIe").bandwidth == 2.0
    assert Peaks.of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert budget.chosen_peaks("h200", 620, 3.6) == Peaks("given", 620, 3.6)
    with pytest.raises(UserError, match="--gpu=v100 is unknown; choose b200"):
        budget.chosen_peaks("v100", None, None)


def test_a_shipped_configuration_becomes_one_gpus_share():
    config = on_one_device(CONFIGS / "pretrain-350m.yaml", [])
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (4, 8)
    assert on_one_device(CONFIGS / "pretrain-1b.yaml", []).parallel.context == 1
    with pytest.raises(UserError, match="parallel is set; the step is one GPU's share"):
        on_one_device(CONFIGS / "pretrain-350m.yaml", ["parallel.tensor=2"])
    with pytest.raises(UserError, match="the budget counts bfloat16, ZeRO 1 and adamw"):
        budget.check_countable(small("softmax", dtype="float32"))
    with pytest.raises(UserError, match="update=delta runs flash-linear-attention's kernels"):
        budget.check_countable(small("gated_deltanet"))
    budget.check_countable(small("mamba2"))


def test_tensors_are_counted_in_memory():
    x = torch.empty(4, 1, 8, dtype=torch.bfloat16)
    assert counter._size(x) == counter._size(x.expand(4, 6, 8)) == 64
    assert counter._size(torch.empty(0, 5)) == 0
