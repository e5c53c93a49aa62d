"""Parameters and floating-point operations of the models of four papers, counted from their configurations.

    python -m benchmarks.paper_costs --out benchmarks/results/paper_costs.md

Nothing is trained or timed: models are built without memory for their weights, and `megakernel/model/flops.py` counts
the matrix products that their formulas need. Rows are models of the papers' studies in benchmarks/experiments.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.experiments.runs import make_run
from benchmarks.experiments.study import read_study
from benchmarks.page import command_line, page_header, page_parser, run_main, table, table_row, write_page
from megakernel.config import Config
from megakernel.model.flops import flops_per_token, training_flops_per_token
from megakernel.model.parameters import parameter_count

BYTES = 257
"""Ids of the byte tokenizer: the bytes and the end of a document."""

SUBWORDS = 16_384
"""Ids of `bpe:16384`, the tokenizer of WikiText-103 here."""

COLUMNS = [
    "model",
    "heads",
    "parameters",
    "in layers",
    "forward, MFLOPs/token",
    "GFLOPs/example",
    "training, TFLOPs/step",
]


@dataclass(frozen=True)
class CostTable:
    """The models of a study in one of its variants."""

    title: str
    study: str
    variants: tuple[str, ...]
    models: tuple[str, ...]
    vocab_size: int = BYTES

    def rows(self) -> Iterator[str]:
        """One row for each model."""
        study = read_study(self.study)
        for variant in self.variants:
            for name in self.models:
                label = name if len(self.variants) == 1 else f"{name}, {variant}"
                yield cost_row(label, make_run(study, name, variant, 0).config, self.vocab_size)


def cost_row(name: str, config: Config, vocab_size: int) -> str:
    """A row: parameters, and operations of a token, of an example, and of a step with its whole batch."""
    model, length = config.model, config.training.seq_len
    documents = 1 if model.classifier is None else model.classifier.documents
    total = parameter_count(model, vocab_size, length)
    shorter = model.model_copy(update={"num_layers": model.num_layers - 1})
    in_layers = model.num_layers * (total - parameter_count(shorter, vocab_size, length))
    predicted = config.data.masking.rate if model.kind == "masked_lm" else 1.0
    forward = flops_per_token(model, length, vocab_size, predicted)
    training = training_flops_per_token(model, length, vocab_size, predicted)
    example = length * documents
    step = training * example * config.training.global_batch_size
    return table_row(
        [
            f"`{name}`",
            model.num_heads,
            f"{total:,}",
            f"{in_layers:,}",
            f"{forward / 1e6:.3f}",
            f"{forward * example / 1e9:.3f}",
            f"{step / 1e12:.3f}",
        ]
    )


_HEADS = (1, 2, 4, 8, 12)
_MIXTURE_HEADS = (1, 2, 4, 6)
TABLES = (
    CostTable(
        "Transformer-MGK, Retrieval (figures 4, 8, 15 and 16)",
        "lra_mgk",
        ("retrieval",),
        (
            *(f"softmax-{heads}" for heads in _HEADS),
            *(f"{preset}-{heads}" for preset in ("mgk", "smgk") for heads in _MIXTURE_HEADS),
            *("mgk-soft-1", "mgk-hard-1", "smgk-soft-1", "smgk-hard-1"),
            *(f"linear-{heads}" for heads in _HEADS),
            *(f"{preset}-{heads}" for preset in ("mlk", "smlk") for heads in _MIXTURE_HEADS),
        ),
    ),
    CostTable(
        "Transformer-MGK, WikiText-103 (tables 3 and 10; of figures 3 and 10 the trained sizes)",
        "wikitext_mgk",
        ("small-8", "small-4", "medium-8", "medium-4"),
        ("softmax", "mgk", "smgk", "linear", "mlk", "multi-query softmax", "multi-query mgk"),
        SUBWORDS,
    ),
    CostTable(
        "FLuRKA, LRA Text (table 6)",
        "lra_flurka",
        ("text",),
        (
            "softmax",
            "linformer",
            "performer",
            "linear",
            "eva",
            "flurka_performer",
            "flurka_rnn",
            "flurka_eva",
        ),
    ),
    CostTable(
        "Skyformer, LRA Text",
        "lra_skyformer",
        ("text",),
        ("softmax", "kernelized", "nystromformer", "linformer", "performer", "skyformer"),
    ),
    CostTable(
        "Learning the Transformer Kernel, LRA Text (table 2)",
        "lra_kl",
        ("text",),
        (
            *("softmax", "linear", "performer", "gmm_rks", "fastfood_rks", "generative_rks"),
            *("gmm_prf", "fastfood_prf", "generative_prf"),
        ),
    ),
)

TEXT = f"""\
*In layers*: without embeddings, final norm and head. *FLOPs*: only matrix products count, a multiplication and an
addition as 2; training is three times forward (conventions: `megakernel/model/flops.py`). An example of Retrieval has
two documents. A step has the whole batch. Text and Retrieval are bytes ({BYTES} ids), WikiText-103 is {SUBWORDS:,}
subwords; the papers' word vocabularies are larger.
"""


def page(command: str) -> str:
    """The page with all tables."""
    lines = [*page_header("Parameters and FLOPs of the papers' models", command), TEXT]
    for section in TABLES:
        lines += [f"## {section.title}", "", *table(COLUMNS, section.rows(), numbers=True)]
    return "\n".join(lines)


def main() -> int:
    """Count, and write the page."""
    write_page(page(command_line("paper_costs")), page_parser(__doc__ or "").parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
