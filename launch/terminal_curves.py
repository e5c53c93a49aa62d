"""The losses of a run over its tokens, drawn with characters."""

import re
from pathlib import Path

from launch.messages import printable
from megakernel.config import UserError
from megakernel.config.extras import need

DEFAULT_WIDTH = 80
"""Characters per line if stdout is no terminal."""

HEIGHT = 18
"""Lines of a curve."""

_LEAST_WIDTH = 40
_POINT = "o"
_TICKS = 5
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


def check_curves() -> None:
    """Raise UserError with the pip command if plotext is missing."""
    need("--curve", "plotext")


def curves(folder: Path, name: str, width: int) -> str:
    """Training loss as a line and evaluation loss as points, in `width` characters; a line if there is nothing to draw.

    The folder may be that of a run that trains, or a damaged one.
    """
    import plotext

    from megakernel.analysis.comparison import LOSSES, ComparedRun

    try:
        run = ComparedRun.read(folder)
    except UserError as error:
        return f"no curve: {printable(str(error))}"
    drawn = {tag: run.curves[tag] for tag in LOSSES if run.curves.get(tag)}
    if not drawn:
        return f"no curve: {printable(name)} has logged no loss yet"
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)  # otherwise to the terminal, which a pipe does not have
    plotext.plot_size(max(width, _LEAST_WIDTH), HEIGHT)
    for tag, points in drawn.items():
        x, y = [point.tokens for point in points], [point.value for point in points]
        if tag.startswith("eval/"):
            plotext.scatter(x, y, marker=_POINT)
        else:
            plotext.plot(x, y, marker="braille")
    first, last = (edge(point.tokens for points in drawn.values() for point in points) for edge in (min, max))
    places = sorted({first + (last - first) * at // (_TICKS - 1) for at in range(_TICKS)})
    plotext.xticks(places, [_short(place) for place in places])
    # A legend inside would hide the start of the curve.
    kinds = [f"{tag} ({_POINT if tag.startswith('eval/') else 'line'})" for tag in drawn]
    plotext.title(f"{printable(name)}: {', '.join(kinds)}")
    plotext.xlabel("tokens")
    lines = _STYLES.sub("", plotext.build()).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _short(tokens: int) -> str:
    """`81,920`, `1.64M`: at most six characters."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return f"{tokens:,}" if tokens < 10**5 else f"{tokens / 1000:.3g}k"
