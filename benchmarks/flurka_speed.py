"""FLuRKA's speed claim: forward of one attention layer, compared with its low-rank and its kernel parent.

    python -m benchmarks.flurka_speed --out benchmarks/results/flurka_speed_cpu.md
    python -m benchmarks.flurka_speed --draw benchmarks/results/flurka_speed_cpu.md --out docs/images/flurka_speed.png

The paper measures models on A100s: 3.3x over Linformer at the end of its d_k sweep, 1.7x over the kernel at the end
of its d_m sweep, both with N = 20k. Here N is the same and widths are scaled down, inside the region of its claim 1
(megakernel.papers.flurka.claims), where it needs fewer operations than both parents. A layer is its three projections
and its mechanism; biases, norms and the output projection are the same for all and left out.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.attention.cases import Case
from benchmarks.kernels.attention.computation import layer_core, projected_attention
from benchmarks.page import docstring_parser, page_header, table, table_row, write_page
from megakernel.analysis.plots.drawing import lines
from megakernel.analysis.plots.table import Row

TOKENS, HEADS = 20_000, 8
RANK_SWEEP = [Case(1, TOKENS, HEADS, 64, rank) for rank in (128, 256, 384, 480)]
WIDTH_SWEEP = [Case(1, TOKENS, HEADS, width // HEADS, 256) for width in (320, 512, 768, 1024)]
COLUMNS = ["d_k", "d_m", "kernel", "Linformer ms", "kernel ms", "FLuRKA ms", "over Linformer", "over kernel"]
KERNELS = {"RNN": ("linear", "flurka_rnn"), "Performer": ("performer", "flurka_performer")}


def layer(preset: str, case: Case) -> Callable[[], Tensor]:
    """The forward pass of one layer with random weights on a random sequence."""
    core = layer_core(preset, case)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, 1, case.width, generator=random)
    weights = [torch.randn(case.width, case.width, generator=random) * case.width**-0.5 for _ in range(3)]
    return lambda: projected_attention(core, case, x, weights)


def seconds(forwards: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, float]:
    """Fastest seconds of each; layers take turns, so that other load on the machine affects all of them."""
    spent: dict[str, list[float]] = {name: [] for name in forwards}
    with torch.inference_mode():
        for forward in forwards.values():
            if not forward().isfinite().all():
                raise RuntimeError("a layer gave numbers that are not finite; its time means nothing")
        for _ in range(repeats):
            for name, forward in forwards.items():
                start = time.perf_counter()
                forward()
                spent[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in spent.items()}


def rows(sweep: list[Case], repeats: int) -> list[str]:
    """One table row for each size and kernel."""
    table_rows = []
    for case in sweep:
        presets = ["linformer", *(preset for pair in KERNELS.values() for preset in pair)]
        times = seconds({preset: layer(preset, case) for preset in presets}, repeats)
        for name, (parent, flurka) in KERNELS.items():
            low_rank, kernel, flurka_time = (times[preset] for preset in ("linformer", parent, flurka))
            milliseconds = [f"{time * 1e3:.0f}" for time in (low_rank, kernel, flurka_time)]
            ratios = [f"**{time / flurka_time:.2f}x**" for time in (low_rank, kernel)]
            table_rows.append(table_row([case.rank, case.width, name, *milliseconds, *ratios]))
            print(table_rows[-1], flush=True)
    return table_rows


def summary(table_rows: list[str]) -> str:
    """In how many measurements FLuRKA was faster than both parents, and its largest speedups."""
    ratios = [[float(cell) for cell in re.findall(r"\*\*([\d.]+)x\*\*", line)] for line in table_rows]
    faster = sum(min(pair) > 1 for pair in ratios)
    over_low_rank, over_kernel = (max(side) for side in zip(*ratios))
    return (
        f"FLuRKA was faster than both parents in {faster} of {len(ratios)} measurements, at most "
        f"{over_low_rank:.2f}x over Linformer and {over_kernel:.2f}x over the kernel."
    )


def page_text(repeats: int) -> str:
    """The page with both sweeps."""
    before = os.getloadavg()
    ranks, widths = rows(RANK_SWEEP, repeats), rows(WIDTH_SWEEP, repeats)
    after = os.getloadavg()
    return "\n".join(
        [
            *page_header(
                "FLuRKA's speed on a CPU",
                "python -m benchmarks.flurka_speed",
                f", float32. Load average before {before[0]:.1f}, after {after[0]:.1f}: other work ran on the "
                f"machine, so each number is the fastest of {repeats} turns that all layers took one after the other",
            ),
            f"One attention layer (three projections and the mechanism), forward, one sequence of N = {TOKENS} tokens, "
            f"H = {HEADS}, phi as wide as a head.",
            "",
            "The paper's ends of the same sweeps, models on A100s with far larger d_k and d_m: **3.3x** over Linformer "
            "(d_k to 20k) and **1.7x** over the kernel (d_m to 20k).",
            "",
            summary([*ranks, *widths]),
            "",
            "## d_k sweep",
            "",
            *table(COLUMNS, ranks),
            "## d_m sweep",
            "",
            *table(COLUMNS, widths),
        ]
    )


def measurements(page: str) -> list[Row]:
    """Rows (sweep d_k or d_m, size, layer, ms), one for each time in the page's tables."""
    times: list[Row] = []
    sweep = ""
    for line in page.splitlines():
        if line.startswith("## "):
            sweep = line.split()[1]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not cells[0].isdigit():
            continue
        size = int(cells[COLUMNS.index(sweep)])
        for name in ("Linformer", "kernel", "FLuRKA"):
            label = name if name == "Linformer" else f"{name} ({cells[2]})"
            ms = int(cells[COLUMNS.index(f"{name} ms")])
            times.append({"sweep": sweep, "size": size, "layer": label, "ms": ms})
    return times


def draw(page: Path, out: Path) -> None:
    """Plot the curves of a page (FLuRKA, figures 3 and 4)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    points = measurements(page.read_text(encoding="utf-8"))
    lines(points, "size", "ms", "layer", "sweep").savefig(out, dpi=120)


def main() -> None:
    parser = docstring_parser(__doc__)
    parser.add_argument("--out", type=Path, help="file for the page or the plot (default: print the page)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--draw", type=Path, metavar="PAGE", help="plot the numbers of a page instead of measuring"
    )
    arguments = parser.parse_args()
    if arguments.draw is None:
        write_page(page_text(arguments.repeats), arguments.out)
    elif arguments.out is None:
        parser.error("--draw needs --out, where the plot is written")
    else:
        draw(arguments.draw, arguments.out)


if __name__ == "__main__":
    main()
