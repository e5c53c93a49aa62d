"""What must hold before a study's page is written: a registry of checks by name."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from megakernel.config import Config
from megakernel.training.observing.metrics_writer import read_metrics

if TYPE_CHECKING:
    from .runs import StudyResult

AVERAGED = 10
"""The first and the last training loss are means over this many steps, or over half of a shorter training."""

TOLERANCE = 1e-3
"""Largest allowed difference between our loss and that of `transformers` on the exported model, in nats."""


def learned(results: Sequence["StudyResult"]) -> Iterator[str]:
    """Every loss and gradient is finite, no step was skipped, and training and held-out losses fell."""
    for result in results:
        if result.folder is None:
            continue
        lines = read_metrics(result.folder)
        steps = [line for line in lines if "train/loss" in line]
        losses = [line["train/loss"] for line in steps]
        held_out = [line["eval/loss"] for line in lines if "eval/loss" in line]
        gradients = [line["train/grad_norm"] for line in steps]
        skipped = int(steps[-1]["train/skipped_steps"]) if steps else 0
        if not steps or steps[-1]["step"] != result.step:
            yield f"{result.run}: its metrics.jsonl is not that of a whole run"
        elif skipped or None in [*losses, *held_out, *gradients]:
            yield f"{result.run}: a loss or gradient was not finite ({skipped} steps skipped)"
        else:
            count = min(AVERAGED, max(1, len(losses) // 2))
            first, last = statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])
            if last >= first:
                yield f"{result.run}: the training loss did not fall, {first:.4f} to {last:.4f}"
            elif len(held_out) > 1 and held_out[-1] >= held_out[0]:
                yield f"{result.run}: the held-out loss did not fall, {held_out[0]:.4f} to {held_out[-1]:.4f}"


def transformers_agree(results: Sequence["StudyResult"]) -> Iterator[str]:
    """`transformers` has the loss of Megakernel on the dense model that was exported and up-trained."""
    first = next(result for result in results if result.run.start is not None)
    start, source = first.run.start, first.run.config.init.source
    assert start is not None
    ours, theirs = first.report["dense"]["loss"], transformers_loss(str(source), start.config)
    if not math.isclose(ours, theirs, rel_tol=0.0, abs_tol=TOLERANCE):
        yield f"transformers gives {theirs:.4f} for {source}, Megakernel {ours:.4f}"


def transformers_loss(folder: str, config: Config) -> float:
    """Loss of an exported model in `transformers`, in nats per token, on the run's validation samples."""
    import torch
    from transformers import AutoModelForCausalLM

    from data_pipeline.corpus import Corpora
    from data_pipeline.loader import ValidationBatches
    from data_pipeline.order import Share

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in ValidationBatches(config, Corpora(config.data), Share()):
            logits = model(batch.tokens).logits.flatten(0, 1)
            losses = torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
            total += float(losses[batch.loss_mask.flatten()].double().sum())
            count += int(batch.loss_mask.sum())
    return total / count


CHECKS: dict[str, Callable[[Sequence["StudyResult"]], Iterator[str]]] = {
    "learned": learned,
    "transformers_agree": transformers_agree,
}
"""Name of a check in a study's file -> function that yields what does not hold."""
