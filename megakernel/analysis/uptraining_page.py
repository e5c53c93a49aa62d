"""The report of an up-training as one HTML page: its tables, losses over the stages, and heads as heat maps."""

import html
import io
import json
from pathlib import Path
from typing import Any

from megakernel.training.observing.metrics_writer import read_metrics
from megakernel.training.run_folder import write_atomically
from megakernel.uptraining.head_statistics import HeadTag
from megakernel.uptraining.report import HEADS, REPORT

from .plots.table import Row

_STYLE = """
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #1c2430; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #d5dae1; padding: .3rem .6rem; white-space: nowrap; }
svg { max-width: 100%; height: auto; }
"""


def write_page(folder: Path) -> Path:
    """Write FOLDER/uptrain_report.html, which needs no other file, from the report and the stages' metrics.

    Raises ImportError without matplotlib or Markdown.
    """
    from markdown import markdown
    from matplotlib.figure import Figure

    from .plots.drawing import cells, lines

    report: dict[str, Any] = json.loads((folder / f"{REPORT}.json").read_text(encoding="utf-8"))
    text = (folder / f"{REPORT}.md").read_text(encoding="utf-8").partition(HEADS)[0]
    figures: dict[str, list[Figure]] = {
        "Validation loss": [lines(_validation(report), "tokens", "nats per token", "model")]
    }
    if training := _training(report):
        figures["Training loss of each stage"] = [lines(training, "tokens", "loss", panel="stage")]
    if report["heads"]:
        figures["Heads, at the end of the transfer"] = [
            cells(rows, "head", "layer", name, downwards=True) for name, rows in _heads(report).items()
        ]
    title = html.escape(f"Up-training {report['config']}")
    # Names of folders are the user's: as text they cannot become elements of the page.
    body = markdown(html.escape(text, quote=False), extensions=["tables"])
    for heading, drawn in figures.items():
        body += f"\n<h2>{heading}</h2>\n" + "\n".join(map(_svg, drawn))
    page = (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )
    file = folder / f"{REPORT}.html"
    write_atomically(file, page)
    return file


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _validation(report: dict[str, Any]) -> list[Row]:
    """The student after each stage, from the swap on, and the dense model, whose loss stays."""
    student = [report["swapped"], *report["stages"]]
    end = student[-1]["tokens"]
    rows = [("student", one["tokens"], one["loss"]) for one in student]
    rows += [("dense model", tokens, report["dense"]["loss"]) for tokens in (0, end)]
    return [{"model": model, "tokens": tokens, "nats per token": loss} for model, tokens, loss in rows]


def _training(report: dict[str, Any]) -> list[Row]:
    """The training loss of each stage that has a run folder, by its own tokens."""
    return [
        {"stage": stage["name"], "tokens": entry["train/tokens"], "loss": entry["train/loss"]}
        for stage in (*report["stages"], *report["ablations"])
        if stage["folder"] is not None and Path(stage["folder"]).is_dir()
        for entry in read_metrics(Path(stage["folder"]))
        if "train/loss" in entry and "train/tokens" in entry
    ]


def _heads(report: dict[str, Any]) -> dict[str, list[Row]]:
    """Statistic -> a row for each head; a value that is no number is empty."""
    statistics: dict[str, list[Row]] = {}
    for tag, value in report["heads"].items():
        name, layer, head = HeadTag.parse(tag)
        words = name.replace("_", " ")
        row: Row = {"layer": layer, "head": head, words: "" if value is None else value}
        statistics.setdefault(words, []).append(row)
    return statistics
