"""The code of an exported model: everything that it needs from this package, in one file that runs without it."""
