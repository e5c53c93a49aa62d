"""The data of a run on all ranks: rank 0 checks, reads and indexes it, and the others get what it found."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from data_pipeline.corpus import Corpora
from megakernel.config import Config
from megakernel.parallel.long_work import long_work
from megakernel.parallel.ranks import Ranks

if TYPE_CHECKING:
    from megakernel.parallel import Mesh

MARKERS = "verified"
"""Folder in a run that remembers which corpora have been verified, if they are read-only."""


class Indexed(Protocol):
    """Batches whose sample indices have to be built."""

    def build(self) -> None:
        """Build the indices that are missing."""


def check_corpora(config: Config, ranks: Ranks, validation: bool = True) -> list[Corpora]:
    """Raise UserError, alike on all ranks, for corpora that are missing or do not fit together; reads little.

    Returns on rank 0 the corpora, for `verified_corpora`.
    """
    found: list[Corpora] = []

    def check() -> None:
        found.append(Corpora(config.data, validation=validation, verify=False))

    ranks.on_rank_zero(check)
    return found


def verified_corpora(config: Config, mesh: "Mesh", found: Sequence[Corpora], runs: Sequence[Path]) -> Corpora:
    """The corpora that `check_corpora` found, on every rank, verified as data.verify says.

    runs: folders of the run, and of the up-training that it is part of, which may remember what was verified.
    Raises UserError, alike on all ranks, as `Corpora` does.
    """

    def verify() -> Corpora:
        (corpora,) = found
        corpora.verify([run / MARKERS for run in runs])
        return corpora

    return long_work(mesh, "checking the corpora", config.parallel.timeout_minutes, verify)


def open_corpora(config: Config, mesh: "Mesh", runs: Sequence[Path]) -> Corpora:
    """Both in turn, with a validation split."""
    return verified_corpora(config, mesh, check_corpora(config, Ranks.of(mesh)), runs)


def build_indices(config: Config, mesh: "Mesh", *batches: Indexed) -> None:
    """Build the sample indices of batches. Raises UserError, alike on all ranks, if they cannot be written."""

    def build() -> None:
        for one in batches:
            one.build()

    long_work(mesh, "indexing the corpora", config.parallel.timeout_minutes, build)
