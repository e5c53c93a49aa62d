"""Mutation tests: puts each fault of a list into a copy of the sources, and runs tests on the copy.

    python -m tests.tools.mutants mutants.toml [--only WORD ...] [--all-tiers]

The list is a TOML file of `[[mutant]]` tables: `name`, `file`, `old` (a text that the file holds once), `new`, and
`tests`, the files or folders that should detect it. The copy is a git worktree of the last commit. Without --all-tiers
only the first tier runs. Exits with status 1 if a mutant survived.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tomllib

REPOSITORY = Path(__file__).parents[2]
LIMIT = 900
"""Seconds after which a mutant counts as detected, because it hangs."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def text(self, copy: Path) -> str:
        """The file with the fault in it."""
        text = (copy / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            sys.exit(
                f"{self.name}: {self.file} holds `{self.old}` {count} times; give a text that it holds once"
            )
        return text.replace(self.old, self.new)


def detecting_test(mutant: Mutant, copy: Path, options: list[str]) -> str:
    """The first test that fails on a mutant, or an empty string."""
    path = copy / mutant.file
    original = path.read_text()
    path.write_text(mutant.text(copy))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *mutant.tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done in {LIMIT} s"
    finally:
        path.write_text(original)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if not failed:
        sys.exit(f"{mutant.name}: pytest ended with status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return failed[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mutants", type=Path, help="the list, a TOML file")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only mutants whose names contain it"
    )
    parser.add_argument("--all-tiers", action="store_true", help="run the second tier of the tests too")
    given = parser.parse_args()
    mutants = [Mutant(**each) for each in tomllib.loads(given.mutants.read_text())["mutant"]]
    mutants = [one for one in mutants if not given.only or any(word in one.name for word in given.only)]
    if not mutants:
        parser.error(f"--only {' '.join(given.only)}: no mutant of {given.mutants} has such a name")
    options = [] if given.all_tiers else ["-m", "not second"]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(copy)], check=True)
        try:
            for mutant in mutants:
                mutant.text(copy)  # refuses a list that does not match the sources before anything runs
            print("| mutant | file | verdict | by | seconds |\n|---|---|---|---|---:|")
            for mutant in mutants:
                begun = time.monotonic()
                by = detecting_test(mutant, copy, options)
                survivors += not by
                verdict = "killed" if by else "SURVIVED"
                seconds = round(time.monotonic() - begun)
                print(f"| {mutant.name} | {mutant.file} | {verdict} | {by} | {seconds} |", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(copy)], check=True)
    print(f"\n{len(mutants) - survivors} of {len(mutants)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
