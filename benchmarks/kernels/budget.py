"""Counted budget of a training step: FLOPs, bytes, operations and kernels of each part. Nothing here is measured.

    python -m benchmarks.kernels.budget configs/pretrain-350m.yaml --gpu h200
    python -m benchmarks.kernels.budget configs/pretrain-350m.yaml training.seq_len=32768 training.micro_batch_size=1 \\
        --tflops 620 --bandwidth 3.6

The step is one GPU's share of a node of 8: two micro-batches, without parallelism. FLOPs are those that the formulas
need, the numerator of MFU. Bytes are counted by running one layer of each kind, forward and backward, on tensors
without contents: of every operation and every launched kernel, each tensor that it reads or writes counts once. Norms,
SwiGLU, rotation and cross entropy count as Liger-Kernel's kernels. The milliseconds are the larger of FLOPs at the
GPU's peak and bytes at its bandwidth, part by part. Real steps take longer; `benchmarks.step_profile` measures them.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.kernels.counter import CORE, EMBEDDINGS, HEAD, PARTS, RESIDUAL, Work, count
from benchmarks.page import command_line, page_header, page_parser, run_main, table, table_row, write_page
from benchmarks.training_runs import VOCAB_SIZE
from megakernel.analysis.planning.part_costs import CostMeter, Part, PartShape
from megakernel.config import Config, UserError, load
from megakernel.model.flops import attention_flops, forward_flops, training_flops_per_token
from megakernel.model.parameters import parameter_count
from megakernel.parallel import prepare_device
from megakernel.training.observing.peak_speed import DENSE_BF16_TFLOPS

MICRO_BATCHES = 2
"""Of one of 8 GPUs in a step of configs/pretrain-350m.yaml."""

BANDWIDTHS = {
    "B200": 8.0,
    "H200 NVL": 4.8,
    "H200": 4.8,
    "H100 NVL": 3.9,
    "H100 PCIe": 2.0,
    "H100": 3.35,
    "A100": 2.04,
}
"""Part of a device name -> TB/s of its memory, from its data sheet; the first match applies."""

FIRST_GRADIENT_BYTES, GRADIENT_BYTES = 6, 10
"""A parameter and micro-batch: the first bfloat16 gradient of a step is copied into the float32 sum (2 + 4), each later
one is added there (2 + 4 + 4)."""

UPDATE_BYTES = 46
"""A parameter and step, of DeepSpeed's BF16_Optimizer alone: the norm reads the gradient (4), clipping scales it (8),
AdamW reads weight, gradient and moments and writes three of them (28), and the weight becomes bfloat16 (6)."""

SUMS, UPDATE = "sums of gradients", "optimizer"


class Peaks(NamedTuple):
    """What a GPU reaches at most."""

    name: str

    tflops: float
    """Dense matrix products in bfloat16."""

    bandwidth: float
    """TB/s."""

    @staticmethod
    def of(name: str) -> "Peaks | None":
        """Those of a device by its torch.cuda.get_device_name, or of h100; None if unknown."""
        known = (x for x in BANDWIDTHS if x.lower() in name.lower() and "MIG" not in name)
        gpu = next(known, None)
        return None if gpu is None else Peaks(gpu, DENSE_BF16_TFLOPS[gpu], BANDWIDTHS[gpu])

    def milliseconds(self, flops: float, moved: float) -> float:
        """The larger of both times."""
        return 1e3 * max(flops / (self.tflops * 1e12), moved / (self.bandwidth * 1e12))


class PartBudget(NamedTuple):
    """Counts of a part in one step."""

    part: str
    flops: float
    bytes: float
    operations: int
    """Of torch, without views."""

    kernels: int
    """Launches of this repository's kernels and of Liger-Kernel's."""


class StepBudget(NamedTuple):
    """Counts of one step."""

    config: Config
    vocab_size: int
    parts: list[PartBudget]

    kernel_parts: dict[str, str]
    """Name of a launched kernel -> its part."""

    @property
    def tokens(self) -> int:
        """Of one step."""
        training = self.config.training
        return training.global_batch_size * training.seq_len

    @property
    def flops(self) -> float:
        """That the formulas need in one step."""
        sizes = (self.config.training.seq_len, self.vocab_size, self.config.predicted_share)
        return self.tokens * training_flops_per_token(self.config.model, *sizes)

    def milliseconds(self, peaks: Peaks) -> dict[str, float]:
        """Part -> its least time."""
        return {x.part: peaks.milliseconds(x.flops, x.bytes) for x in self.parts}


def on_one_device(path: Path, overrides: Sequence[str], vocab_size: int = VOCAB_SIZE) -> Config:
    """A shipped configuration as one GPU of a node of 8 runs it; `overrides` go before what this sets."""
    for key in ("parallel.", "training.global_batch_size"):
        if any(x.startswith(key) for x in overrides):
            raise UserError(f"{key.strip('.')} is set; the step is one GPU's share of a node: remove the key")
    alone = [f"parallel.{axis}=1" for axis in ("tensor", "context", "pipeline")]
    keys = ["parallel.sequence_parallel=false", f"model.vocab_size={vocab_size}", *overrides]
    config = load(path, [*keys, *alone, "training.global_batch_size=1024", "training.seq_len_schedule=[]"])
    size = MICRO_BATCHES * config.training.micro_batch_size
    return load(path, [*keys, *alone, f"training.global_batch_size={size}", "training.seq_len_schedule=[]"])


def count_step(config: Config, vocab_size: int = VOCAB_SIZE) -> StepBudget:
    """Count a step of one device; after `prepare_device`."""
    training, model = config.training, config.model
    micro_batches = training.global_batch_size // training.micro_batch_size
    shape = PartShape(
        training.micro_batch_size * model.sequences_per_sample,
        training.seq_len,
        *(1, False, 1),
        training.activation_checkpointing,
        "auto",
        True,
    )
    meter = CostMeter(config, vocab_size)

    def work_of(part: Part, outside: str) -> list[Work]:
        with meter.shape_only(part, shape) as (layers, inputs, ledger, _):
            return count(layers, inputs, ledger, outside)

    kinds = Counter(attention.model_dump_json() for attention in model.attentions)
    first = {
        attention.model_dump_json(): index for index, attention in reversed([*enumerate(model.attentions)])
    }
    work = [*work_of("first", EMBEDDINGS), *work_of("last", HEAD)]
    for kind, layers in kinds.items():
        work += layers * work_of(first[kind], RESIDUAL)
    flops = _flops(config, vocab_size)
    parts = []
    for name in dict.fromkeys((EMBEDDINGS, *PARTS.values(), HEAD)):
        here = [x for x in work if x.part == name]
        if here:
            operations, kernels = (sum(x.is_launch == kind for x in here) for kind in (False, True))
            counts = (sum(x.bytes for x in here), operations, kernels)
            parts.append(PartBudget(name, flops.get(name, 0.0), *(micro_batches * x for x in counts)))
    parameters = parameter_count(model, vocab_size, training.seq_len)
    of_sums = FIRST_GRADIENT_BYTES + (micro_batches - 1) * GRADIENT_BYTES
    parts.append(PartBudget(SUMS, 0.0, parameters * of_sums, 0, 0))
    parts.append(PartBudget(UPDATE, 0.0, parameters * UPDATE_BYTES, 0, 0))
    return StepBudget(config, vocab_size, parts, {x.name: x.part for x in work if x.is_launch})


def _flops(config: Config, vocab_size: int) -> dict[str, float]:
    """Part -> FLOPs of a step's forward and backward, by the formulas."""
    model, training = config.model, config.training
    per_token = forward_flops(model, training.seq_len, vocab_size)
    core: Counter[str] = Counter()
    for attention in model.attentions:
        core.update(attention_flops(model, attention, training.seq_len))
    convolution = core.pop("convolution", 0.0)
    parts = {
        "projections": per_token["projections"],
        "MLP": per_token["mlp"],
        "short convolution": convolution,
        CORE: sum(core.values()),
        HEAD: per_token["head"] * config.predicted_share,
    }
    tokens = training.global_batch_size * training.seq_len * model.sequences_per_sample
    return {name: 3 * tokens * part for name, part in parts.items()}


def budget_table(budget: StepBudget, peaks: Peaks) -> list[str]:
    """The table of a step's parts."""
    total = PartBudget("sum", *(sum(part[column] for part in budget.parts) for column in range(1, 5)))
    least = budget.milliseconds(peaks)
    rows = (
        table_row(
            [
                *(x.part, f"{x.flops / 1e12:.3g}", f"{x.bytes / 1e9:.3g}"),
                *("-" if x.part in (SUMS, UPDATE) else y for y in (x.operations, x.kernels)),
                f"{least.get(x.part, sum(least.values())):.3g}",
            ]
        )
        for x in (*budget.parts, total)
    )
    columns = ("part", "TFLOP", "GB", "operations of torch", "kernels", "ms at least")
    return table(columns, rows, numbers=True)


def shape_line(config: Config, vocab_size: int) -> str:
    """Model and batch, in words."""
    model, training = config.model, config.training
    parameters = parameter_count(model, vocab_size, training.seq_len)
    return (
        f"{parameters:,} parameters, {model.num_layers} layers × {model.hidden_size}, "
        f"{vocab_size:,} ids, {training.global_batch_size // training.micro_batch_size} micro-batches of "
        f"{training.micro_batch_size} × {training.seq_len:,} tokens, {training.dtype}, "
        f"training.compile={training.compile}"
    )


def counted_line(budget: StepBudget, peaks: Peaks) -> str:
    """The step's least time, in words."""
    least = sum(budget.milliseconds(peaks).values())
    share = budget.flops / (least * 1e-3 * peaks.tflops * 1e12)
    return (
        f"Counted, not measured: at {peaks.tflops:g} TFLOP/s and {peaks.bandwidth:g} TB/s ({peaks.name}) the parts "
        f"take at least {least:.3g} ms, {1e3 * budget.tokens / least:,.0f} tokens/s at {share:.0%} MFU. Layers count "
        "as they run without torch.compile. The optimizer's bytes are those of one GPU, without ZeRO's sharding."
    )


def check_countable(config: Config) -> None:
    """Raise UserError for steps whose optimizer or attention is not counted."""
    training = config.training
    if training.dtype != "bfloat16" or config.parallel.zero_stage > 1 or config.optimizer.name != "adamw":
        raise UserError(
            f"training.dtype={training.dtype}, parallel.zero_stage={config.parallel.zero_stage} and optimizer.name="
            f"{config.optimizer.name} have another optimizer's bytes; the budget counts bfloat16, ZeRO 1 and adamw"
        )
    if training.fp8 != "none":
        raise UserError(
            f"training.fp8={training.fp8} has products of other speeds, and casts; the budget counts those of bfloat16"
        )
    if config.model.encoder is not None:
        raise UserError(
            "model.kind=encoder_decoder has layers that read two sequences, and the budget counts those of one; take "
            "another kind"
        )
    if any(x.simple_gla is not None and x.simple_gla.update == "delta" for x in config.model.attentions):
        raise UserError(
            "model.attention.simple_gla.update=delta runs flash-linear-attention's kernels, which need a GPU to be "
            "counted; take another update or preset"
        )


def chosen_peaks(gpu: str, tflops: float | None, bandwidth: float | None) -> Peaks:
    """The named GPU's, with what is given in its place. Raises UserError for an unknown one."""
    peaks = Peaks.of(gpu)
    if peaks is None:
        raise UserError(f"--gpu={gpu} is unknown; choose {', '.join(x.lower() for x in BANDWIDTHS)}")
    name = peaks.name if tflops is None and bandwidth is None else "given"
    return Peaks(name, tflops or peaks.tflops, bandwidth or peaks.bandwidth)


def main() -> int:
    """Count a step and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--gpu", default="h200", help="whose peaks: h200 (default), h100 or a100")
    parser.add_argument("--tflops", type=float, help="in place of the GPU's")
    parser.add_argument("--bandwidth", type=float, help="TB/s, in place of the GPU's")
    options = parser.parse_args()
    peaks = chosen_peaks(options.gpu, options.tflops, options.bandwidth)
    config = on_one_device(options.config, options.overrides, options.vocab_size)
    check_countable(config)
    prepare_device("cpu", 0)
    budget = count_step(config, options.vocab_size)
    lines = page_header("Counted budget of a training step", command_line("kernels.budget"))
    lines += [f"{shape_line(config, options.vocab_size)}. {counted_line(budget, peaks)}", ""]
    write_page("\n".join([*lines, *budget_table(budget, peaks)]), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
