"""`megakernel`: one subcommand per file of this folder.

A command's module has HELP, EXAMPLE, `add_arguments(parser)` and `run(args) -> exit status`, and imports
heavy libraries inside `run`, so that help and configuration errors come at once.
"""

import argparse
import atexit
import errno
import gc
import sys
from collections.abc import Sequence
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
from launch.exit_status import ExitStatus
from launch.messages import INTERRUPTED, print_error
from launch.numbers import NumberParser
from launch.slurm.errors import NotFound, SlurmRefused
from megakernel.config import InUse, NotFinite, RunFailed, UserError

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

_PLAIN_OS_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
"""What the machine refuses and its user can change: a full disk, a quota, permissions, a file for a folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status, as `ExitStatus` defines it."""
    args = parse(sys.argv[1:] if argv is None else argv)
    # Else Python searches all that the libraries have made for garbage before it exits: seconds, for nothing.
    atexit.register(gc.freeze)
    try:
        return int(COMMANDS[args.command].run(args))
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
    except OSError as error:
        if error.errno not in _PLAIN_OS_ERRORS:
            raise
        print_error(str(error))
        return ExitStatus.FAILED
    except BrokenPipeError:
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        print_error(INTERRUPTED)
        return ExitStatus.FAILED


class _Parser(NumberParser):
    """Says in one line what is wrong, where argparse would print all options before it."""

    def error(self, message: str) -> NoReturn:
        print_error(f"{message}; see {self.prog} --help")
        sys.exit(ExitStatus.USAGE)


def parse(argv: Sequence[str]) -> argparse.Namespace:
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
    args, rest = parser.parse_known_args(argv)
    # argparse gives up on positionals behind an option: `pretrain CONFIG --nproc 2 training.steps=5`.
    unknown = [item for item in rest if item.startswith("-") or not hasattr(args, "overrides")]
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


if __name__ == "__main__":
    sys.exit(main())
