"""One file of everything that some classes need, out of the modules of this package that hold it.

What is reached is a whole function, class or assignment of a module; of a class, the methods whose names are used
somewhere and those that another library may call. Names that two modules use for different things get new ones.
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
    """A statement of a module that is reached."""

    source: Source
    statement: ast.stmt
    names: list[str]
    references: list[Reference] = field(default_factory=list)


class Flattening:
    """Follows what definitions need, then writes it as one text."""

    def __init__(
        self,
        prepare: Callable[[Source], None],
        stand_ins: Mapping[Definition, Definition],
        whole: Collection[str],
        libraries: Collection[str],
    ):
        """prepare: changes a module before it is looked at.

        stand_ins: what takes the place of a definition. whole: classes that keep every method. libraries: those that
        may be imported besides Python's own.
        """
        self._prepare, self._stand_ins, self._whole, self._libraries = prepare, stand_ins, whole, libraries
        self._sources: dict[str, Source] = {}
        self._units: list[_Unit] = []
        self._reached: set[Definition] = set()
        self._others: dict[Definition, str] = {}
        """What comes from other libraries -> its name where it was met first."""

        self._attributes: set[str] = set()
        self._late: list[tuple[_Unit, ast.FunctionDef]] = []
        """Methods whose names nobody has used yet."""

    def add(self, source: Source) -> None:
        """Know a module that is no file."""
        self._prepare(source)
        self._sources[source.name] = source

    def reach(self, roots: Iterable[Definition]) -> None:
        """These, and all they need."""
        waiting = [self._found(root, "") for root in roots]
        while waiting:
            while waiting:
                definition = waiting.pop()
                if definition.is_own and definition not in self._reached:
                    waiting += self._reach(definition)
            for unit, method in list(self._late):
                if method.name in self._attributes:
                    self._late.remove((unit, method))
                    waiting += self._read(unit, method, in_class=True)
        for unit, method in self._late:
            unit.source.drop(*unit.source.lines_of(method))

    def _source(self, module: str) -> Source:
        if module not in self._sources:
            source = self._sources[module] = Source.of(module)
            self._prepare(source)
        return self._sources[module]

    def _found(self, definition: Definition, alias: str) -> Definition:
        """Where a name is defined, behind what imports it and what stands in for it."""
        while True:
            definition = self._stand_ins.get(definition, definition)
            if not definition.is_own:
                self._others.setdefault(definition, alias)
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

    def _reach(self, definition: Definition) -> list[Definition]:
        assert definition.name, f"{definition.module} is used as a whole; name what is needed of it"
        source = self._source(definition.module)
        statement = source.statements[definition.name]
        names = [name for name, made_by in source.statements.items() if made_by is statement]
        self._reached |= {Definition(source.name, name) for name in names}
        unit = _Unit(source, statement, names)
        self._units.append(unit)
        if not isinstance(statement, ast.ClassDef):
            return self._read(unit, statement)
        methods = [x for x in statement.body if isinstance(x, ast.FunctionDef)]
        kept = [x for x in methods if self._may_be_called(source, statement, x)]
        self._late += [(unit, x) for x in methods if x not in kept]
        shell = ast.ClassDef(**dict(ast.iter_fields(statement)))
        shell.body = [x for x in statement.body if x not in methods]
        needed = self._read(unit, shell)
        for method in kept:
            needed += self._read(unit, method, in_class=True)
        return needed

    def _may_be_called(self, source: Source, kind: ast.ClassDef, method: ast.FunctionDef) -> bool:
        """Whether a class keeps a method whoever names it: Python or the library of a base calls it."""
        name = method.name
        if kind.name in self._whole or (name.startswith("__") and name.endswith("__")):
            return True
        real = getattr(import_module(source.name), kind.name)
        outside = (base for base in real.__mro__ if not base.__module__.startswith("megakernel"))
        return any(name in vars(base) for base in outside)

    def _read(self, unit: _Unit, node: ast.AST, in_class: bool = False) -> list[Definition]:
        """Note what a node names; what that needs."""
        for part in ast.walk(node):
            if isinstance(part, ast.Import | ast.ImportFrom):
                needed = part.module if isinstance(part, ast.ImportFrom) else part.names[0].name
                self._check_library(needed or "", f"{unit.source.name}.{unit.names[0]}")
            elif isinstance(part, ast.Attribute):
                self._attributes.add(part.attr)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
                self._attributes.add(part.value)  # of getattr, or a quoted annotation
        found = references(node)
        unit.references += found
        targets = (self._target(unit.source, reference) for reference in found)
        return [target for target in targets if target is not None]

    def _target(self, source: Source, reference: Reference) -> Definition | None:
        """What a reference names; None for Python's own functions."""
        node = reference.node
        if isinstance(node, ast.Name):
            return self._named(source, node.id)
        assert isinstance(node.value, ast.Name)
        first = self._named(source, node.value.id)
        if first is not None and first.is_own and not first.name:
            return self._found(Definition(first.module, node.attr), node.attr)
        return first

    def _named(self, source: Source, name: str) -> Definition | None:
        if name in source.statements:
            return self._found(Definition(source.name, name), name)
        if name in source.imports:
            return self._found(source.imports[name], name)
        assert name == "__file__" or hasattr(builtins, name), f"{source.name}: {name} is not defined there"
        return None

    # The text.

    def text(self, header: str) -> str:
        """All that was reached: imports, then modules in an order in which each finds what it needs at once."""
        modules = self._order()
        names = self._names(modules)
        for unit in self._units:
            self._rename(unit, names)
        parts = [header, self._imports(names)]
        for module in modules:
            units = [unit for unit in self._units if unit.source.name == module]
            title = (
                module.replace(".", "/") + ("/__init__" if self._sources[module].is_package else "") + ".py"
            )
            parts.append(f"# {title}")
            parts += (self._text_of(unit) for unit in sorted(units, key=lambda x: x.statement.lineno))
        return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"

    def _text_of(self, unit: _Unit) -> str:
        source, start = unit.source, unit.source.lines_of(unit.statement)[0]
        body = source.tree.body
        last: ast.stmt = unit.statement
        following = body[body.index(last) + 1 : body.index(last) + 2]
        if not isinstance(last, ast.FunctionDef | ast.ClassDef) and following:
            (said,) = following
            if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant):
                last = said
        assert last.end_lineno is not None
        text = source.text(start, source.line(last.end_lineno + 1))
        while "\n\n\n" in text:
            text = text.replace("\n\n\n", "\n\n")
        return text

    def _order(self) -> list[str]:
        needs: dict[str, set[str]] = defaultdict(set)
        for unit in self._units:
            for reference in unit.references:
                target = self._target(unit.source, reference)
                if reference.at_once and target is not None and target.is_own:
                    needs[unit.source.name].add(target.module)
        ordered: list[str] = []
        under_way: set[str] = set()

        def place(module: str) -> None:
            if module in ordered:
                return
            assert module not in under_way, f"{module} needs itself while it is imported"
            under_way.add(module)
            for needed in sorted(needs[module] - {module}):
                place(needed)
            ordered.append(module)

        for module in sorted({unit.source.name for unit in self._units}):
            place(module)
        return ordered

    def _names(self, modules: list[str]) -> dict[Definition, str]:
        """Everything reached -> its one name in the text."""
        hidden: dict[Definition, set[str]] = defaultdict(set)
        pinned: set[Definition] = set()
        for unit in self._units:
            for reference in unit.references:
                target = self._target(unit.source, reference)
                if target is not None:
                    hidden[target] |= reference.hidden
                    if reference.in_text and (target.is_own or isinstance(reference.node, ast.Name)):
                        pinned.add(target)
        own = [
            Definition(unit.source.name, name)
            for module in modules
            for unit in self._units
            if unit.source.name == module
            for name in unit.names
        ]
        used = {target for target in hidden if not target.is_own}
        names: dict[Definition, str] = {}
        for definition in [*sorted(used), *sorted(own, key=lambda x: (x not in pinned, own.index(x)))]:
            wanted = self._others[definition] if not definition.is_own else definition.name
            taken = {*names.values(), *hidden[definition], *(dir(builtins) if definition.is_own else ())}
            chosen = next(name for name in _candidates(definition.module, wanted) if name not in taken)
            assert chosen == wanted or definition not in pinned, f"{definition} is named in an f-string"
            names[definition] = chosen
        return names

    def _rename(self, unit: _Unit, names: Mapping[Definition, str]) -> None:
        source = unit.source
        for reference in unit.references:
            target = self._target(source, reference)
            if target is None or reference.in_text:
                continue
            node: ast.expr = reference.node
            if isinstance(node, ast.Attribute):
                assert isinstance(node.value, ast.Name)
                first = self._named(source, node.value.id)
                if first == target:  # its attribute stays as it is
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
        self._unquote(unit, names)

    @staticmethod
    def _write(source: Source, node: ast.expr, name: str) -> None:
        start, end = source.span(node)
        if source.content[start:end] != name.encode():
            source.edits.append(Edit(start, end, name.encode()))

    def _unquote(self, unit: _Unit, names: Mapping[Definition, str]) -> None:
        """Of quoted annotations, what the text knows."""
        for node in ast.walk(unit.statement):
            for place in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if isinstance(place, ast.Constant) and isinstance(place.value, str):
                    known = []
                    for part in place.value.split(" | "):
                        target = None
                        if part in unit.source.statements or part in unit.source.imports:
                            target = self._named(unit.source, part)
                        name = names.get(target, "") if target is not None else part
                        if name and name not in known:
                            known.append(name)
                    text = f'"{" | ".join(known) or "object"}"'
                    self._write(unit.source, place, text)

    def _imports(self, names: Mapping[Definition, str]) -> str:
        whole, parts = [], defaultdict(list)
        for definition, name in names.items():
            if definition.is_own:
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
        assert known, f"{by} would be exported and needs {module}; say in code.py what leaves it out"

    def _users(self, definition: Definition) -> list[str]:
        return [
            f"{unit.source.name}.{unit.names[0]}"
            for unit in self._units
            if any(self._target(unit.source, x) == definition for x in unit.references)
        ]


def _candidates(module: str, name: str) -> Iterable[str]:
    """A name, then the name behind ever more of its module's."""
    yield name
    prefix, bare = ("_", name[1:]) if name.startswith("_") else ("", name)
    parts = module.split(".")[1:]
    for count in range(1, len(parts) + 1):
        before = "_".join(parts[-count:])
        if bare[0].isupper() and not bare.isupper():
            yield prefix + "".join(x.capitalize() for x in before.split("_")) + bare
        else:
            yield prefix + (before.upper() if bare.isupper() else before) + "_" + bare
