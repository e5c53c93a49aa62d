"""The report for TensorBoard: beside the curves of the stages, which lie in folders of their own."""

import re
from pathlib import Path

from megakernel.training.event_files import drop_later_steps

from .report import Report


def write_events(report: Report, folder: Path) -> None:
    """Write the page as text, and each row's numbers as `report/loss/ROW` and so on, at the tokens it was trained on.

    What an earlier report wrote there goes.
    """
    # Imported here because it takes seconds that the other ranks need not wait.
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(exist_ok=True)
    drop_later_steps(folder, -1)
    with SummaryWriter(str(folder)) as events:
        events.add_text("report", report.markdown())
        for row in report.rows:
            numbers = {"loss": row.loss, "perplexity": row.perplexity, "beyond": row.beyond}
            if (share := report.recovered(row, report.dense)) is not None:
                numbers["recovered"] = share
            name = re.sub(r"[^\w.]+", "_", row.name)
            for kind, value in numbers.items():
                events.add_scalar(f"report/{kind}/{name}", value, row.tokens)
