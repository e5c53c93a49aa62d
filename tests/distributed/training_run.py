"""Training runs in real ranks, for tests that compare their losses."""

import contextlib
import io
import json
import math
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from megakernel.config import load
from megakernel.training.observing import gpu_signals
from tests.distributed.processes import run_ranks, this_process
from tests.nvml import UUID, fake_nvml

CONFIG = """
run: {name: run, seed: 7}
model:
  num_layers: 4
  hidden_size: 64
  num_heads: 4
  num_kv_heads: 4
  attention: {preset: flurka, compression: {block_size: 16, rank: 4}}
  attention_pattern: [main, {preset: flurka_kernel, compression: {block_size: 16, rank: 4}}, softmax, performer]
parallel: {zero_stage: 0}
training:
  steps: 5
  seq_len: 128
  global_batch_size: 8
  micro_batch_size: 2
  dtype: float32
  log_every: 1
  eval_samples: 6
optimizer: {lr: 1e-3}
schedule: {warmup_steps: 2}
data: {num_workers: 0}
"""
"""A model with every kind of layer, small enough to train in a second."""

LAYOUT_WORDS = {
    r"dp\d": "",
    r"tp(\d)": "parallel.tensor={}",
    r"cp(\d)": "parallel.context={}",
    r"pp(\d)": "parallel.pipeline={}",
    r"zero (\d)": "parallel.zero_stage={}",
    "sequence parallel": "parallel.sequence_parallel=true",
    "states passed on": "parallel.state_exchange=ring",
    "ring": "parallel.softmax_exchange=ring",
    r"(full|selective) recompute": "training.activation_checkpointing={}",
    "offload": "training.checkpoint_offload=true",
    "loss chunks": "training.loss_chunk_size=100",
    "mlp chunks": "training.mlp_chunk_size=50",
    "one micro-batch": "training.micro_batch_size=8",
    "bfloat16": "training.dtype=bfloat16",
    "one process": "",
}


def layout(name: str) -> tuple[Any, ...]:
    """The world size and the overrides that a name such as `tp2 sequence parallel dp2 zero 1` stands for."""
    overrides, rest = [], name
    for words, override in LAYOUT_WORDS.items():
        if match := re.search(rf"\b{words}\b", rest):
            rest = rest.replace(match[0], "", 1)
            overrides += [override.format(*match.groups())] * bool(override)
    assert not rest.strip(), f"{name}: {rest.strip()} is not the name of a layout"
    return math.prod(int(size) for size in re.findall(r"\b[dtcp]p(\d)", name)), *overrides


def write_config(folder: Path, corpus: Path) -> Path:
    """Write CONFIG to a file, for runs in `folder` on a corpus."""
    path = folder / "config.yaml"
    text = CONFIG.replace("data: {", f"data: {{train: {corpus}, ").replace(
        "run: {", f"run: {{root: {folder}, "
    )
    path.write_text(text)
    return path


def train(
    config: Path, world_size: int, *overrides: str, timeout: float = 240.0, allowed: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Train in `world_size` ranks; returns the lines of metrics.jsonl. allowed: keys of --allow-change."""
    statuses = run_ranks(pretrain_in_this_rank, world_size, config, overrides, allowed, timeout=timeout)
    assert set(statuses) == {0}, statuses
    return metrics(load(config, overrides).run.folder)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics.jsonl, which a live run may be writing."""
    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def scalars(lines: list[dict[str, Any]], tag: str) -> list[float]:
    """One tag's values, in order."""
    return [line[tag] for line in lines if tag in line]


def assert_losses_close(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Two runs on the same batches have the same losses, on any layouts."""
    # float32 sums in another order: 1e-5 for losses, 1e-4 for norms, which sum squares of all gradients.
    tolerances = {"train/loss": 1e-5, "train/z_loss": 1e-5, "train/grad_norm": 1e-4, "eval/loss": 1e-5}
    for tag, tolerance in tolerances.items():
        assert scalars(actual, tag) == pytest.approx(scalars(expected, tag), rel=tolerance), tag


def assert_identical(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Two runs on one layout have the same losses in the same steps, bit for bit."""
    for tag in ("step", "train/loss", "train/grad_norm", "eval/loss"):
        assert scalars(actual, tag) == scalars(expected, tag), tag


def assert_resumed_bit_identically(resumed: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """A resumed run has the losses and the last evaluation of an uninterrupted one, bit for bit."""
    for tag in ("train/loss", "train/grad_norm"):
        assert scalars(resumed, tag) == scalars(whole, tag), tag
    assert scalars(resumed, "eval/loss")[-1] == scalars(whole, "eval/loss")[-1]


def pretrain_in_this_rank(config: Path, overrides: tuple[str, ...], allowed: tuple[str, ...] = ()) -> int:
    from launch.training import train

    return train(load(config, overrides), this_process(), allowed)


def pretrain_tracked(config: Path, overrides: tuple[str, ...], databases: str) -> int:
    """Train in this rank; Trackio's projects are in the folder `databases`."""
    os.environ["TRACKIO_DIR"] = databases
    return pretrain_in_this_rank(config, overrides)


def pretrain_on_fake_gpu(config: Path, overrides: tuple[str, ...], folder: str) -> int:
    """Train in this rank on the CPU, as if the GPU of `tests.nvml` were its own; folder: for the driver's library."""
    with fake_nvml(Path(folder)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_signals, "uuid_of", lambda device: UUID)
        return pretrain_in_this_rank(config, overrides)


def pretrain_and_return_output(
    config: Path, overrides: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> str:
    """Train in this rank; returns what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert pretrain_in_this_rank(config, overrides, allowed) == 0
    return printed.getvalue()


def pretrain_killed_at_line(
    line_start: str, config: Path, overrides: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> int:
    """Train, and kill this process by SIGKILL once it has printed a line that begins with `line_start`."""
    read, write = os.pipe()
    os.dup2(write, 1)

    def watch() -> None:
        with os.fdopen(read) as lines:
            next(line for line in lines if line.startswith(line_start))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return pretrain_in_this_rank(config, overrides, allowed)
