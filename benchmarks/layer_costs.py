"""What the attention of one layer costs: a window, landmarks, or both (FLuRKA): counted, and measured on this CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.layer_costs --out benchmarks/results/layer_costs_cpu.md

Counted are a token's FLOPs, by the formulas, and the bytes of all operations and kernels of forward and backward on a
GPU, as `benchmarks.kernels.budget` counts them, of the layer without its MLP. Measured is the processor time of forward
and backward of the layer without its MLP and norms, at the sizes of the study far_context.
"""

import sys
import time
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.budget import SUMS, UPDATE, count_step
from benchmarks.kernels.counter import EMBEDDINGS, HEAD
from benchmarks.page import command_line, page_parser, run_main, table_page, table_row, write_page
from benchmarks.training_runs import VOCAB_SIZE, benchmark_config
from megakernel.config import Config
from megakernel.layers import MultiheadAttention
from megakernel.model.flops import forward_flops
from megakernel.parallel import prepare_device

KINDS: dict[str, dict[str, Any]] = {
    "window of a block (`local`)": {"preset": "local", "short_convolution": 4},
    "window of 128 tokens (`softmax`)": {"preset": "softmax", "window": 128, "short_convolution": 4},
    "landmarks alone": {
        "preset": "hedgehog",
        "compression": {"kind": "block", "block_size": 64, "rank": 8},
        "short_convolution": 4,
    },
    "FLuRKA": {"preset": "flurka", "short_convolution": 4},
}
"""Name -> its attention."""

WIDTH, HEADS, TOKENS = 1024, 16, 8192
"""Of configs/pretrain-350m.yaml, for counts."""

OUTSIDE = (EMBEDDINGS, HEAD, SUMS, UPDATE, "MLP", "activation of the MLP")
"""Parts of a step that are not of a layer's attention."""

REPEATS = 5
COLUMNS = (
    "layer",
    "projections, MFLOPs",
    "attention, MFLOPs",
    "KB moved on a GPU",
    "operations of torch",
    "kernels",
    "µs on this CPU",
)


class AttentionCosts(NamedTuple):
    """Of a layer's attention."""

    projections: float
    """FLOPs of a token forward, of all matrices."""

    core: float
    """FLOPs of a token forward, of the mechanism and the convolution."""

    bytes: float
    """Of a token, forward and backward on a GPU."""

    operations: int
    """Of torch, forward and backward, of one micro-batch."""

    kernels: int
    """Launches of kernels of this repository and of Liger-Kernel's."""


def one_layer(attention: dict[str, Any], width: int, heads: int, tokens: int) -> Config:
    """A model of one layer that is trained with one sequence per step."""
    sizes = {"num_layers": 1, "hidden_size": width, "num_heads": heads, "attention": attention}
    training = {"seq_len": tokens, "dtype": "bfloat16", "micro_batch_size": 1, "global_batch_size": 1}
    return benchmark_config(sizes, training, parallel={"zero_stage": 1})


def counted(config: Config, vocab_size: int = VOCAB_SIZE) -> AttentionCosts:
    """The costs of a model's one layer; after `prepare_device`."""
    tokens = config.training.seq_len
    flops = forward_flops(config.model, tokens, vocab_size)
    core = sum(part for name, part in flops.items() if name not in ("projections", "mlp", "head"))
    parts = [part for part in count_step(config, vocab_size).parts if part.part not in OUTSIDE]
    return AttentionCosts(
        flops["projections"],
        core,
        sum(part.bytes for part in parts) / tokens,
        sum(part.operations for part in parts),
        sum(part.kernels for part in parts),
    )


def microseconds(batch: int = 4, tokens: int = 2048, width: int = 256, heads: int = 4) -> dict[str, float]:
    """Processor time per token of forward and backward; the fastest of REPEATS, in which the layers take turns."""
    layers = {name: MultiheadAttention(width, heads, tree).bfloat16() for name, tree in KINDS.items()}
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batch, tokens, width, generator=draw).bfloat16().requires_grad_()
    # Two documents in each sequence, as in the study: one per sequence would let blocks coincide with chunks.
    first = tokens // 3
    places = torch.cat([torch.arange(first), torch.arange(tokens - first)])
    positions = places.expand(batch, -1).contiguous()
    fastest = dict.fromkeys(layers, float("inf"))
    for _ in range(1 + REPEATS):
        for name, layer in layers.items():
            start = time.process_time()
            layer(x, positions=positions).float().square().sum().backward()
            fastest[name] = min(fastest[name], time.process_time() - start)
    return {name: 1e6 * spent / (batch * tokens) for name, spent in fastest.items()}


def main() -> int:
    """Count, measure, and write the page."""
    options = page_parser(__doc__ or "").parse_args()
    prepare_device("cpu", 0)
    times = microseconds()
    rows = []
    for name, tree in KINDS.items():
        costs = counted(one_layer(tree, WIDTH, HEADS, TOKENS))
        numbers = (f"{costs.projections / 1e6:.2f}", f"{costs.core / 1e6:.3f}", f"{costs.bytes / 1e3:.0f}")
        rows.append(table_row([name, *numbers, costs.operations, costs.kernels, f"{times[name]:.1f}"]))
    text = (
        "All of one token, except for operations and kernels, which are of a micro-batch. Counted, so that no hardware "
        f"matters: {WIDTH:,} channels, {HEADS} heads, one sequence of {TOKENS:,} tokens, bfloat16; FLOPs forward, "
        "bytes, operations and kernels forward and backward. Blocks have 64 tokens and 8 landmarks; all layers have a "
        "short convolution. Measured: processor time, forward and backward, of 256 channels, 4 heads and 4 sequences "
        "of 2,048 tokens with two documents each, bfloat16, the fastest of "
        f"{REPEATS} runs, between which the layers took turns."
    )
    page = table_page("Costs of a layer's attention", command_line("layer_costs"), text, COLUMNS, rows)
    write_page(page, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
