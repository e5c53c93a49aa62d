"""How texts are written if nothing else is given; commands show these defaults before heavy libraries are imported."""

from dataclasses import dataclass

NEW_TOKENS = 200
"""Most tokens of a text, and of a translation."""


@dataclass(frozen=True)
class Beams:
    """How a translation is searched for."""

    count: int = 4
    """Hypotheses of a text that are continued at the same time; 1 takes the most likely token each time."""

    length_penalty: float = 1.0
    """The score of a text is its log-probability over the number of its tokens to this power."""

    def score(self, log_probability: float, tokens: int) -> float:
        """The score of a text of so many tokens, its end included."""
        return log_probability / float(tokens**self.length_penalty)
