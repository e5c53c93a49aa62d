"""Constant folding of source text: removes the branches that an exported model never takes.

The values of certain expressions are given; everything that depends only on them is evaluated here. The remaining text
is unchanged.
"""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .sources import Definition, Edit, Source

_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}


@dataclass(frozen=True)
class Known:
    """What is known about every module."""

    values: Mapping[str, Any]
    """Last parts of a dotted name, or a whole call -> its value."""

    entries: Collection[str]
    """Keys of dictionary entries that are removed."""

    tables: Mapping[str, Collection[str]]
    """Name of a module's table -> the entries to keep: keys of a dictionary, or last elements of tuples."""

    absent: Definition
    """Replaces the last element of all other tuples."""

    keywords: Mapping[str, Collection[str]]
    """Class -> fields that are removed, from the class and from the calls that construct it."""

    statements: Collection[str]
    """Functions whose calls are removed if they are statements."""

    methods: Collection[str]
    """Methods that are removed from all classes."""

    arguments: Collection[str]
    """Calls that are replaced with their first argument, because they only inform pydantic."""


def fold(source: Source, known: Known) -> None:
    """Fold the tree of a module, and record the corresponding edits of its text."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)]
    used = [_loads(node) for node in functions]
    _Folding(source, known).visit(source.tree)
    for function, before in zip(functions, used):
        _drop_unused(source, function, before)


def _loads(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}


def _drop_unused(source: Source, function: ast.FunctionDef, before: set[str]) -> None:
    """Remove local functions and variables that only removed code used."""
    while True:
        gone = before - _loads(function)
        unused = [x for x in function.body if (names := _assigned_names(x)) and names <= gone]
        if not unused:
            return
        for statement in unused:
            source.drop(*source.lines_of(statement))
            function.body.remove(statement)


def _assigned_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    if not isinstance(statement, ast.Assign):
        return set()
    parts = [part for target in statement.targets for part in ast.walk(target)]
    if not all(isinstance(x, ast.Name | ast.Tuple | ast.Store) for x in parts):
        return set()
    return {x.id for x in parts if isinstance(x, ast.Name)}


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


class _Folded(ast.Constant):
    """A constant that results from folding."""


class _Folding(ast.NodeTransformer):
    def __init__(self, source: Source, known: Known):
        self.source, self.known = source, known
        self._calls = {name.partition("(")[0] for name in known.values if "(" in name}

    def _constant(self, node: ast.expr, value: Any) -> ast.expr:
        folded = ast.copy_location(_Folded(value), node)
        self.source.edits.append(Edit(*self.source.span(node), repr(value).encode()))
        return folded

    def _replace(self, node: ast.expr, kept: ast.expr) -> ast.expr:
        """Replace `node` with its descendant `kept`."""
        start, end = self.source.span(node)
        first, last = self.source.span(kept)
        open_lines = kept.lineno != kept.end_lineno and isinstance(kept, ast.BinOp | ast.BoolOp | ast.Compare)
        self.source.edits.append(Edit(start, first, b"(" if open_lines else b""))
        self.source.edits.append(Edit(last, end, b")" if open_lines else b""))
        return kept

    # Expressions.

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = dotted(node)
        if isinstance(node.ctx, ast.Load) and name:
            parts = name.split(".")
            for first in range(len(parts)):
                if (last := ".".join(parts[first:])) in self.known.values:
                    return self._constant(node, self.known.values[last])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = dotted(node.func)
        if called in self.known.arguments:
            first = _default(node)
            return self.visit(self._replace(node, first)) if first is not None else node
        if called in self._calls and (whole := ast.unparse(node)) in self.known.values:
            return self._constant(node, self.known.values[whole])
        removed = self.known.keywords.get(called, ())
        for number, keyword in reversed(list(enumerate(node.keywords))):
            if keyword.arg in removed:
                spans = [self.source.span(part) for part in (*node.args, *node.keywords)]
                self._drop_item(node, spans, len(node.args) + number)
                del node.keywords[number]
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if dotted(node.value) in self.known.arguments and isinstance(node.slice, ast.Tuple):
            return self.visit(self._replace(node, node.slice.elts[0]))
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if len(sides) == 2 and type(node.ops[0]) in _COMPARED and any(isinstance(x, _Folded) for x in sides):
            left, right = sides
            if isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
                return self._constant(node, _COMPARED[type(node.ops[0])](left.value, right.value))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, _Folded):
            return self._constant(node, not node.operand.value)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        self.generic_visit(node)
        return self._constant(node, node.value.value) if isinstance(node.value, _Folded) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        deciding = isinstance(node.op, ast.Or)
        for value in node.values:
            if isinstance(value, _Folded) and bool(value.value) is deciding:
                return self._constant(node, value.value)
        unknown = [value for value in node.values if not isinstance(value, _Folded)]
        if len(unknown) == len(node.values):
            return node
        if not unknown:
            return self._constant(node, node.values[-1].value)  # type: ignore[attr-defined]
        assert len(unknown) == 1, ast.unparse(node)
        return self._replace(node, unknown[0])

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.test, _Folded):
            return node
        return self._replace(node, node.body if node.test.value else node.orelse)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self._drop_entries(node, lambda key: key not in self.known.entries)
        return self.generic_visit(node)

    def _drop_entries(self, node: ast.Dict, is_kept: Callable[[str], bool]) -> None:
        spans = [
            # `**value` has no key.
            (self.source.span(key)[0] if key else self.source.span(value)[0] - 2, self.source.span(value)[1])
            for key, value in zip(node.keys, node.values)
        ]
        for number, key in reversed(list(enumerate(node.keys))):
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and not is_kept(key.value):
                self._drop_item(node, spans, number)
                del node.keys[number], node.values[number], spans[number]

    def _drop_item(self, node: ast.expr, spans: list[tuple[int, int]], number: int) -> None:
        """Remove item `number` of the bracketed items of `node`, with a comma next to it."""
        start, end = spans[number]
        if number + 1 < len(spans):
            end = spans[number + 1][0]
        elif number:
            start = spans[number - 1][1]
        else:
            end = self.source.span(node)[1] - 1
        self.source.drop(start, end)

    # Statements.

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self._drop_rows(node.targets[0], node.value)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self._drop_rows(node.target, node.value)
        value = node.value
        of_checker = isinstance(value, ast.Call) and dotted(value.func) in self.known.arguments
        if isinstance(value, ast.Call) and of_checker and _default(value) is None:
            self.source.drop(self.source.span(node.annotation)[1], self.source.span(node)[1])
            node.value = None
        return self.generic_visit(node)

    def _drop_rows(self, target: ast.expr, value: ast.expr | None) -> None:
        kept = self.known.tables.get(dotted(target))
        if kept is None:
            return
        if isinstance(value, ast.Dict):
            self._drop_entries(value, lambda key: key in kept)
        elif isinstance(value, ast.Tuple):
            for row in value.elts:
                assert isinstance(row, ast.Tuple)
                if dotted(row.elts[-1]) not in kept:  # its condition stays, because rows are tried in order
                    row.elts[-1] = ast.copy_location(ast.Name("absent", ast.Load()), row.elts[-1])
                    self.source.imports["absent"] = self.known.absent

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        removed = self.known.keywords.get(node.name, ())
        for member, following in zip(list(node.body), [*node.body[1:], None]):
            if isinstance(member, ast.AnnAssign) and dotted(member.target) in removed:
                self._drop_statement(node.body, member)
                if isinstance(following, ast.Expr):  # the field's docstring
                    self._drop_statement(node.body, following)
            elif isinstance(member, ast.FunctionDef) and member.name in self.known.methods:
                self._drop_statement(node.body, member)
        return self._block(node)

    def _drop_statement(self, body: list[ast.stmt], statement: ast.stmt) -> None:
        self.source.drop(*self.source.lines_of(statement))
        body.remove(statement)

    def visit_If(self, node: ast.If) -> Any:
        node.test = self.visit(node.test)
        if not isinstance(node.test, _Folded):
            self._fold_body(node, "body")
            self._fold_body(node, "orelse")
            return node
        source, is_true = self.source, bool(node.test.value)
        start, end = source.line(node.lineno), source.line(_end(node) + 1)
        body_start = source.line(_end(node.test) + 1)
        kept = node.body if is_true else node.orelse
        if not kept:
            source.drop(source.lines_of(node)[0], end)
            return []
        if self._is_elif(node):
            if is_true:  # it becomes the `else`
                source.edits.append(Edit(source.span(node)[0], body_start, b"else:\n"))
                source.drop(source.line(_end(kept[-1]) + 1), end)
            elif self._is_elif(kept[0]):
                source.drop(start, source.line(kept[0].lineno))
            else:
                else_start = source.content.rindex(b"else:", start, source.line(kept[0].lineno))
                source.drop(start, source.content.rindex(b"\n", start, else_start) + 1)
            return self._fold_statements(kept)
        if is_true:
            source.drop(start, body_start)
            source.drop(source.line(_end(kept[-1]) + 1), end)
        elif self._is_elif(kept[0]):
            source.drop(start, source.line(kept[0].lineno))
            place = source.span(kept[0])[0]
            source.drop(place, place + 2)  # of `elif`
            return self._fold_statements(kept)
        else:
            body_start = source.line(kept[0].lineno)
            else_start = source.content.rindex(b"else:", start, body_start)
            body_start = source.content.index(b"\n", else_start) + 1
            source.drop(start, body_start)
        self._dedent(kept, body_start, node.col_offset)
        return self._fold_statements(kept)

    def _is_elif(self, node: ast.stmt) -> bool:
        place = self.source.span(node)[0]
        return isinstance(node, ast.If) and self.source.content[place : place + 4] == b"elif"

    def _dedent(self, kept: list[ast.stmt], start: int, column: int) -> None:
        inside = set()
        for statement in kept:
            for part in ast.walk(statement):
                if isinstance(part, ast.Constant | ast.JoinedStr) and isinstance(part, ast.expr):
                    inside |= set(range(part.lineno + 1, _end(part) + 1))
        width = kept[0].col_offset - column
        for number in range(1, _end(kept[-1]) + 1):
            place = self.source.line(number)
            indented = self.source.content[place : place + width] == b" " * width  # an empty line is not
            if place >= start and number not in inside and indented:
                self.source.drop(place, place + width)

    def _fold_statements(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        holder = ast.Module(list(statements), [])
        self._fold_body(holder, "body")
        return holder.body

    def _block(self, node: Any) -> Any:
        body, node.body = node.body, []
        self.generic_visit(node)
        node.body = body
        self._fold_body(node, "body")
        return node

    visit_FunctionDef = _block

    def _fold_body(self, node: Any, name: str) -> None:
        """Fold the statements of a block; remove what follows a return or raise that folding made unconditional."""
        kept: list[ast.stmt] = []
        statements: list[ast.stmt] = getattr(node, name)
        for number, statement in enumerate(statements):
            folded = self.visit(statement)
            kept += folded if isinstance(folded, list) else [folded] if folded is not None else []
            if kept and folded != [statement] and isinstance(kept[-1], ast.Return | ast.Raise):
                rest = statements[number + 1 :]
                if rest:
                    self.source.drop(self.source.lines_of(rest[0])[0], self.source.line(_end(rest[-1]) + 1))
                break
        if statements:
            where = f"{self.source.name}, line {statements[0].lineno}"
            assert kept, f"{where}: nothing is left of a block"
        setattr(node, name, kept)

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Call) and dotted(node.value.func) in self.known.statements:
            self.source.drop(*self.source.lines_of(node))
            return []
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        if isinstance(node.test, _Folded):
            self.source.drop(*self.source.lines_of(node))
            return []
        return node


def _default(call: ast.Call) -> ast.expr | None:
    """The first argument of a call, or its keyword argument `default`."""
    return next(iter([*call.args, *(x.value for x in call.keywords if x.arg == "default")]), None)


def _end(node: ast.AST) -> int:
    end: int = node.end_lineno  # type: ignore[attr-defined]
    return end
