"""Families of dense checkpoints: distance of logits from those of `transformers`, and whether exports are bit-equal.

    OMP_NUM_THREADS=1 python -m benchmarks.dense_families --out benchmarks/results/dense_families_cpu.md

The models are those of the tests: small, with random weights, one for each way in which families differ. Each is
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

from benchmarks.page import command_line, page_parser, table_page, table_row, write_page
from megakernel.checkpoint.dense import FAMILIES, DenseCheckpoint
from megakernel.checkpoint.dense.checkpoint import model_parts
from megakernel.checkpoint.dense.configs import plain_config
from megakernel.checkpoint.export import write_tensors
from megakernel.model import LanguageModel, ModelSettings, cast
from megakernel.parallel import OneProcess
from tests import dense_models

COLUMNS = (
    *("family", "model", "float32", "bfloat16", "sdpa and eager in bfloat16", "bfloat16 from float32"),
    *("transformers' bfloat16 from float32", "export bit-equal"),
)


class FamilyResult(NamedTuple):
    """Results of one model."""

    family: str
    float32: float
    """The largest difference between a logit and that of `transformers`, as a share of the largest logit."""

    bfloat16: float
    """`relative_rms` from `transformers` with eager attention, both in bfloat16."""

    sdpa: float | None
    """`relative_rms` between sdpa and eager attention of `transformers`; None if the family has no sdpa."""

    rounding: float
    """`relative_rms` of ours in bfloat16 from `transformers` in float32."""

    transformers_rounding: float
    """`relative_rms` of `transformers` in bfloat16 from `transformers` in float32."""

    export_is_equal: bool
    """Whether the export is bit-equal to what was imported."""

    def row(self, name: str) -> str:
        """The table row."""
        numbers = (self.float32, self.bfloat16, self.sdpa, self.rounding, self.transformers_rounding)
        cells = ["no sdpa" if number is None else f"{number:.1e}" for number in numbers]
        out = "yes" if self.export_is_equal else "**no**"
        return table_row([f"`{self.family}`", name, *cells, out])


@torch.no_grad()
def measure(name: str, folder: Path) -> FamilyResult:
    """Measure one of the tests' models, using `folder` for its files."""
    dense_models.save(name, folder / "in")
    checkpoint = DenseCheckpoint(folder / "in")
    exact = transformers_logits(folder / "in", torch.float32)
    eager = transformers_logits(folder / "in", torch.bfloat16, attn_implementation="eager")
    half, sdpa = our_logits(checkpoint, torch.bfloat16), None
    if checkpoint.config["model_type"] != "gemma2":
        sdpa = relative_rms(
            transformers_logits(folder / "in", torch.bfloat16, attn_implementation="sdpa"), eager
        )
    return FamilyResult(
        checkpoint.config["model_type"],
        relative_max(our_logits(checkpoint, torch.float32), exact),
        relative_rms(half, eager),
        sdpa,
        relative_rms(half, exact),
        relative_rms(eager, exact),
        export_is_equal(checkpoint, folder),
    )


def transformers_logits(folder: Path, dtype: torch.dtype, **options: Any) -> Tensor:
    """Logits (1, N, V) of `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    return model(dense_models.tokens()).logits.float()


def our_logits(checkpoint: DenseCheckpoint, dtype: torch.dtype) -> Tensor:
    """The same from our layers."""
    model_config = checkpoint.model.for_seq_len(dense_models.LENGTH).model_copy(update={"vocab_multiple": 1})
    assert model_config.vocab_size is not None
    model = LanguageModel(ModelSettings(model_config, model_config.vocab_size, OneProcess())).eval()
    model.load_state_dict({name: checkpoint.read(name)["fp32"] for name in checkpoint.names})
    tokens = dense_models.tokens()
    return cast(model, dtype).logits(model.hidden(tokens, torch.arange(tokens.shape[1])[None])).float()


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over the RMS of `expected`."""
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def relative_max(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


def export_is_equal(checkpoint: DenseCheckpoint, folder: Path) -> bool:
    """Whether the model is exported as its own family with bit-equal tensors and logits."""
    model = checkpoint.model
    assert model.vocab_size is not None
    config = plain_config(model, model.vocab_size, dense_models.LENGTH)
    if config is None or config["model_type"] != checkpoint.config["model_type"]:
        return False
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "out", _hf_tensors(checkpoint, config["model_type"]))
    before, after = (AutoModelForCausalLM.from_pretrained(folder / at).eval() for at in ("in", "out"))
    tensors = before.state_dict(), after.state_dict()
    tensors_equal = tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(x, tensors[1][name]) for name, x in tensors[0].items()
    )
    tokens = dense_models.tokens()
    return tensors_equal and torch.equal(before(tokens).logits, after(tokens).logits)


def _hf_tensors(checkpoint: DenseCheckpoint, kind: str) -> Iterator[tuple[str, Tensor]]:
    for name, part in model_parts(FAMILIES[kind], checkpoint.model).items():
        yield from zip(part.hf_names, part.split(checkpoint.read(name)["fp32"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all models and write the page."""
    parser = page_parser(__doc__)
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for name in dense_models.CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, Path(folder)).row(name))
    command = command_line("dense_families", arguments)
    note = (
        f"Small models with random weights, {dense_models.LENGTH} tokens. float32: the largest difference between a "
        "logit and that of transformers, as a share of the largest logit. bfloat16: RMS of the difference from "
        "transformers with eager attention over the RMS of the logits; for comparison, the same between sdpa and eager "
        "attention, and of each library from transformers in float32. Export: tensors and logits of the export are "
        "bit-equal to those of the import."
    )
    write_page(table_page("Families of dense checkpoints", command, note, COLUMNS, rows), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
