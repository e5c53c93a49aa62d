"""Peak memory of attention transfer, all layers at once and in blocks of layers, for dense models of two depths.

OMP_NUM_THREADS=1 python -m benchmarks.transfer_blocks
"""

import io
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.page import command_line, page_header, page_parser, table, table_row, write_page
from benchmarks.training_runs import RETURN_FREED_MEMORY, run_megakernel
from megakernel.config import Config, load, yaml_text
from megakernel.parallel import Mesh
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.training.process import run_in_mesh

DEPTHS = (12, 24)
BLOCKS = (None, 6, 2)
HIDDEN = 512
COLUMNS = ("layers", "weights, MB", "block", "peak resident memory, MB", "hidden states on disk, MB")
TRAINING = {
    "steps": 3,
    "seq_len": 256,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "dtype": "float32",
    "log_every": 1,
    "eval_samples": 2,
}


def save_dense(folder: Path, layers: int) -> None:
    """A dense model of `transformers` with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=layers, **sizes)).save_pretrained(folder)


def write_config(folder: Path, corpus: Path) -> Path:
    """Write the configuration of an up-training of folder/dense and return its path."""
    from megakernel.checkpoint.dense import DenseCheckpoint

    section = DenseCheckpoint(folder / "dense").section
    tree = {
        "run": {"name": "up", "root": str(folder)},
        "model": section | {"attention": {"preset": "flurka", "compression": {"block_size": 32, "rank": 8}}},
        "init": {"from": str(folder / "dense")},
        "data": {"train": str(corpus), "num_workers": 0},
        "training": TRAINING,
        "parallel": {"zero_stage": 0},
        "uptrain": {"transfer": {"steps": TRAINING["steps"]}},
    }
    path = folder / "up.yaml"
    path.write_text(yaml_text.write(tree))
    return path


def run_transfer(file: Path, block_layers: int | None) -> dict[str, float]:
    """Run only the transfer stage, in this process; returns bytes of peak resident memory and of hidden states."""
    from launch.training import providers
    from megakernel.training.step_costs import MemoryPeaks
    from megakernel.training.trainer import Trainer
    from megakernel.uptraining.blocks import BlockTransfer
    from megakernel.uptraining.costs import TrainingCost
    from megakernel.uptraining.stages import stages

    config: Config = stages(load(file, [f"run.name=blocks_of_{block_layers}"]))[0].config
    states = 0

    def run(mesh: Mesh) -> int:
        nonlocal states
        if block_layers is None:
            return Trainer(config, mesh, providers()).run()
        transfer = BlockTransfer(config, block_layers, mesh, providers(), [], lambda text: None)
        states = transfer.bytes_between
        return transfer.run()

    with redirect_stdout(io.StringIO()):
        run_in_mesh(config, ProcessEnvironment(), run)
    # A run logs the kernel's peak counter and resets it in each phase, so the last phase is read here. (`getrusage`
    # would start from the parent's peak.)
    logged = TrainingCost.of(config.run.folder).peak_bytes
    last = MemoryPeaks(torch.device("cpu")).scalars()["memory/peak_gib"] * 2**30
    return {"resident": max(logged, last), "states": states}


def run_in_process(file: Path, block_layers: int | None) -> dict[str, float]:
    """`run_transfer` in a fresh process."""
    fresh = get_context("spawn")
    with patch.dict(os.environ, RETURN_FREED_MEMORY), ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(run_transfer, file, block_layers).result()


def main() -> None:
    parser = page_parser(__doc__)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        corpus = Path(temporary) / "corpus"
        limits = ("--max-documents", "60", "--validation-fraction", "0.1")
        run_megakernel("prepare", "--source", "stdlib", "--tokenizer", "byte", *limits, "--out", str(corpus))
        for layers in DEPTHS:
            folder = Path(temporary) / str(layers)
            save_dense(folder / "dense", layers)
            weights = (folder / "dense" / "model.safetensors").stat().st_size / 1e6
            file = write_config(folder, corpus)
            for block in BLOCKS:
                peaks = run_in_process(file, block)
                sizes = (f"{peaks['resident'] / 1e6:,.0f}", f"{peaks['states'] / 1e6:,.1f}")
                rows.append(table_row([layers, f"{weights:,.0f}", block or "all at once", *sizes]))
    command = command_line("transfer_blocks")
    lines = page_header("Attention transfer in blocks of layers", command, f", hidden size {HIDDEN}, float32")
    write_page("\n".join([*lines, *table(COLUMNS, rows)]), args.out)


if __name__ == "__main__":
    main()
