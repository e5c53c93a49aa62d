"""The init section: where the weights of a new run come from."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import Field, create_model

from .errors import Problem
from .section import Section

FROM = "from"
"""A Python keyword, which a class body cannot have as a field name."""

if TYPE_CHECKING:

    class _WithFrom(Section):
        """The result of `create_model`, for the type checker."""

else:
    _WithFrom = create_model(
        "_WithFrom",
        __base__=Section,
        **{
            FROM: (
                Path | None,
                Field(
                    default=None,
                    description="Run folder, checkpoint or Hugging Face model folder whose weights (not optimizer "
                    "state or step) a new run starts from; None: random weights.",
                ),
            )
        },
    )


class Init(_WithFrom):
    """Where the weights of a new run come from; ignored when a run resumes from its own checkpoint."""

    adapter: Path | None = None
    """PEFT adapter folder (with adapter_config.json) that initializes the updates of optimizer.trained: lora."""

    moments: Path | None = None
    """Run or checkpoint whose AdamW moments are loaded for weights of the same name and shape; None: all start at 0."""

    @property
    def source(self) -> Path | None:
        """Value of `init.from`."""
        return cast(Path | None, getattr(self, FROM))

    def problems(self) -> Iterator[Problem]:
        """Moments without their weights."""
        if self.moments is not None and self.source is None:
            reason = "belong to loaded weights, and init.from is null"
            yield self.problem("moments", reason, "set init.from to the same run, or remove them")
