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
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import megakernel
from launch import (
    analyze,
    bench,
    cancel,
    config,
    doctor,
    evaluate,
    export,
    generate,
    import_dense,
    logs,
    mechanisms,
    monitor,
    plan,
    prepare,
    pretrain,
    reshape,
    resume,
    status,
    submit,
    sweep,
    uptrain,
)
from launch.environment import check_backend
from launch.exit_status import ExitStatus
from launch.messages import INTERRUPTED, make_courtesies, print_error
from launch.numbers import NumberParser
from launch.slurm.errors import NotFound, SlurmRefused
from megakernel.config import InUse, NotFinite, RunFailed, UserError
from megakernel.config.errors import REFUSED_BY_DISK

COMMANDS: dict[str, ModuleType] = {
    "prepare": prepare,
    "pretrain": pretrain,
    "uptrain": uptrain,
    "submit": submit,
    "sweep": sweep,
    "status": status,
    "monitor": monitor,
    "logs": logs,
    "cancel": cancel,
    "resume": resume,
    "import": import_dense,
    "evaluate": evaluate,
    "analyze": analyze,
    "generate": generate,
    "reshape": reshape,
    "export": export,
    "config": config,
    "mechanisms": mechanisms,
    "plan": plan,
    "bench": bench,
    "doctor": doctor,
}


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
    """One line of what a library threw, or we did by mistake; whoever has to mend it finds the traceback in a file."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if len(said) > _MOST_SAID:
        said = said[: _MOST_SAID - 3] + "..."
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
    parser = _Parser(prog="megakernel", description=megakernel.__doc__)
    parser.add_argument("--version", action="version", version=f"megakernel {megakernel.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    parser.set_defaults(parse=parse, commands=tuple(COMMANDS))
    args = argparse.Namespace() if into is None else into
    _, rest = parser.parse_known_args(argv, args)
    # argparse gives up on positionals behind an option: `pretrain CONFIG --nproc 2 training.steps=5`.
    unknown = [item for item in rest if item.startswith("-") or not hasattr(args, "overrides")]
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


if __name__ == "__main__":
    sys.exit(main())
