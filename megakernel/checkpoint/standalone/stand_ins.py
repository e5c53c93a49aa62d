"""Replacements of parts of this package in an exported model, which runs in one process with torch alone.

The package itself never uses them: `code.py` puts them into the exported code file.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from megakernel.attention.heads import ALL_HEADS, HeadShard
from megakernel.attention.sequence import WHOLE_SEQUENCE, ContextParallelShard
from megakernel.config.errors import UserError
from megakernel.ops.dispatch import in_own_dtypes


class Section:
    """A group of keys of config.json. Their values were validated when the model was exported."""

    def __init__(self, **keys: Any):
        kinds = get_type_hints(type(self))
        for name in (*keys, *kinds):
            if name not in kinds:
                raise UserError(f"config.json: {name} is no key of {type(self).__name__}; remove it")
            if name not in keys and not hasattr(type(self), name):
                raise UserError(f"config.json: {name} of {type(self).__name__} is missing; add it")
            value = _convert(kinds[name], keys[name]) if name in keys else getattr(type(self), name)
            setattr(self, name, value)


S = TypeVar("S", bound=Section)


def _convert(kind: Any, value: Any) -> Any:
    """Convert a value of config.json; an object becomes the section among those of the type that has its `kind`."""
    if isinstance(value, list):
        return [_convert(kind, item) for item in value]
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
    """Build the section from these keys. Raises UserError for unknown or missing ones."""
    return kind(**value)


class OneProcess:
    """The mesh of a single process."""

    softmax_exchange: Literal["auto"] = "auto"
    tp = None

    def new_cp_shard(self) -> ContextParallelShard:
        """Return the shard that is the whole sequence."""
        return WHOLE_SEQUENCE


def head_shard(tp: None) -> HeadShard:
    """Return all heads."""
    return ALL_HEADS


def replicated(parameter: Tensor, group: None) -> Tensor:
    """Return the parameter itself."""
    return parameter


def choose(implementations: Mapping[str, Callable[..., Any]], backend: str | None) -> Callable[..., Any]:
    """Choose an op's chunked implementation, which runs on any device; the package also has Triton kernels.

    `Trainer(bf16=True)` computes under autocast, which the op does not take part in.
    """
    return in_own_dtypes(implementations["chunked"])


def absent(attention: Any) -> Any:
    """Stand in for a mechanism that the exported model does not have: raise UserError."""
    raise UserError(
        "config.json has attention that no layer had when this was exported; export the run again"
    )


def mean_loss(*_: Any) -> Tensor:
    """Not available: the chunked loss is the package's; an exported model computes its loss from `labels`."""
    raise NotImplementedError("call the model with labels")


def code_of(section: Any) -> str:
    """Return the text of this file."""
    return Path(__file__).read_text(encoding="utf-8")
