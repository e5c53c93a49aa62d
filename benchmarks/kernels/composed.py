"""FLuRKA's fused kernels and their composition (`MEGAKERNEL_BACKEND=composed`): traffic of both, and on a GPU times.

    python -m benchmarks.kernels.composed --out benchmarks/results/flurka_composed.md

A layer of the preset `flurka` with rotated windows, 16 heads, bfloat16, forward and backward. Counted on any machine:
launches of fused kernels, operations of torch, and the bytes per token and query head of the tensors that each reads or
writes, every tensor once, with the rotation as Liger-Kernel runs it. On a GPU, in the same run: outputs and gradients
of the composition are compared with those of the fused kernels, both are timed in turn, and the page says which of them
the limit keeps. If the composition takes at most 1.1 times as long in every case, the kernels of the merge and of
windows go.
"""

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.attention.check import rms_ratio
from benchmarks.kernels.attention.clock import median
from benchmarks.kernels.counter import Counter, Work, fused
from benchmarks.page import page_header, page_parser, table, table_row, write_page
from megakernel import attention
from megakernel.config import Attention, expand_preset
from megakernel.ops.dispatch import COMPOSED, KERNELS, VARIABLE
from megakernel.ops.kernels.launch import record_launches

LIMIT = 1.1
"""The composition's time over that of the fused kernels, at most."""

TOLERANCE = 2e-2
"""RMS ratio of two results in bfloat16."""

TOKENS, COUNTED_TOKENS = 16384, 2048
"""Of a sequence that is timed, and of one whose bytes are counted."""

HEADS, ROUNDS, REPEATS, PATIENCE = 16, 3, 10, 10.0


class FlurkaShape(NamedTuple):
    """A layer."""

    width: int
    blocks: int = 1
    kv_heads: int = HEADS
    join: str = "gated"
    document: int | None = None
    """Tokens of each of the documents in the sequence; None: it is one."""


CASES = {
    "d=128": FlurkaShape(128),
    "d=64": FlurkaShape(64),
    "d=128, 2 blocks": FlurkaShape(128, blocks=2),
    "d=128, 4 queries a key": FlurkaShape(128, kv_heads=HEADS // 4),
    "d=128, one normalizer": FlurkaShape(128, join="shared"),
    "d=128, documents": FlurkaShape(128, document=1000),
}


class LayerCall:
    """A layer with its inputs, forward and backward."""

    def __init__(self, shape: FlurkaShape, length: int, device: torch.device):
        torch.manual_seed(0)
        near = {"blocks": shape.blocks, "join": shape.join}
        config = Attention.model_validate(expand_preset({"preset": "flurka", "near": near}))
        sizes = {"num_heads": HEADS, "num_kv_heads": shape.kv_heads, "head_dim": shape.width}
        self.layer = attention.build(config, **sizes).to(device)
        positions = None
        if shape.document is not None:
            positions = torch.arange(length, device=device)[None] % shape.document
        self.inputs = attention.AttentionInputs(
            positions, rotary=attention.Rotary(shape.width), return_state=False
        )
        self.tokens = [
            torch.randn(1, heads, length, shape.width, device=device).bfloat16().requires_grad_()
            for heads in (HEADS, shape.kv_heads, shape.kv_heads)
        ]
        self.grad = torch.randn(1, HEADS, length, shape.width, device=device).bfloat16()

    def train(self) -> list[Tensor]:
        """The output and the gradients."""
        out = self.layer(*self.tokens, self.inputs)
        leaves = [*self.tokens, *self.layer.parameters()]
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within, the layer runs with this backend."""
    with patch.dict(os.environ, {VARIABLE: name}):
        yield


def counted(shape: FlurkaShape, name: str) -> list[Work]:
    """What a backend starts in forward and backward."""
    layer = LayerCall(shape, COUNTED_TOKENS, torch.device("cpu"))
    with backend(name), record_launches() as launches:
        layer.train()  # fills the caches of tables, which layers share
        launches.clear()
        counter = Counter(launches, name)
        with fused(counter), counter:
            layer.train()
            counter.take_launches()
    return counter.work


def count_row(name: str, shape: FlurkaShape, which: str) -> str:
    """A row of the table of counts."""
    work = counted(shape, which)
    launches = [each for each in work if each.is_launch]
    each = COUNTED_TOKENS * HEADS
    ours, all_bytes = (sum(x.bytes for x in found) / each for found in (launches, work))
    numbers = (len(launches), len(work) - len(launches), f"{ours:,.0f}", f"{all_bytes:,.0f}")
    return table_row([name, "composed" if which == COMPOSED else "fused", *numbers])


def time_row(name: str, shape: FlurkaShape, device: torch.device) -> tuple[str, bool]:
    """A row of the table of times, and whether the composition keeps the limit."""
    layer, seconds, results = LayerCall(shape, TOKENS, device), {KERNELS: [], COMPOSED: []}, {}
    for _ in range(ROUNDS):
        for which, times in seconds.items():
            with backend(which):
                results[which] = layer.train()
                times.append(median(layer.train, device, REPEATS, PATIENCE))
    error = max(map(rms_ratio, results[COMPOSED], results[KERNELS]))
    fused, composed = (1e3 * statistics.median(times) for times in seconds.values())
    keeps = composed <= LIMIT * fused and error <= TOLERANCE
    verdict = "yes" if keeps else "no"
    if error > TOLERANCE:
        verdict += ": wrong"
    return table_row(
        [name, f"{fused:.3f}", f"{composed:.3f}", f"{composed / fused:.2f}", f"{error:.1e}", verdict]
    ), keeps


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    cases = {name: shape for name, shape in CASES.items() if arguments.only in name}
    has_gpu = torch.cuda.is_available()
    gpu = f", {torch.cuda.get_device_name()}" if has_gpu else ", no GPU: counted, not timed"
    lines = page_header("FLuRKA fused and composed", "python -m benchmarks.kernels.composed", gpu)
    header = ("case", "form", "launches", "torch's", "bytes of launches", "bytes of all")
    rows = (count_row(name, shape, which) for name, shape in cases.items() for which in (KERNELS, COMPOSED))
    lines += ["Forward and backward; bytes per token and query head.", "", *table(header, rows)]
    if has_gpu:
        timed = [time_row(name, shape, torch.device("cuda")) for name, shape in cases.items()]
        keeps = all(kept for _, kept in timed)
        header = ("case", "fused, ms", "composed, ms", "ratio", "RMS difference", f"at most {LIMIT}")
        lines += [*table(header, (row for row, _ in timed))]
        lines += ["The fused kernels go." if keeps else "The fused kernels stay, the composition goes.", ""]
    write_page("\n".join(lines), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
