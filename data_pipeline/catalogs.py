"""`--source gettext:LANGUAGE`: installed message catalogs as pairs of English messages and their translations."""

from collections.abc import Iterator
from gettext import GNUTranslations
from pathlib import Path

from data_pipeline.document import Document
from data_pipeline.files import CATALOG, File
from data_pipeline.rows import NOT_UNICODE
from data_pipeline.sources import GETTEXT, DocumentSource, is_unicode, unreadable_as_user_error
from megakernel.config.errors import UserError, first_line, nearest_first

FOLDER = "/usr/share/locale"
"""Where systems install catalogs."""

_MESSAGES = "LC_MESSAGES"

_INSTALL = "install packages that bring some (Debian: apt-get install iso-codes git gnupg-l10n libc-l10n)"

_CONTEXT = "\x04"
"""Ends the context that a catalog may put before a message."""


class Catalogs(DocumentSource):
    """The messages of the catalogs of one language, in the order of their names, each pair once."""

    def __init__(self, files: list[Path], language: str, folder: Path):
        """files: the catalogs. folder: where they are installed. Opens nothing yet."""
        super().__init__({"kind": GETTEXT, "language": language, "folder": str(folder), "files": len(files)})
        self.files = tuple(File(path, CATALOG, CATALOG) for path in files)

    def _read(self) -> Iterator[Document]:
        seen: set[tuple[str, str]] = set()
        for file in self.files:
            try:
                messages = _messages(file.path)
            # struct, codecs and gettext's own parser of plural forms share no type for damage.
            except Exception as error:
                if isinstance(error, OSError) and error.errno:
                    raise UserError(
                        f"--source {file.path} cannot be read: {error.strerror}; make it readable"
                    ) from None
                self.counts.left_out[str(file.path)] = f"damaged ({first_line(error)})"
                continue
            for pair in messages:
                if not all(map(is_unicode, pair)):
                    self.skipped[NOT_UNICODE] += 1
                elif pair[0] == pair[1]:
                    self.skipped["equal to its source"] += 1
                elif pair in seen:
                    self.skipped["read before"] += 1
                else:
                    seen.add(pair)
                    yield Document(pair)
            self.counts.files += 1


def catalogs(spec: str) -> Catalogs:
    """The source gettext:LANGUAGE[:FOLDER]. Raises UserError if there are no catalogs of the language."""
    language, _, given = spec.removeprefix(f"{GETTEXT}:").partition(":")
    folder = Path(given or FOLDER)
    if not language or "/" in language or language.startswith("."):
        raise UserError(
            f"--source {spec} names no language; write gettext:LANGUAGE, such as gettext:de, or gettext:LANGUAGE:FOLDER"
        )
    if not folder.is_dir():
        raise UserError(f"--source {spec}: {folder} does not exist; give the folder that has de/{_MESSAGES}")
    with unreadable_as_user_error(spec):
        files = _files(folder, language)
        languages = [] if files else [each.name for each in folder.iterdir() if _files(folder, each.name)]
    if not files:
        others = f"choose {nearest_first(language, languages, 8)}, or " if languages else ""
        raise UserError(
            f"--source {spec}: {folder / language / _MESSAGES} has no .mo file; {others}{_INSTALL}"
        )
    return Catalogs(files, language, folder)


def _files(folder: Path, language: str) -> list[Path]:
    return sorted(path for path in (folder / language / _MESSAGES).glob("*.mo") if path.is_file())


def _messages(path: Path) -> list[tuple[str, str]]:
    """What a catalog translates; of a message with plural forms the singular, and no message's context."""
    with path.open("rb") as stream:
        catalog = GNUTranslations(stream)
    # The library looks messages up, and has no public way to list them.
    entries, plural_form = vars(catalog)["_catalog"], vars(catalog)["plural"]
    found = []
    for key, text in entries.items():
        if isinstance(key, tuple):  # a message and the number of a plural form
            key, form = key
            if form != plural_form(1):
                continue
        if key:  # that of the empty one is about the catalog
            found.append((key.rpartition(_CONTEXT)[2], text))
    return found
