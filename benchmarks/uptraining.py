"""Up-training a dense model of 10 million parameters to causal FLuRKA on a tenth of its tokens, in three ways.

    OMP_NUM_THREADS=1 python -m benchmarks.uptraining --out benchmarks/results/uptraining_cpu.md

Prepares the standard library's source with a vocabulary of 8,192 and a tenth of its documents held out, pretrains the
dense model (benchmarks/uptraining.yaml), exports it and measures its perplexity with `transformers`, then up-trains it
(benchmarks/uptraining_flurka.yaml): as configured, with alpha, and with windows twice as long. Runs are in
runs/uptraining; finished ones are read, not repeated. No page is written if `transformers` finds another loss.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import command_line, page_header, page_parser, run_main, table, table_row, write_page
from benchmarks.training_runs import run_megakernel, uptrain_run
from megakernel.config import Config, load
from megakernel.uptraining.costs import TrainingCost
from megakernel.uptraining.report import recovered

DENSE = Path(__file__).with_suffix(".yaml")
FLURKA = DENSE.with_name("uptraining_flurka.yaml")
NO_CONTROLS = ["uptrain.from_scratch=false", "uptrain.train_dense=false"]
LONG_WINDOWS = "{preset: flurka, compression: {block_size: 32, rank: 8}, near: {blocks: 2, join: shared}}"
"""Windows and blocks of 32 tokens instead of 16, with as many landmarks per token."""
VARIANTS = {
    "without alpha": ["run.name=flurka"],
    "alpha 0.3": ["run.name=flurka-alpha", "uptrain.alpha=0.3", *NO_CONTROLS],
    "windows of 32": ["run.name=flurka-32", f"model.attention={LONG_WINDOWS}", *NO_CONTROLS],
}
CORPUS = Path("data/stdlib-tenth")
TOLERANCE = 1e-3
"""Largest allowed difference between our loss and that of `transformers` on the exported model, in nats."""


def export_dense(dense: Config) -> Path:
    """Export the dense run for `transformers` unless that is done; returns the folder."""
    folder = dense.run.root / "hf"
    if not folder.exists():
        run_megakernel("export", str(dense.run.folder), "--to", str(folder))
    return folder


def transformers_loss(folder: Path, dense: Config) -> float:
    """Loss of the exported model in `transformers`, in nats per token, on the run's validation samples."""
    import torch
    from transformers import AutoModelForCausalLM

    from data_pipeline.corpus import Corpora
    from data_pipeline.loader import ValidationBatches
    from data_pipeline.order import Share

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in ValidationBatches(dense, Corpora(dense.data), Share()):
            logits = model(batch.tokens).logits.flatten(0, 1)
            losses = torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
            total += float(losses[batch.loss_mask.flatten()].double().sum())
            count += int(batch.loss_mask.sum())
    return total / count


def page(
    dense: Config,
    their_loss: float,
    reports: dict[str, dict[str, Any]],
    minutes: float,
    nproc: int,
    command: str,
) -> str:
    """The page. their_loss: loss by `transformers`; minutes: time of all training steps, in nproc processes."""
    first = reports["without alpha"]
    ours = first["dense"]["loss"]
    tokens = dense.training.consumed(dense.training.steps)[1]
    columns = ["model", "tokens", "loss", "perplexity", "loss beyond the window", "recovered"]
    lines = [
        *page_header(
            "Up-training a dense model to causal FLuRKA",
            command,
            f", float32, {nproc} process(es); steps of training took {minutes:.0f} minutes",
        ),
        f"The dense model has seen {tokens:,} tokens of the standard library's source (8,192 words). Losses are nats "
        f"per token on {dense.training.eval_samples} held-out samples of {dense.training.seq_len} tokens. "
        f"`transformers` gives the exported dense model {their_loss:.4f} (perplexity {math.exp(their_loss):.3f}) where "
        f"Megakernel gives {ours:.4f}. *recovered*: of the perplexity between the swapped model and the dense one; "
        "in the last column, between the swapped model and what the dense one became on as many tokens. *beyond the "
        f"window*: tokens with {first['window']} tokens of their document before them, or as many as their window has.",
        "",
    ]
    rows = [_row(first["dense"] | {"tokens": tokens})]
    trained_on_loss = first["trained_on"]["loss"]
    for name, report in reports.items():
        if report is first or report["window"] != first["window"]:
            rows.append(_row(report["swapped"] | {"name": f"{name}: {report['swapped']['name']}"}))
        for model in (*report["stages"], *report["ablations"]):
            is_control = model["name"].startswith(("dense", "from scratch"))
            if is_control and report["window"] == first["window"] and report is not first:
                continue
            of_dense = report["recovered"][model["name"]]
            of_trained_on = recovered(report["swapped"]["loss"], model["loss"], trained_on_loss)
            title = model["name"] if is_control else f"{name}: {model['name']}"
            rows.append(_row(model | {"name": title}, of_dense, of_trained_on))
    return "\n".join(lines + table([*columns, "of trained on"], rows, numbers=True))


def _row(model: dict[str, Any], *shares: float | None) -> str:
    losses = (f"{model['loss']:.4f}", f"{math.exp(model['loss']):.3f}", f"{model['beyond']:.4f}")
    shown = ("" if share is None else f"{share:.1%}" for share in shares or (None, None))
    return table_row([model["name"], f"{model['tokens']:,}", *losses, *shown])


def minutes_of_steps(folders: Sequence[Path]) -> float:
    """Minutes of all training steps of the runs in these folders, from their logs."""
    files = (file for folder in folders for file in folder.rglob("metrics.jsonl"))
    return sum(TrainingCost.of(file.parent).seconds for file in files) / 60


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare with `transformers`, and write the page; return 1 if the losses differ."""
    parser = page_parser(__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    options = parser.parse_args(argv)
    if not CORPUS.exists():
        held_out = ("--validation-fraction", "0.1")
        run_megakernel(
            "prepare", "--source", "stdlib", "--tokenizer", "bpe:8192", *held_out, "--out", str(CORPUS)
        )
    dense = load(DENSE)
    run_megakernel("pretrain", str(DENSE), "--nproc", str(options.nproc))
    exported = export_dense(dense)
    reports, runs = {}, [dense.run.folder]
    for name, overrides in VARIANTS.items():
        folder, reports[name] = uptrain_run(FLURKA, overrides, "--nproc", str(options.nproc))
        runs.append(folder)
    their_loss = transformers_loss(exported, dense)
    if abs(their_loss - reports["without alpha"]["dense"]["loss"]) > TOLERANCE:
        print(
            f"no page is written: transformers gives {their_loss:.4f}, Megakernel "
            f"{reports['without alpha']['dense']['loss']:.4f}",
            file=sys.stderr,
        )
        return 1
    minutes, command = minutes_of_steps(runs), command_line("uptraining", argv)
    write_page(page(dense, their_loss, reports, minutes, options.nproc, command), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
