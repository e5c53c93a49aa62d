"""Filler text in which statements are hidden."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megakernel.config.errors import UserError

SENTENCES = (
    "The ferry leaves the harbour at seven and comes back before dark.",
    "Nobody had swept the stairs since the painters went home.",
    "A thin layer of snow covered the roofs on the north side of the street.",
    "She kept the letters in a tin box under the window.",
    "The bakery opens early, and by nine the bread is gone.",
    "Two boys were throwing stones into the canal.",
    "In spring the river rises over the lower meadow.",
    "The clock in the hall has been slow for as long as anyone can remember.",
    "He bought a map of the mountains and hung it beside the door.",
    "Most of the apples had fallen during the storm.",
    "The train was late again, so they waited in the small cafe.",
    "Her brother repairs violins in a workshop behind the church.",
    "It rained for three days, and the garden turned to mud.",
    "The dog sleeps in the sun until somebody opens the gate.",
    "On market days the square smells of fish and oranges.",
    "They painted the boat green and gave it a new name.",
)
"""The default filler."""

_MEAN_LENGTH = sum(map(len, SENTENCES)) / len(SENTENCES) + 1


Filler: TypeAlias = Callable[[np.random.Generator, int], str]
"""Draws a given number of ASCII characters that are irrelevant to the question, with the generator."""


def sentences(rng: np.random.Generator, characters: int) -> str:
    """SENTENCES in random order, with repetition, cut to length."""
    text = ""
    while len(text) < characters:
        count = int((characters - len(text)) / _MEAN_LENGTH) + 1
        text += "".join(SENTENCES[at] + " " for at in rng.integers(len(SENTENCES), size=count))
    return text[:characters]


class Passages:
    """Passages of a given text; non-ASCII characters are dropped."""

    def __init__(self, texts: Iterable[str], name: str):
        """name: of the texts, for errors."""
        self._text = "\n".join(texts).encode("ascii", errors="ignore").decode()
        if not self._text.strip():
            raise UserError(f"filler={name} holds no ASCII text to hide anything in; give filler=sentences")

    def __call__(self, rng: np.random.Generator, characters: int) -> str:
        """A passage from a random place; the text repeats at its end."""
        start = int(rng.integers(len(self._text)))
        times = (start + characters) // len(self._text) + 1
        return (self._text * times)[start : start + characters]

    @classmethod
    def of_file(cls, path: Path) -> "Passages":
        """Passages of a UTF-8 file; UserError if it cannot be read."""
        try:
            return cls([path.read_text(encoding="utf-8")], str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"filler={path} cannot be read ({error}); give a UTF-8 file, or sentences"
            ) from None
