"""What a stage took, and what a model takes to decode: the other half of what an up-training is for."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megakernel.model import LanguageModel
from megakernel.model.flops import flops_per_token
from megakernel.training.observing.metrics_writer import logged

LONGEST = 4096
"""Tokens that are read before decoding is timed, at most: those of a dense model take the square of it."""

CHUNK = 512
TIMED = 16
"""Tokens that are decoded; the median counts."""


@dataclass(frozen=True)
class Spent:
    """What training took, as its run has logged it."""

    seconds: float
    """In steps, evaluation and saving apart."""

    flops: float
    """Of forward and backward of what is trained, over all processes."""

    peak_bytes: float
    """The most memory of a process."""

    @classmethod
    def of(cls, run: Path) -> "Spent":
        """Read a run's metrics.jsonl; of steps that nobody logged by those that were logged next."""
        seconds = flops = peak = 0.0
        before = 0
        for entry in logged(run):
            peak = max(peak, entry.get("memory/peak_gib", 0.0) * 2**30)
            if "throughput/step_time" not in entry or entry["step"] <= before:
                continue
            here = (entry["step"] - before) * entry["throughput/step_time"]
            devices = entry["throughput/tokens_per_sec"] / entry["throughput/tokens_per_sec_per_device"]
            seconds += here
            flops += here * entry["throughput/tflops"] * 1e12 * devices
            before = entry["step"]
        return cls(seconds, flops, peak)

    @property
    def time(self) -> str:
        """Hours, minutes and seconds."""
        return str(timedelta(seconds=round(self.seconds)))


@dataclass(frozen=True)
class Decoding:
    """What it takes to write a token behind `context` others, of one text."""

    context: int
    """Tokens of the text."""

    flops: float
    """Forward FLOPs per token, the mean over a sequence of so many tokens."""

    state_bytes: int
    """What is kept of the tokens: a recurrent state, or keys and values."""

    seconds: float
    """Per token."""

    @classmethod
    def of(cls, model: LanguageModel, seq_len: int, device: torch.device) -> "Decoding":
        """Measured of a model that this process has as a whole, behind seq_len tokens, LONGEST at most."""
        settings = model.settings
        context = min(seq_len, LONGEST)
        if settings.model.position == "learned" and settings.model.max_positions is not None:
            context = min(context, settings.model.max_positions - TIMED)
        training = model.training
        state, seconds = _decoded(model.eval(), context, device)
        model.train(training)
        leaves: Iterable[object] = pytree.tree_leaves(state)
        kept = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return cls(context, flops_per_token(settings.model, context, settings.vocab_size), kept, seconds)


@torch.no_grad()
def _decoded(model: LanguageModel, context: int, device: torch.device) -> tuple[object, float]:
    """What the layers keep of `context` tokens, and the seconds of a token behind them."""
    tokens = torch.zeros(1, context + TIMED, dtype=torch.long, device=device)
    positions = torch.arange(context + TIMED, device=device)[None]
    state = None
    for start in range(0, context, CHUNK):
        part = slice(start, min(start + CHUNK, context))
        _, state = model.extend(tokens[:, part], positions[:, part], state)
    kept, times = state, []
    for place in range(context, context + TIMED):
        start_time = time.perf_counter()
        hidden, state = model.extend(tokens[:, place, None], positions[:, place, None], state)
        model.logits(hidden).argmax().item()  # waits for a GPU
        times.append(time.perf_counter() - start_time)
    return kept, median(times)


def cost_pages(stages: Iterable[tuple[str, Spent | None]], decoding: dict[str, Decoding]) -> list[str]:
    """Both tables as lines of Markdown; of decoding the first model is the dense one."""
    lines = [
        "",
        "## What it took",
        "",
        "| stage | time | training FLOPs | memory of a process |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, spent in stages:
        if spent is not None:
            lines.append(
                f"| {name} | {spent.time} | {spent.flops:.2e} | {spent.peak_bytes / 2**30:.2f} GiB |"
            )
    lines += ["", "## Decoding", ""]
    if not decoding:
        return [*lines, "Not measured: no process has the whole model."]
    dense, *others = decoding.values()
    context = min(dense.context, *(other.context for other in others))
    return [
        *lines,
        f"One text, behind {context:,} tokens; what is kept of them is the KV cache of the dense model, the state of "
        "the others.",
        "",
        "| model | FLOPs per token | kept | of the KV cache | ms per token |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {found.flops:.2e} | {found.state_bytes / 2**10:,.1f} KiB | "
            f"{found.state_bytes / max(dense.state_bytes, 1):.1%} | {1e3 * found.seconds:.2f} |"
            for name, found in decoding.items()
        ),
    ]
