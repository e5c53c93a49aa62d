"""Accuracy of `megakernel plan`: saved activations of a layer and peak memory, planned and measured on a CPU.

OMP_NUM_THREADS=1 python -m benchmarks.plan_calibration --out benchmarks/results/plan_calibration_cpu.md
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.page import command_line, page_header, page_parser, table, table_row, write_page
from benchmarks.real_runs import held_bytes, saved_activations
from benchmarks.training_runs import benchmark_config
from megakernel.analysis.planning import CPU, Layout, PlannedJob
from megakernel.analysis.planning.memory import memory
from megakernel.config import Config, Parallel
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.processes import ProcessEnvironment

VOCAB = 1000
RUNS = (
    # attention, layers, width, tokens of a sequence, recomputation
    ("softmax", 2, 256, 1024, "none"),
    ("softmax", 4, 128, 2048, "full"),
    ("linear", 2, 256, 2048, "none"),
    ("hedgehog", 2, 128, 4096, "selective"),
    ("flurka", 2, 256, 2048, "none"),
    ("flurka", 4, 128, 4096, "full"),
    ("local", 4, 256, 1024, "none"),
    ("softmax", 2, 512, 1024, "none"),
    ("softmax", 2, 256, 2048, "selective"),
    ("linear", 4, 256, 1024, "full"),
    ("hedgehog", 4, 256, 2048, "none"),
    ("flurka", 4, 256, 1024, "none"),
    ("flurka", 2, 512, 2048, "full"),
    ("local", 2, 512, 2048, "none"),
)
COLUMNS = ["attention", "layers", "width", "tokens", "recompute", "kept by a layer, MB", "planned", "off"]
COLUMNS += ["held at most, MB", "planned", "off"]


def configuration(attention: str, layers: int, width: int, tokens: int, recompute: str) -> Config:
    sizes = {"num_layers": layers, "hidden_size": width, "num_heads": 4, "attention": attention}
    training = {"seq_len": tokens, "activation_checkpointing": recompute}
    return benchmark_config(sizes, training, parallel={"zero_stage": 0})


def compare(config: Config) -> list[tuple[float, float]]:
    """(measured, planned) bytes of the second transformer layer's saved activations, and of peak memory."""
    job = PlannedJob(
        config, VOCAB, Layout(1, False, 1, 1, 1, 0, 1, config.training.activation_checkpointing), CPU
    )
    device = prepare_device("cpu", 0)

    def in_mesh(function: Callable[[Config, int, Mesh], Any]) -> Any:
        mesh = Mesh.create(Parallel(), ProcessEnvironment(), device)
        try:
            return function(config, VOCAB, mesh)
        finally:
            mesh.destroy()

    saved, held = in_mesh(saved_activations)[2], in_mesh(held_bytes).peak
    return [(saved, job.costs(1).saved), (held, memory(job).total)]


def main() -> None:
    parser = page_parser(__doc__)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    results = [(run, compare(configuration(*run))) for run in RUNS]
    lines = page_header(
        "What `megakernel plan` says and what a CPU holds",
        command_line("plan_calibration"),
        f"; float32, one process, one thread, one sequence per step, {VOCAB:,} ids",
    )
    for what, place, end in (("kept by a layer", 0, ";"), ("held at most", 1, ".")):
        off = [of_run[place][1] / of_run[place][0] - 1 for _, of_run in results]
        lines.append(f"* bytes {what}: off by {min(off):+.1%} to {max(off):+.1%}{end}")
    lines += ["", "Bytes are those of tensors, counted as they are made and freed. Planned with the "]
    lines[-1] += "implementations of a CPU."
    rows = []
    for (attention, layers, width, tokens, recompute), of_run in results:
        cells = [attention, str(layers), str(width), f"{tokens:,}", recompute]
        for real, planned in of_run:
            cells += [f"{real / 1e6:.3g}", f"{planned / 1e6:.3g}", f"{planned / real - 1:+.1%}"]
        rows.append(table_row(cells))
    write_page("\n".join([*lines, "", *table(COLUMNS, rows)]), out)


if __name__ == "__main__":
    main()
