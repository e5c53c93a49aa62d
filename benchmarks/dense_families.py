"""Families of dense checkpoints: how far logits are from those of `transformers`, and whether they go out as they came.

    OMP_NUM_THREADS=1 python -m benchmarks.dense_families --out benchmarks/results/dense_families_cpu.md

The models are those of the tests, small and of random weights, one for each thing in which families differ. Each is
saved by `transformers`, read as `megakernel import` reads it, and written as `megakernel export` writes it.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.page import add_out, give, one_table, table_row, whole_help
from megakernel.checkpoint.dense import FAMILIES, DenseCheckpoint
from megakernel.checkpoint.dense.checkpoint import our_parts
from megakernel.checkpoint.dense.configs import plain_config
from megakernel.checkpoint.export import write_tensors
from megakernel.model import LanguageModel, ModelSettings, cast
from megakernel.parallel import OneProcess
from tests import dense_models

COLUMNS = (
    *("family", "model", "float32", "bfloat16", "sdpa and eager in bfloat16", "bfloat16 from float32"),
    *("transformers' bfloat16 from float32", "export bit-equal"),
)


class Measured(NamedTuple):
    """What is found of one model."""

    family: str
    float32: float
    """The largest difference of a logit to those of `transformers`, as a share of the largest."""

    bfloat16: float
    """Distance to eager attention of `transformers`, both in bfloat16; see `distance`."""

    sdpa: float | None
    """What `transformers` with sdpa is from that; None where it has no sdpa."""

    rounding: float
    """Distance of ours in bfloat16 to `transformers` in float32."""

    their_rounding: float
    """The same of `transformers` in bfloat16."""

    goes_out: bool
    """Whether what is written has the bits of what was read."""

    def row(self, name: str) -> str:
        """Its line of the table."""
        numbers = (self.float32, self.bfloat16, self.sdpa, self.rounding, self.their_rounding)
        cells = ["no sdpa" if number is None else f"{number:.1e}" for number in numbers]
        out = "yes" if self.goes_out else "**no**"
        return table_row([f"`{self.family}`", name, *cells, out])


@torch.no_grad()
def measure(name: str, folder: Path) -> Measured:
    """Of one of the models of the tests, which is written to `folder`."""
    dense_models.save(name, folder / "in")
    checkpoint = DenseCheckpoint(folder / "in")
    exact = theirs(folder / "in", torch.float32)
    eager = theirs(folder / "in", torch.bfloat16, attn_implementation="eager")
    half, sdpa = ours(checkpoint, torch.bfloat16), None
    if checkpoint.config["model_type"] != "gemma2":
        sdpa = distance(theirs(folder / "in", torch.bfloat16, attn_implementation="sdpa"), eager)
    return Measured(
        checkpoint.config["model_type"],
        largest(ours(checkpoint, torch.float32), exact),
        distance(half, eager),
        sdpa,
        distance(half, exact),
        distance(eager, exact),
        goes_out(checkpoint, folder),
    )


def theirs(folder: Path, dtype: torch.dtype, **options: Any) -> Tensor:
    """Logits (1, N, V) of `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    return model(dense_models.tokens()).logits.float()


def ours(checkpoint: DenseCheckpoint, dtype: torch.dtype) -> Tensor:
    """The same of the layers of training."""
    wanted = checkpoint.model.for_rows(dense_models.LENGTH).model_copy(update={"vocab_multiple": 1})
    assert wanted.vocab_size is not None
    model = LanguageModel(ModelSettings(wanted, wanted.vocab_size, OneProcess())).eval()
    model.load_state_dict({name: checkpoint.read(name)["fp32"] for name in checkpoint.names})
    tokens = dense_models.tokens()
    return cast(model, dtype).logits(model.hidden(tokens, torch.arange(tokens.shape[1])[None])).float()


def distance(one: Tensor, other: Tensor) -> float:
    """Root mean square of the difference, as a share of that of `other`."""
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt())


def largest(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((one - other).abs().max() / other.abs().max())


def goes_out(checkpoint: DenseCheckpoint, folder: Path) -> bool:
    """Whether the model is written as a folder of its family with the same bits, tensors and logits."""
    model = checkpoint.model
    assert model.vocab_size is not None
    config = plain_config(model, model.vocab_size, dense_models.LENGTH)
    if config is None or config["model_type"] != checkpoint.config["model_type"]:
        return False
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "out", _split(checkpoint, config["model_type"]))
    before, after = (AutoModelForCausalLM.from_pretrained(folder / at).eval() for at in ("in", "out"))
    tensors = before.state_dict(), after.state_dict()
    alike = tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(x, tensors[1][name]) for name, x in tensors[0].items()
    )
    tokens = dense_models.tokens()
    return alike and torch.equal(before(tokens).logits, after(tokens).logits)


def _split(checkpoint: DenseCheckpoint, kind: str) -> Iterator[tuple[str, Tensor]]:
    for name, part in our_parts(FAMILIES[kind], checkpoint.model).items():
        yield from zip(part.hf_names, part.split(checkpoint.read(name)["fp32"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all and give the page."""
    parser = whole_help(__doc__)
    add_out(parser)
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for name in dense_models.CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, Path(folder)).row(name))
    out = f" --out {args.out}" if args.out else ""
    command = f"OMP_NUM_THREADS={torch.get_num_threads()} python -m benchmarks.dense_families{out}"
    note = (
        f"Small models of random weights, {dense_models.LENGTH} tokens. float32: the largest difference of a logit, as "
        "a share of the largest. bfloat16: the root mean square of the difference to eager attention of transformers, "
        "as a share of that of the logits, beside what transformers is from itself with sdpa, and what each of the two "
        "is from transformers in float32. Export: all tensors and the logits of what is written are those of what was "
        "read."
    )
    give(one_table("Families of dense checkpoints", command, note, COLUMNS, rows), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
