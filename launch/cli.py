"""`megakernel`: one subcommand per file of this folder.

A command's module has HELP, EXAMPLE, `add_arguments(parser)` and `run(args) -> exit status`, and imports
heavy libraries inside `run`, so that help and configuration errors come at once. A command that checks the command
line of another finds `parse` and the names of all `commands` in its args.
"""

import argparse
import atexit
import errno
import gc
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

GROUPS = {
    "prepare and train": ("prepare", "pretrain", "uptrain"),
    "look": ("monitor", "evaluate", "analyze", "generate", "serve"),
    "move models": ("import", "export"),
    "cluster": ("submit", "sweep", "status", "logs", "cancel", "resume"),
    "ask": ("config", "plan", "doctor"),
}
"""What `megakernel --help` shows: group -> names of commands, which their files have too."""

DEV = ("reshape", "mechanisms", "bench")
"""Commands of scripts and of whoever works on the code: `megakernel dev NAME`, and NAME alone as before."""

try:
    import megakernel
    from launch.arguments import NotFound, NumberParser
    from launch.environment import check_backend
    from launch.exit_status import ExitStatus
    from launch.messages import INTERRUPTED, make_courtesies, print_error
    from launch.slurm_programs import SlurmRefused
    from megakernel.config import InUse, NotFinite, RunFailed, UserError
    from megakernel.config.errors import REFUSED_BY_DISK
    from megakernel.training.events import in_job

    COMMANDS = {
        name: import_module(f"launch.{'import_dense' if name == 'import' else name}")
        for name in (*chain.from_iterable(GROUPS.values()), *DEV)
    }
    """Name -> module."""
except KeyboardInterrupt:  # they take a moment, in which `main` can catch nothing yet
    print("megakernel: error: interrupted", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status, as `ExitStatus` defines it."""
    # Else Python searches all that the libraries have made for garbage before it exits: seconds, for nothing.
    atexit.register(gc.freeze)
    _open_missing_streams()
    make_courtesies("stderr")
    args = argparse.Namespace()
    try:
        try:
            parse(sys.argv[1:] if argv is None else argv, args)
            check_backend()
            status = int(COMMANDS[args.command].run(args))
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # of which Rich makes an exit
                raise error.__context__ from None
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return status
    except NotFound as error:
        print_error(str(error))
        return ExitStatus.NOT_FOUND
    except SlurmRefused as error:
        print_error(str(error))
        return ExitStatus.REFUSED
    except UserError as error:
        print_error(str(error))
        return ExitStatus.IN_USE if isinstance(error, InUse) else ExitStatus.USAGE
    except RunFailed as error:
        print_error(str(error))
        return ExitStatus.NOT_FINITE if isinstance(error, NotFinite) else ExitStatus.FAILED
    except BrokenPipeError:
        return ExitStatus.NOBODY_READS
    except KeyboardInterrupt:
        print_error(INTERRUPTED)
        return ExitStatus.FAILED
    except Exception as error:
        print_error(_of_disk(error) or _unforeseen(error, args))
        return ExitStatus.FAILED
    finally:
        _forget_what_cannot_be_printed()


def _of_disk(error: Exception) -> str | None:
    """What a file system has refused, which its user can change; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in REFUSED_BY_DISK:
        return None
    too_long = error.errno == errno.ENAMETOOLONG
    remedy = "shorten it" if too_long else "make it writable, free space or name another place"
    return f"{error.filename or 'the output'} cannot be written or read ({error.strerror}); {remedy}"


def _unforeseen(error: Exception, args: argparse.Namespace) -> str:
    """One line of what a library threw, or we did by mistake; whoever has to mend it finds the traceback in a file.

    In a job that is the process's own log: thousands that fail at once need not make as many files.
    """
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if len(said) > _MOST_SAID:
        said = said[: _MOST_SAID - 3] + "..."
    if in_job():
        traceback.print_exc()
        return f"{said}; the traceback is above this line"
    name = f"traceback-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (lambda: Path(args.run_folder, "logs"), lambda: Path(tempfile.gettempdir())):
        with suppress(OSError, ValueError, AttributeError):  # no such folder, none of a run, a full disk
            (folder() / name).write_text(traceback.format_exc(), encoding="utf-8")
            return f"{said}; the traceback is in {folder() / name}"
    return f"{said}\n{traceback.format_exc()}"


_MOST_SAID = 300


def _open_missing_streams() -> None:
    """Where a shell closed one (`>&-`), the next file that is opened would take its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null == number:
                os.set_inheritable(null, True)
            else:
                os.dup2(null, number)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _forget_what_cannot_be_printed() -> None:
    """Else Python tries once more when it ends, and says so."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(NumberParser):
    """Says in one line what is wrong, where argparse would print all options before it."""

    def error(self, message: str) -> NoReturn:
        print_error(f"{message}; see {self.prog} --help")
        sys.exit(ExitStatus.USAGE)


def parse(argv: Sequence[str], into: argparse.Namespace | None = None) -> argparse.Namespace:
    """The arguments of one command; SystemExit, after a message, where they make no sense."""
    parser = _Parser(
        prog="megakernel",
        description=megakernel.__doc__,
        epilog=_listed({**GROUPS, "": ("dev",)}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megakernel {megakernel.__version__}")
    commands = _add_commands(parser, COMMANDS)
    dev = commands.add_parser(
        "dev",
        description=f"{_DEV_HELP[0].upper()}{_DEV_HELP[1:]}.",
        epilog=_listed({"commands": DEV}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_commands(dev, DEV)
    parser.set_defaults(parse=parse, commands=tuple(COMMANDS))
    args = argparse.Namespace() if into is None else into
    _, rest = parser.parse_known_args(argv, args)
    # argparse gives up on positionals behind an option: `pretrain CONFIG --nproc 2 training.steps=5`.
    more = next((name for name in ("overrides", "runs") if hasattr(args, name)), "")
    unknown = [item for item in rest if item.startswith("-") or not more]
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        setattr(args, more, [*getattr(args, more), *rest])
    return args


_DEV_HELP = "commands of scripts, and of whoever works on the code"


def _add_commands(parser: argparse.ArgumentParser, names: Iterable[str]) -> Any:
    """Declare the commands, which the parser's own list of groups shows; argparse's way to add one more."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help="see below")
    for name in names:
        module = COMMANDS[name]
        command = commands.add_parser(
            name,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return commands


def _listed(groups: Mapping[str, Sequence[str]]) -> str:
    """A line for each command, group by group, wrapped as argparse wraps them."""
    width = shutil.get_terminal_size().columns - 2
    lines = []
    for title, names in groups.items():
        lines += [f"{title}:"] if title else [""]
        for name in names:
            text = _DEV_HELP if name == "dev" else COMMANDS[name].HELP
            lines += [textwrap.fill(text, width, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13)]
    return "\n".join(lines).strip()


if __name__ == "__main__":
    sys.exit(main())
