"""The base of every configuration section."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, model_validator

from .errors import ConfigError, Problem


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors and a field's docstring is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
    )

    def problems(self) -> Iterator[Problem]:
        """What this section's keys contradict in each other; keys are relative to the section."""
        yield from ()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Section":
        problems = list(self.problems())
        if problems:
            raise ConfigError(problems)
        return self
