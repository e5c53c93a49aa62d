"""Modules of this package as text with syntax trees: resolution of their names, and edits of their text."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import megakernel

PACKAGE = megakernel.__name__
_ROOT = Path(str(megakernel.__file__)).parent


def file_of(module: str) -> Path | None:
    """The file of a module of this package, found without importing it; None if there is none."""
    place = _ROOT.joinpath(*module.split(".")[1:])
    return next((x for x in (place / "__init__.py", place.with_suffix(".py")) if x.is_file()), None)


class Edit(NamedTuple):
    """Replacement of the bytes `start` to `end` of a module with `text`."""

    start: int
    end: int
    text: bytes = b""


class Definition(NamedTuple):
    """A name defined in a module, of this package or of another library."""

    module: str
    name: str
    """Empty for the module itself."""

    @property
    def in_package(self) -> bool:
        """Whether it belongs to this package."""
        return self.module.partition(".")[0] == PACKAGE


@dataclass
class Source:
    """The source of a module, which is parsed and not run."""

    name: str
    content: bytes
    is_package: bool = False
    edits: list[Edit] = field(default_factory=list)

    @classmethod
    def of(cls, name: str) -> "Source":
        """Read the module of this name."""
        file = file_of(name)
        assert file is not None, name
        return cls(name, file.read_bytes(), file.name == "__init__.py")

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree, which folding changes."""
        return ast.parse(self.content)

    @cached_property
    def _lines(self) -> list[int]:
        ends = [match.end() for match in re.finditer(rb"\n", self.content)]
        return [0, *ends]

    def line(self, number: int) -> int:
        """Byte offset at which a line, counted from 1, starts; the end of the text for the line after the last."""
        return self._lines[number - 1] if number <= len(self._lines) else len(self.content)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Byte offsets of the start and the end of a node."""
        place: ast.expr = node  # type: ignore[assignment]
        assert place.end_lineno is not None
        assert place.end_col_offset is not None
        start = self._lines[place.lineno - 1] + place.col_offset
        return start, self._lines[place.end_lineno - 1] + place.end_col_offset

    def lines_of(self, node: ast.AST) -> tuple[int, int]:
        """The same for a node's whole lines, with its decorators and the comments directly above."""
        statement: ast.stmt = node  # type: ignore[assignment]
        first = min([statement.lineno, *(x.lineno for x in getattr(statement, "decorator_list", ()))])
        while first > 1 and self.content[self.line(first - 1) : self.line(first)].lstrip().startswith(b"#"):
            first -= 1
        assert statement.end_lineno is not None
        return self.line(first), self.line(statement.end_lineno + 1)

    def drop(self, start: int, end: int) -> None:
        """Remove these bytes."""
        self.edits.append(Edit(start, end))

    def text(self, start: int, end: int) -> str:
        """These bytes with all edits applied; an edit inside of another has no effect."""
        parts, place = [], start
        for edit in sorted(self.edits, key=lambda edit: (edit.start, -edit.end)):
            if edit.end <= place or edit.start >= end or (edit.start < place and edit.text):
                continue
            parts += [self.content[place : max(edit.start, place)], edit.text]
            place = edit.end
        parts.append(self.content[place:end])
        return b"".join(parts).decode()

    @cached_property
    def statements(self) -> dict[str, ast.stmt]:
        """Name -> the top-level statement that defines it."""
        definitions: dict[str, ast.stmt] = {}
        for statement in self.tree.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                definitions[statement.name] = statement
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    names = (part for part in ast.walk(target) if isinstance(part, ast.Name))
                    definitions |= {name.id: statement for name in names}
        return definitions

    @cached_property
    def imports(self) -> dict[str, Definition]:
        """Name -> the definition that the module imports by it, also under TYPE_CHECKING."""
        imports: dict[str, Definition] = {}
        for statement in _outside_functions(self.tree.body):
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    imports[alias.asname or whole] = Definition(whole, "")
            elif isinstance(statement, ast.ImportFrom):
                module = self._absolute(statement)
                names = {alias.asname or alias.name: alias.name for alias in statement.names}
                imports |= {known: Definition(module, name) for known, name in names.items()}
        return imports

    def _absolute(self, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        above = self.name.split(".")
        above = above[: len(above) - statement.level + self.is_package]
        return ".".join([*above, *([statement.module] if statement.module else [])])


def _outside_functions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            yield from _outside_functions(statement.body)
        else:
            yield statement


@dataclass
class Reference:
    """A use of a module's name, as opposed to a local variable."""

    node: ast.Name | ast.Attribute
    local_names: frozenset[str]
    """Names of the local variables at that place."""

    at_import: bool
    """Whether the name is looked up during the import of the module."""

    in_fstring: bool
    """Whether it is in an f-string; before Python 3.12 its position in the text is unknown."""


def references(node: ast.AST) -> list[Reference]:
    """The uses of a module's names, and of their attributes, in a statement; not of names bound inside of it."""
    visitor = _Visitor()
    visitor.visit(node)
    return visitor.found


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Reference] = []
        self.scopes: list[tuple[frozenset[str], bool]] = []
        """Names of each scope, innermost last, and whether it is a class, whose names its methods do not see."""

        self.function_depth = self.fstring_depth = 0

    def _local_names(self) -> frozenset[str]:
        inner = len(self.scopes) - 1
        seen = (
            names for place, (names, is_class) in enumerate(self.scopes) if not is_class or place == inner
        )
        return frozenset().union(*seen)

    def _add(self, node: ast.Name | ast.Attribute) -> None:
        first = node.value if isinstance(node, ast.Attribute) else node
        assert isinstance(first, ast.Name)
        local_names = self._local_names()
        if first.id not in local_names:
            self.found.append(Reference(node, local_names, self.function_depth == 0, self.fstring_depth > 0))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._add(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self._add(node)
        else:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.fstring_depth += 1
        self.generic_visit(node)
        self.fstring_depth -= 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.scopes.append((frozenset(_bound(node.body)), True))
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        if node.returns is not None:
            self.visit(node.returns)
        self._function(node.args, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node.args, [node.body])

    def _function(self, arguments: ast.arguments, body: list) -> None:
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        listed += [x for x in (arguments.vararg, arguments.kwarg) if x is not None]
        for part in (*arguments.defaults, *arguments.kw_defaults, *(x.annotation for x in listed)):
            if part is not None:
                self.visit(part)
        self.scopes.append((frozenset({x.arg for x in listed} | _bound(body)), False))
        self.function_depth += 1
        for statement in body:
            self.visit(statement)
        self.function_depth -= 1
        self.scopes.pop()

    def _comprehension(self, node: ast.AST) -> None:
        self.scopes.append((frozenset(_bound([x.target for x in getattr(node, "generators", ())])), False))
        self.generic_visit(node)
        self.scopes.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


def _bound(body: list) -> set[str]:
    """Names that statements bind, without those bound in nested functions and comprehensions."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            inner = (part.target for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
            names |= {target.id for target in inner}
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        waiting.extend(ast.iter_child_nodes(node))
    return names
