"""The init section: where the weights of a new run come from."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import Field, create_model

from .errors import Problem
from .section import Section

FROM = "from"
"""A word of Python's own, which no class body can have for a field."""

if TYPE_CHECKING:

    class _WithFrom(Section):
        """What `create_model` makes, as far as types are concerned."""

else:
    _WithFrom = create_model(
        "_WithFrom",
        __base__=Section,
        **{
            FROM: (
                Path | None,
                Field(
                    default=None,
                    description="Run folder, checkpoint, or dense model in the Hugging Face form whose weights (not "
                    "optimizer or position) a new run starts from.",
                ),
            )
        },
    )


class Init(_WithFrom):
    """Where the weights of a new run come from; what it continues is not asked for again."""

    adapter: Path | None = None
    """Folder in PEFT's form (adapter_config.json) whose matrices the updates of optimizer.trained: lora begin with."""

    moments: Path | None = None
    """Run or checkpoint whose AdamW moments go on, for weights of the same name and shape; null begins all at 0."""

    @property
    def source(self) -> Path | None:
        """`from`."""
        return cast(Path | None, getattr(self, FROM))

    def problems(self) -> Iterator[Problem]:
        """Moments without the weights that they are of."""
        if self.moments is not None and self.source is None:
            reason = "are of weights, and init.from is null"
            yield self.problem("moments", reason, "set init.from to the same run, or remove them")
