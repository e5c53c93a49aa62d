"""The memory of layouts as stacked bars: an SVG file beside the page of `megakernel plan`."""

from collections.abc import Mapping
from html import escape

from .gpus import Gpu
from .memory import PARTS
from .plan import Planned

_COLORS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "activations": "#e69f00",
    "loss": "#f0e442",
    "exchange": "#cc79a7",
    "workspace": "#d55e00",
    "teacher": "#6a51a3",
    "reserve": "#999999",
}
"""Colors that people who confuse red and green can tell apart."""

_LEFT, _BAR, _RIGHT = 90, 640, 110
"""Widths of the names, of the longest bar and of its total, in pixels."""

_ROW, _HEIGHT, _LEGEND = 54, 24, 26
"""Heights of a layout, of its bar and of a line of the legend, in pixels."""

_IN_LINE = 3
"""Parts in a line of the legend."""

_CHARACTER = 7.0
"""Pixels of a character at most."""


def memory_bars(planned: Mapping[str, Planned], gpu: Gpu) -> str:
    """An SVG image with a stacked bar for each layout, by part, and a line at the memory of the GPU.

    Args:
        planned: name -> layout.
        gpu: the device.
    """
    memories = {name: one.memory.parts for name, one in planned.items()}
    names = [
        part
        for part in _in_order(memories)
        if any(round(parts.get(part, 0.0)) for parts in memories.values())
    ]
    scale = _BAR / max(gpu.memory, *(sum(parts.values()) for parts in memories.values()))
    top = 16 + _LEGEND * -(-len(names) // _IN_LINE) + 30
    height, width = top + _ROW * len(planned) + 6, _LEFT + _BAR + _RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="sans-serif" font-size="13" fill="#222">',
        "<title>Memory per device by part, predicted</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for at, part in enumerate(names):
        x, y = 16 + at % _IN_LINE * (width - 16) // _IN_LINE, 14 + at // _IN_LINE * _LEGEND
        sizes = [parts.get(part, 0.0) for parts in memories.values()]
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLORS[part]}"/>')
        lines.append(_text(x + 20, y + 12, f"{part} {_range(sizes)} GB"))
    limit = _LEFT + gpu.memory * scale
    lines.append(
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{top - 12}" y2="{height - 6}" stroke="#c0392b" '
        'stroke-width="1.5" stroke-dasharray="5 3"/>'
    )
    of_gpu = f"{gpu.name}: {gpu.memory / 1e9:g} GB"
    lines.append(_text(limit, top - 17, of_gpu, 'text-anchor="end" fill="#c0392b"'))
    for row, (name, one) in enumerate(planned.items()):
        lines += _bar(name, one, names, scale, top + row * _ROW)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _in_order(memories: Mapping[str, Mapping[str, float]]) -> list[str]:
    """All parts: those of every device as they are listed everywhere, then a teacher and the reserve."""
    return list(dict.fromkeys([*PARTS, *(part for parts in memories.values() for part in parts)]))


def _bar(name: str, one: Planned, names: list[str], scale: float, y: int) -> list[str]:
    lines = [_text(_LEFT - 8, y + 17, name, 'text-anchor="end" font-weight="bold"')]
    x = float(_LEFT)
    for part in names:
        size = one.memory.parts.get(part, 0.0)
        width = size * scale
        number = f"{size / 1e9:.3g}"
        lines.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_HEIGHT}" fill="{_COLORS[part]}">'
            f"<title>{escape(f'{name}: {part} {number} GB')}</title></rect>"
        )
        if width > _CHARACTER * (len(number) + 1):
            color = "#fff" if part in ("weights", "optimizer", "workspace", "teacher") else "#222"
            lines.append(_text(x + width / 2, y + 17, number, f'text-anchor="middle" fill="{color}"'))
        x += width
    lines.append(_text(x + 6, y + 17, f"{one.memory.total / 1e9:.1f} GB", 'font-weight="bold"'))
    lines.append(_text(_LEFT, y + _HEIGHT + 14, str(one.layout), 'font-size="11" fill="#555"'))
    return lines


def _range(sizes: list[float]) -> str:
    least, most = (f"{size / 1e9:.3g}" for size in (min(sizes), max(sizes)))
    return most if least == most else f"{least} to {most}"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'.replace(" >", ">")
