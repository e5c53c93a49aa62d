"""Random numbers, letters and made-up words."""

import numpy as np

from megakernel.config.errors import UserError

LOWER = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype="S1")
UPPER = np.char.upper(LOWER)
DIGITS = np.frombuffer(b"0123456789", dtype="S1")

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
WORD = 6
"""Letters of a word."""

_WORDS = len(_SYLLABLES) ** (WORD // 2)


def text(rng: np.random.Generator, alphabet: np.ndarray, characters: int) -> str:
    """`characters` random characters of an alphabet."""
    return rng.choice(alphabet, characters).tobytes().decode()


def distinct(rng: np.random.Generator, alphabet: np.ndarray, length: int, count: int) -> list[str]:
    """`count` distinct texts of `length` characters, of len(alphabet) ** length."""
    numbers = rng.choice(len(alphabet) ** length, count, replace=False)
    digits = numbers[:, None] // len(alphabet) ** np.arange(length) % len(alphabet)
    return [row.tobytes().decode() for row in alphabet[digits]]


def number(rng: np.random.Generator, digits: int) -> str:
    """A number of `digits` digits without a leading 0."""
    return str(rng.integers(10 ** (digits - 1), 10**digits))


def words(rng: np.random.Generator, count: int) -> list[str]:
    """`count` distinct pronounceable words of WORD letters, of 343,000; UserError for more."""
    if count > _WORDS:
        raise UserError(
            f"an example of these options needs {count:,} different words, and {_WORDS:,} exist; "
            "set a smaller length, or fewer needles"
        )
    base = len(_SYLLABLES)
    numbers = rng.choice(_WORDS, count, replace=False).tolist()
    return [_SYLLABLES[n % base] + _SYLLABLES[n // base % base] + _SYLLABLES[n // base**2] for n in numbers]
