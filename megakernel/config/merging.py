"""Laying one tree of keys over another."""

from collections.abc import Mapping
from typing import Any


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it: mappings merge key by key, every other value replaces."""
    out = dict(base)
    for key, item in changes.items():
        under = out.get(key)
        out[key] = merged(under, item) if isinstance(item, Mapping) and isinstance(under, Mapping) else item
    return out
