"""Flattening of everything that some classes need, from the modules of this package, into one file.

The units are whole functions, classes and assignments of modules. A class keeps the methods whose names are used
somewhere, and those that another library may call. Names that two modules use for different things are renamed.
"""

import ast
import builtins
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from .sources import Definition, Edit, Reference, Source, file_of, references


@dataclass
class _Unit:
    """A reached statement at the top level of a module."""

    source: Source
    statement: ast.stmt
    names: list[str]
    references: list[Reference] = field(default_factory=list)


class Flattening:
    """Collects what definitions need, then writes it as one text."""

    def __init__(
        self,
        prepare: Callable[[Source], None],
        stand_ins: Mapping[Definition, Definition],
        whole: Collection[str],
        libraries: Collection[str],
    ):
        """prepare: edits a module before it is analyzed.

        stand_ins: definition -> its replacement. whole: classes that keep every method. libraries: those that may be
        imported besides the standard library.
        """
        self._prepare, self._stand_ins, self._whole, self._libraries = prepare, stand_ins, whole, libraries
        self._sources: dict[str, Source] = {}
        self._units: list[_Unit] = []
        self._reached: set[Definition] = set()
        self._external: dict[Definition, str] = {}
        """Definition from another library -> the name by which it was first imported."""

        self._used_names: set[str] = set()
        self._unused_methods: list[tuple[_Unit, ast.FunctionDef]] = []
        """Methods whose names have not been used yet."""

    def add(self, source: Source) -> None:
        """Add a generated module that has no file."""
        self._prepare(source)
        self._sources[source.name] = source

    def collect(self, roots: Iterable[Definition]) -> None:
        """Collect the roots and everything that they need."""
        waiting = [self._resolve(root, "") for root in roots]
        while waiting:
            while waiting:
                definition = waiting.pop()
                if definition.in_package and definition not in self._reached:
                    waiting += self._collect(definition)
            for unit, method in list(self._unused_methods):
                if method.name in self._used_names:
                    self._unused_methods.remove((unit, method))
                    waiting += self._record(unit, method, in_class=True)
        for unit, method in self._unused_methods:
            unit.source.drop(*unit.source.lines_of(method))

    def _source(self, module: str) -> Source:
        if module not in self._sources:
            source = self._sources[module] = Source.of(module)
            self._prepare(source)
        return self._sources[module]

    def _resolve(self, definition: Definition, alias: str) -> Definition:
        """Resolve a name to its definition, through imports and stand-ins."""
        while True:
            definition = self._stand_ins.get(definition, definition)
            if not definition.in_package:
                self._external.setdefault(definition, alias)
                return definition
            source = self._source(definition.module)
            if not definition.name or definition.name in source.statements:
                return definition
            imported = source.imports.get(definition.name, definition)
            if imported != definition:
                definition = imported
            else:
                inner = f"{definition.module}.{definition.name}"
                assert file_of(inner) is not None, f"{definition.module} has no {definition.name}"
                return Definition(inner, "")

    def _collect(self, definition: Definition) -> list[Definition]:
        assert definition.name, f"{definition.module} is used as a whole; import what is needed from it"
        source = self._source(definition.module)
        statement = source.statements[definition.name]
        names = [name for name, made_by in source.statements.items() if made_by is statement]
        self._reached |= {Definition(source.name, name) for name in names}
        unit = _Unit(source, statement, names)
        self._units.append(unit)
        if not isinstance(statement, ast.ClassDef):
            return self._record(unit, statement)
        methods = [x for x in statement.body if isinstance(x, ast.FunctionDef)]
        kept = [x for x in methods if self._may_be_called(source, statement, x)]
        self._unused_methods += [(unit, x) for x in methods if x not in kept]
        shell = ast.ClassDef(**dict(ast.iter_fields(statement)))
        shell.body = [x for x in statement.body if x not in methods]
        needed = self._record(unit, shell)
        for method in kept:
            needed += self._record(unit, method, in_class=True)
        return needed

    def _may_be_called(self, source: Source, kind: ast.ClassDef, method: ast.FunctionDef) -> bool:
        """Whether Python or the library of a base class may call a method, so that it is kept even if never named."""
        name = method.name
        if kind.name in self._whole or (name.startswith("__") and name.endswith("__")):
            return True
        real = getattr(import_module(source.name), kind.name)
        outside = (base for base in real.__mro__ if not base.__module__.startswith("megakernel"))
        return any(name in vars(base) for base in outside)

    def _record(self, unit: _Unit, node: ast.AST, in_class: bool = False) -> list[Definition]:
        """Record the names in a node; return the definitions that they need."""
        for part in ast.walk(node):
            if isinstance(part, ast.Import | ast.ImportFrom):
                needed = part.module if isinstance(part, ast.ImportFrom) else part.names[0].name
                self._check_library(needed or "", f"{unit.source.name}.{unit.names[0]}")
            elif isinstance(part, ast.Attribute):
                self._used_names.add(part.attr)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
                self._used_names.add(part.value)  # of getattr, or a quoted annotation
        uses = references(node)
        unit.references += uses
        targets = (self._target(unit.source, reference) for reference in uses)
        return [target for target in targets if target is not None]

    def _target(self, source: Source, reference: Reference) -> Definition | None:
        """The definition that a reference names; None for builtins."""
        node = reference.node
        if isinstance(node, ast.Name):
            return self._resolve_name(source, node.id)
        assert isinstance(node.value, ast.Name)
        first = self._resolve_name(source, node.value.id)
        if first is not None and first.in_package and not first.name:
            return self._resolve(Definition(first.module, node.attr), node.attr)
        return first

    def _resolve_name(self, source: Source, name: str) -> Definition | None:
        if name in source.statements:
            return self._resolve(Definition(source.name, name), name)
        if name in source.imports:
            return self._resolve(source.imports[name], name)
        assert name == "__file__" or hasattr(builtins, name), f"{source.name}: {name} is not defined there"
        return None

    # The text.

    def text(self, header: str) -> str:
        """The flattened file: imports, then modules in an order in which each can be executed."""
        modules = self._module_order()
        names = self._unique_names(modules)
        for unit in self._units:
            self._rename(unit, names)
        parts = [header, self._imports(names)]
        for module in modules:
            units = [unit for unit in self._units if unit.source.name == module]
            suffix = "/__init__.py" if self._sources[module].is_package else ".py"
            parts.append(f"# {module.replace('.', '/')}{suffix}")
            parts += (self._text_of(unit) for unit in sorted(units, key=lambda x: x.statement.lineno))
        return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"

    def _text_of(self, unit: _Unit) -> str:
        source, start = unit.source, unit.source.lines_of(unit.statement)[0]
        body = source.tree.body
        last: ast.stmt = unit.statement
        following = body[body.index(last) + 1 : body.index(last) + 2]
        if not isinstance(last, ast.FunctionDef | ast.ClassDef) and following:
            (docstring,) = following
            if isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant):
                last = docstring
        assert last.end_lineno is not None
        text = source.text(start, source.line(last.end_lineno + 1))
        while "\n\n\n" in text:
            text = text.replace("\n\n\n", "\n\n")
        return text

    def _module_order(self) -> list[str]:
        needs: dict[str, set[str]] = defaultdict(set)
        for unit in self._units:
            for reference in unit.references:
                target = self._target(unit.source, reference)
                if reference.at_import and target is not None and target.in_package:
                    needs[unit.source.name].add(target.module)
        ordered: list[str] = []
        in_progress: set[str] = set()

        def visit(module: str) -> None:
            if module in ordered:
                return
            assert module not in in_progress, f"{module} needs itself while it is imported"
            in_progress.add(module)
            for needed in sorted(needs[module] - {module}):
                visit(needed)
            ordered.append(module)

        for module in sorted({unit.source.name for unit in self._units}):
            visit(module)
        return ordered

    def _unique_names(self, modules: list[str]) -> dict[Definition, str]:
        """Every collected definition -> its unique name in the file."""
        local: dict[Definition, set[str]] = defaultdict(set)
        pinned: set[Definition] = set()
        for unit in self._units:
            for reference in unit.references:
                target = self._target(unit.source, reference)
                if target is not None:
                    local[target] |= reference.local_names
                    if reference.in_fstring and (target.in_package or isinstance(reference.node, ast.Name)):
                        pinned.add(target)
        ours = [
            Definition(unit.source.name, name)
            for module in modules
            for unit in self._units
            if unit.source.name == module
            for name in unit.names
        ]
        used = {target for target in local if not target.in_package}
        names: dict[Definition, str] = {}
        for definition in [*sorted(used), *sorted(ours, key=lambda x: (x not in pinned, ours.index(x)))]:
            wanted = self._external[definition] if not definition.in_package else definition.name
            taken = {*names.values(), *local[definition], *(dir(builtins) if definition.in_package else ())}
            chosen = next(name for name in _candidates(definition.module, wanted) if name not in taken)
            assert chosen == wanted or definition not in pinned, f"{definition} is named in an f-string"
            names[definition] = chosen
        return names

    def _rename(self, unit: _Unit, names: Mapping[Definition, str]) -> None:
        source = unit.source
        for reference in unit.references:
            target = self._target(source, reference)
            if target is None or reference.in_fstring:
                continue
            node: ast.expr = reference.node
            if isinstance(node, ast.Attribute):
                assert isinstance(node.value, ast.Name)
                first = self._resolve_name(source, node.value.id)
                if first == target:  # an attribute of another library's name stays as it is
                    node = node.value
            self._write(source, node, names[target])
        statement = unit.statement
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            name = names[Definition(source.name, statement.name)]
            start = source.span(statement)[0]
            place = source.content.index(statement.name.encode(), start + 4)
            source.edits.append(Edit(place, place + len(statement.name.encode()), name.encode()))
        else:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]  # type: ignore[attr-defined]
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Name):
                    self._write(source, part, names[Definition(source.name, part.id)])
        self._rename_quoted(unit, names)

    @staticmethod
    def _write(source: Source, node: ast.expr, name: str) -> None:
        start, end = source.span(node)
        if source.content[start:end] != name.encode():
            source.edits.append(Edit(start, end, name.encode()))

    def _rename_quoted(self, unit: _Unit, names: Mapping[Definition, str]) -> None:
        """Rename names in quoted annotations, and remove those that the file does not have."""
        for node in ast.walk(unit.statement):
            for place in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if isinstance(place, ast.Constant) and isinstance(place.value, str):
                    known = []
                    for part in place.value.split(" | "):
                        target = None
                        if part in unit.source.statements or part in unit.source.imports:
                            target = self._resolve_name(unit.source, part)
                        name = names.get(target, "") if target is not None else part
                        if name and name not in known:
                            known.append(name)
                    text = f'"{" | ".join(known) or "object"}"'
                    self._write(unit.source, place, text)

    def _imports(self, names: Mapping[Definition, str]) -> str:
        whole, parts = [], defaultdict(list)
        for definition, name in names.items():
            if definition.in_package:
                continue
            self._check_library(definition.module, ", ".join(self._users(definition)))
            if not definition.name:
                whole.append(
                    f"import {definition.module}" + ("" if name == definition.module else f" as {name}")
                )
            else:
                alias = "" if name == definition.name else f" as {name}"
                parts[definition.module].append(definition.name + alias)
        lines = sorted(whole) + [
            f"from {module} import {', '.join(sorted(parts[module]))}" for module in sorted(parts)
        ]
        standard = [x for x in lines if x.split()[1].partition(".")[0] in sys.stdlib_module_names]
        return "\n".join([*standard, "", *(x for x in lines if x not in standard)])

    def _check_library(self, module: str, by: str) -> None:
        library = module.partition(".")[0]
        known = library in sys.stdlib_module_names or library in self._libraries
        assert known, f"{by} would be exported and needs {module}; exclude it in code.py"

    def _users(self, definition: Definition) -> list[str]:
        return [
            f"{unit.source.name}.{unit.names[0]}"
            for unit in self._units
            if any(self._target(unit.source, x) == definition for x in unit.references)
        ]


def _candidates(module: str, name: str) -> Iterable[str]:
    """The name, then the name prefixed with more and more parts of its module's name."""
    yield name
    prefix, bare = ("_", name[1:]) if name.startswith("_") else ("", name)
    parts = module.split(".")[1:]
    for count in range(1, len(parts) + 1):
        before = "_".join(parts[-count:])
        if bare[0].isupper() and not bare.isupper():
            yield prefix + "".join(x.capitalize() for x in before.split("_")) + bare
        else:
            yield prefix + (before.upper() if bare.isupper() else before) + "_" + bare
