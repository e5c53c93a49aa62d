"""What takes the place of parts of this package in an exported model: it has one process, and torch alone.

Never used by the package itself: `code.py` puts these into the file that an export carries.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from megakernel.attention.heads import ALL_HEADS, HeadShard
from megakernel.attention.sequence import WHOLE, ContextParallelShard
from megakernel.config.errors import UserError


class Section:
    """A group of keys of config.json. What they say was checked when the model was exported."""

    def __init__(self, **keys: Any):
        kinds = get_type_hints(type(self))
        for name in (*keys, *kinds):
            if name not in kinds:
                raise UserError(f"config.json: {name} is no key of {type(self).__name__}; remove it")
            if name not in keys and not hasattr(type(self), name):
                raise UserError(f"config.json: {name} of {type(self).__name__} is missing; add it")
            value = _read(kinds[name], keys[name]) if name in keys else getattr(type(self), name)
            setattr(self, name, value)


S = TypeVar("S", bound=Section)


def _read(kind: Any, value: Any) -> Any:
    """A value of config.json: of a section, the one of its sections that has such a `kind`."""
    if isinstance(value, list):
        return [_read(kind, item) for item in value]
    if not isinstance(value, dict):
        return value
    sections = list(_sections(kind))
    fitting = [section for section in sections if value.get("kind") in _kinds(section)] or sections
    return fitting[0](**value)


def _sections(kind: Any) -> list[type[Section]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        return [kind]
    return [section for part in get_args(kind) for section in _sections(part)]


def _kinds(section: type[Section]) -> tuple[Any, ...]:
    kind = get_type_hints(section).get("kind")
    return get_args(kind) if get_origin(kind) is Literal else ()


def validate_section(kind: type[S], value: Mapping[str, Any], name: str = "") -> S:
    """The section of these keys. UserError: unknown or missing ones."""
    return kind(**value)


class OneProcess:
    """Where the model stands among other processes: there are none."""

    softmax_exchange: Literal["auto"] = "auto"
    tp = None

    def new_cp_shard(self) -> ContextParallelShard:
        """The whole sequence."""
        return WHOLE


def head_shard(tp: None) -> HeadShard:
    """All heads."""
    return ALL_HEADS


def replicated(parameter: Tensor, group: None) -> Tensor:
    """The parameter itself."""
    return parameter


def choose(implementations: Mapping[str, Callable[..., Any]], backend: str | None) -> Callable[..., Any]:
    """The form of an op for any device; the package has kernels besides."""
    return implementations["chunked"]


def absent(form: Any) -> Any:
    """In place of a mechanism that the exported model does not have."""
    raise UserError(
        "config.json has attention that no layer had when this was exported; export the run again"
    )


def mean_loss(*_: Any) -> Tensor:
    """The package trains with a loss in chunks; here `labels` give it."""
    raise NotImplementedError("call the model with labels")


def code_of(section: Any) -> str:
    """This file."""
    return Path(__file__).read_text(encoding="utf-8")
