"""The plot of a task whose answers lie at depths: which are found, by length and depth."""

from io import BytesIO

from .answer_counts import AnswerCounts


def heat_map(found: AnswerCounts) -> bytes | None:
    """A PNG, green where all answers are right and red where none is; None for a task without depths."""
    if not found.depths:
        return None
    from matplotlib.figure import Figure

    cells = {(cell.length, cell.depth): cell.accuracy for cell in found.cells}
    shares = [[cells[length, depth] for length in found.lengths] for depth in found.depths]
    size = (3 + 0.8 * len(found.lengths), 2 + 0.3 * len(found.depths))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(found.lengths)), [f"{length:,}" for length in found.lengths], rotation=45)
    axes.set_yticks(range(len(found.depths)), [f"{depth:.0%}" for depth in found.depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.set_title(f"{found.task}, step {found.step}", fontsize="small")
    for at, row in enumerate(shares):
        for place, share in enumerate(row):
            axes.text(place, at, f"{share:.0%}", ha="center", va="center", fontsize="x-small")
    figure.colorbar(image, label="right")
    plot = BytesIO()
    figure.savefig(plot, format="png", dpi=100)
    return plot.getvalue()
