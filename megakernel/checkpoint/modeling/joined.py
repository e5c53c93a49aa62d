"""The text of `modeling_megakernel.py`: the parts of this package that a model needs, joined into one file."""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path(__file__).parent

PARTS = {
    "softmax": "softmax",
    "local": "local",
    "kernel": "kernel_attention",
    "flurka": "flurka",
    "decaying_flurka": "decaying_flurka",
    "gated_state": "gated_states",
}
"""`kind` of a mechanism -> the part that implements it."""

MAPS = {
    **dict.fromkeys(("elu", "relu", "identity"), "plain_features"),
    "hedgehog": "hedgehog",
    **dict.fromkeys(("favor", "rff"), "random_features"),
}
"""Name of a feature map -> the part that implements it."""

_HEADER = '''# SPDX-License-Identifier: Apache-2.0
# Written by megakernel {version}, with the mechanisms {kinds}.
"""A causal language model for `transformers`: load it with `trust_remote_code=True`."""

{imports}'''


def joined_code(kinds: Iterable[str], more: Iterable[str], version: str) -> str:
    """The parts that layers with mechanisms of these `kinds` need, each after those that it imports.

    more: names of other parts that they need, such as rope_scaling.
    """
    kinds = sorted(set(kinds))
    order: list[str] = []
    for part in ("configuration", "cache", *more, *(PARTS[kind] for kind in kinds), "decoder"):
        _add(part, order)
    imports: dict[str, set[str]] = {}
    bodies = [_body(part, imports) for part in order]
    header = _HEADER.format(kinds=", ".join(kinds), version=version, imports=_import_lines(imports))
    return header + "\n" + "\n".join(f"\n{body}\n" for body in bodies)


def _add(part: str, order: list[str]) -> None:
    """Add a part to `order`, after the parts that it imports."""
    if part in order:
        return
    for statement in _tree(part).body:
        if isinstance(statement, ast.ImportFrom) and statement.level:
            _add(str(statement.module), order)
    order.append(part)


def _text(part: str) -> str:
    return (_FOLDER / f"{part}.py").read_text(encoding="utf-8")


def _tree(part: str) -> ast.Module:
    return ast.parse(_text(part))


def _body(part: str, imports: dict[str, set[str]]) -> str:
    """A part's text without its docstring and imports; the latter are added to `imports`."""
    last = 0
    for statement in _tree(part).body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                imports.setdefault(f"import {_written(alias)}", set())
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names if not statement.level else ():
                # ruff gives a renamed name a line of its own.
                line = f"from {statement.module}" + (" " if alias.asname else "")
                imports.setdefault(line, set()).add(_written(alias))
        elif last:
            break
        last = statement.end_lineno or 0
    return "\n".join(_text(part).splitlines()[last:]).strip("\n")


def _written(alias: ast.alias) -> str:
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"


def _import_lines(imports: dict[str, set[str]]) -> str:
    """The imports as ruff sorts them: the standard library first, whole modules before names."""
    groups: tuple[list[str], list[str]] = ([], [])
    for line in sorted(imports, key=str.lower):
        kind, module, *_ = line.split()
        names = sorted(imports[line], key=_order)
        is_other = module.partition(".")[0] not in sys.stdlib_module_names
        groups[is_other].append(line if kind == "import" else f"{line.strip()} import {', '.join(names)}")
    ordered = ("\n".join(sorted(group, key=lambda line: line.startswith("from"))) for group in groups)
    return "\n\n".join(filter(None, ordered))


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2), name
