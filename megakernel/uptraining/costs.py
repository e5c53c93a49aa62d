"""Training cost of a stage, and decoding cost of a model."""

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
from megakernel.training.observing.metrics_writer import read_metrics

MAX_CONTEXT = 4096
"""Maximum tokens of context before timed decoding; a dense model's prefill takes quadratic time."""

CHUNK = 512
TIMED_TOKENS = 16
"""Maximum number of tokens that are decoded; the median of their times counts."""


@dataclass(frozen=True)
class TrainingCost:
    """Training cost, from a run's logged metrics."""

    seconds: float
    """Time of training steps, without evaluation and saving."""

    flops: float
    """FLOPs of forward and backward of the trained model, over all processes."""

    peak_bytes: float
    """Peak memory of a process."""

    @classmethod
    def of(cls, run: Path) -> "TrainingCost":
        """Read a run's metrics.jsonl; steps between two logged ones count like the later one."""
        seconds = flops = peak = 0.0
        before = 0
        for entry in read_metrics(run):
            peak = max(peak, entry.get("memory/peak_gib", 0.0) * 2**30)
            if "throughput/step_time" not in entry or entry["step"] <= before:
                continue
            seconds_here = (entry["step"] - before) * entry["throughput/step_time"]
            devices = entry["throughput/tokens_per_sec"] / entry["throughput/tokens_per_sec_per_device"]
            seconds += seconds_here
            flops += seconds_here * entry["throughput/tflops"] * 1e12 * devices
            before = entry["step"]
        return cls(seconds, flops, peak)

    @property
    def time(self) -> str:
        """Hours, minutes and seconds."""
        return str(timedelta(seconds=round(self.seconds)))


@dataclass(frozen=True)
class DecodingCost:
    """Cost of decoding one token of one text after `context` others."""

    context: int
    """Tokens of the text."""

    flops: float
    """Forward FLOPs per token, the mean over a sequence of so many tokens."""

    state_bytes: int
    """Size of the cache: a recurrent state, or keys and values."""

    seconds: float
    """Time per token."""

    @classmethod
    def of(cls, model: LanguageModel, seq_len: int, device: torch.device) -> "DecodingCost":
        """Measure a model that this process has as a whole, after seq_len tokens or MAX_CONTEXT if that is less."""
        settings = model.settings
        context, timed = min(seq_len, MAX_CONTEXT), TIMED_TOKENS
        if settings.model.position == "learned" and settings.model.max_positions is not None:
            timed = min(timed, settings.model.max_positions // 2)
            context = min(context, settings.model.max_positions - timed)
        training = model.training
        state, seconds = _time_decoding(model.eval(), context, timed, device)
        model.train(training)
        leaves: Iterable[object] = pytree.tree_leaves(state)
        kept = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return cls(context, flops_per_token(settings.model, context, settings.vocab_size), kept, seconds)


@torch.no_grad()
def _time_decoding(
    model: LanguageModel, context: int, timed: int, device: torch.device
) -> tuple[object, float]:
    """The layers' states after `context` tokens, and the seconds for each of `timed` tokens decoded after them."""
    tokens = torch.zeros(1, context + timed, dtype=torch.long, device=device)
    positions = torch.arange(context + timed)[None]
    state = None
    for start in range(0, context, CHUNK):
        part = slice(start, min(start + CHUNK, context))
        _, state = model.extend(tokens[:, part], positions[:, part], state)
    kept, times = state, []
    for place in range(context, context + timed):
        start_time = time.perf_counter()
        hidden, state = model.extend(tokens[:, place, None], positions[:, place, None], state)
        model.logits(hidden).argmax().item()  # synchronizes with the GPU
        times.append(time.perf_counter() - start_time)
    return kept, median(times)


def cost_tables(rows: list[tuple[str, TrainingCost | None]], decoding: dict[str, DecodingCost]) -> list[str]:
    """Both tables as lines of Markdown. decoding: its first model is the dense one."""
    lines = [
        "",
        "## Training cost",
        "",
        "| stage | time | training FLOPs | peak memory per process |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, spent in rows:
        if spent is not None:
            memory = f"{spent.peak_bytes / 2**30:.2f} GiB"
            lines.append(f"| {name} | {spent.time} | {spent.flops:.2e} | {memory} |")
    lines += ["", "## Decoding", ""]
    if not decoding:
        return [*lines, "Not measured: the model is an encoder, or no process has all of it."]
    dense, *others = decoding.values()
    context = min(dense.context, *(other.context for other in others))
    return [
        *lines,
        f"One text, after {context:,} tokens. The dense model's cache is a KV cache, that of others a recurrent state.",
        "",
        "| model | FLOPs per token | cache | of the KV cache | ms per token |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {cost.flops:.2e} | {cost.state_bytes / 2**10:,.1f} KiB | "
            f"{cost.state_bytes / max(dense.state_bytes, 1):.1%} | {1e3 * cost.seconds:.2f} |"
            for name, cost in decoding.items()
        ),
    ]
