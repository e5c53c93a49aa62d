"""FLuRKA's speed curves, drawn from the page that `benchmarks.flurka_speed` has written (FLuRKA, figures 3 and 4).

python -m benchmarks.flurka_speed_picture benchmarks/results/flurka_speed_cpu.md --out docs/images/flurka_speed.png
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megakernel.analysis.plots.drawing import lines
from megakernel.analysis.plots.table import Row

COLUMNS = {"Linformer": 3, "kernel": 4, "FLuRKA": 5}
"""What was measured -> its column of milliseconds, behind d_k, d_m and the kernel's name."""


def measurements(page: str) -> list[Row]:
    """sweep (of d_k or d_m), size, layer, ms: one for each number of milliseconds of the page's tables."""
    rows: list[Row] = []
    sweep = ""
    for line in page.splitlines():
        if line.startswith("## "):
            sweep = line.split()[1]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not cells[0].isdigit():
            continue
        size = int(cells[0 if sweep == "d_k" else 1])
        for name, column in COLUMNS.items():
            layer = name if name == "Linformer" else f"{name} ({cells[2]})"
            rows.append({"sweep": sweep, "size": size, "layer": layer, "ms": int(cells[column])})
    return rows


def draw(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines(rows, "size", "ms", "layer", "sweep").savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw(measurements(arguments.page.read_text(encoding="utf-8")), arguments.out)


if __name__ == "__main__":
    main()
