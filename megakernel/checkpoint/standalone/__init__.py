"""The code of an exported model: what it needs of this package as one file, which runs where the package is not."""
