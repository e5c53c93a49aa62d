"""The tags of a transfer's scalars: `transfer/NAME/layer_L/head_H`."""

import re
from typing import NamedTuple


class HeadTag(NamedTuple):
    """What is measured of which head."""

    name: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"transfer/{self.name}/layer_{self.layer}/head_{self.head}"

    @classmethod
    def parse(cls, tag: str) -> "HeadTag":
        """The reverse of `str`."""
        match = re.fullmatch(r"transfer/(.+)/layer_(\d+)/head_(\d+)", tag)
        assert match, tag
        return cls(match[1], int(match[2]), int(match[3]))
