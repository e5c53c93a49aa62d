"""What TensorBoard is told of a run once: its configuration, what to compare runs by, which pages to open with."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megakernel.config import Config, to_yaml

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

COMPARED = (
    "train/loss",
    "eval/loss",
    "eval/bits_per_byte",
    "eval/accuracy",
    "throughput/tokens_per_sec",
    "throughput/mfu",
    "memory/peak_gib",
)
"""Columns of the HPARAMS page, each with the last value of the run; a run without one leaves it empty."""

LAYOUT = {
    "Learning": {
        "loss": ["Multiline", ["^train/loss$", "^eval/loss$"]],
        "bits per byte": ["Multiline", ["^train/bits_per_byte$", "^eval/bits_per_byte$"]],
        "gradient norm": ["Multiline", ["^train/grad_norm$"]],
        "learning rate": ["Multiline", ["^train/lr$"]],
    },
    "Speed": {
        "tokens per second": ["Multiline", ["^throughput/tokens_per_sec$"]],
        "share of peak FLOP/s": ["Multiline", ["^throughput/mfu$"]],
        "seconds of a step, and of its data": [
            "Multiline",
            ["^throughput/step_time$", "^throughput/data_time$"],
        ],
        "peak memory, GiB": ["Multiline", ["^memory/.*peak_gib$"]],
    },
    "Health": {
        "slowest rank over the median": ["Multiline", ["^health/straggle$"]],
        "slowest rank": ["Multiline", ["^health/slowest_rank$"]],
        "share of a step spent on data": ["Multiline", ["^health/data_share$"]],
        "steps skipped so far": ["Multiline", ["^train/skipped_steps$"]],
    },
}
"""Pages of CUSTOM SCALARS: page -> chart -> tags, as regular expressions."""


def describe(events: "SummaryWriter", config: Config, packing: str) -> None:
    """Write the beginning of a run's events; packing: what is to be said of it, in Markdown."""
    experiment, start, _ = _hparams(config)
    # SummaryWriter.add_hparams would open a run of its own in a subfolder, and call it finished at once.
    for summary in (experiment, start):
        events.file_writer.add_summary(summary, 0)
    events.add_custom_scalars(LAYOUT)
    # Markdown shows an indented text as it is.
    events.add_text("config", textwrap.indent(to_yaml(config), "    "), 0)
    if packing:
        events.add_text("packing", packing, 0)


def finish(events: "SummaryWriter", config: Config, step: int) -> None:
    """Write that the run has come to its last step."""
    events.file_writer.add_summary(_hparams(config)[2], step)


def _hparams(config: Config) -> "tuple[Summary, Summary, Summary]":
    """What the experiment compares, this run's values, and that it has succeeded."""
    from torch.utils.tensorboard.summary import hparams

    return hparams(dict(_flat(config.model_dump(mode="json"))), dict.fromkeys(COMPARED))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Dotted key -> leaf; what is no scalar is written as text."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, (str, int, float)) else json.dumps(value)
