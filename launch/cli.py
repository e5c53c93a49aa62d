"""`megakernel`: one subcommand per file of this folder.

A command's module has HELP, EXAMPLE, `add_arguments(parser)` and `run(args) -> exit status`, and imports
heavy libraries inside `run`, so that help and configuration errors come at once. NEEDS, if it has one, are modules of
an extra of the package, without which the command cannot start. For commands that check the command line of another,
`args` has `parse` and the names of all `commands`.
"""

import argparse
import atexit
import errno
import gc
import io
import os
import re
import shlex
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
    "prepare and train": ("prepare", "merge", "pretrain", "uptrain"),
    "evaluate and use": ("monitor", "compare", "evaluate", "analyze", "generate", "serve"),
    "convert models": ("import", "export"),
    "cluster": ("submit", "sweep", "status", "logs", "cancel", "resume"),
    "information": ("config", "plan", "doctor"),
}
"""Groups of `megakernel --help` -> names of commands, and of their files (`import` is in import_dense.py)."""

_MEANT = {
    "train": "pretrain",
    "finetune": "uptrain",
    "preprocess": "prepare",
    "tokenize": "prepare",
    "eval": "evaluate",
    "sample": "generate",
    "inference": "generate",
    "chat": "generate",
    "convert": "import",
}
"""What other programs call a command -> its name here."""

DEV = ("reshape", "mechanisms", "bench")
"""Commands for scripts and developers: `megakernel dev NAME`, or NAME alone as in earlier versions."""

try:
    import megakernel
    from launch.arguments import NotFound, NumberParser
    from launch.completion import SHELLS, PrintCompletion
    from launch.environment import check_backend
    from launch.exit_status import ExitStatus
    from launch.messages import INTERRUPTED, ignore_write_errors, print_error, show_control_characters
    from launch.slurm_programs import SlurmRefused
    from megakernel.config import InUse, NotFinite, PreparationFailed, RunFailed, UserError, extras
    from megakernel.config.errors import REFUSED_BY_DISK, nearest_first
    from megakernel.training.events import in_job

    COMMANDS = {
        name: import_module(f"launch.{'import_dense' if name == 'import' else name}")
        for name in (*chain.from_iterable(GROUPS.values()), *DEV)
    }
    """Name -> module."""
except KeyboardInterrupt:  # the imports take a moment, and `main` cannot catch it yet
    print("megakernel: error: interrupted", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its `ExitStatus`."""
    # Otherwise Python's last garbage collection goes through all objects of the libraries, which takes seconds.
    atexit.register(gc.freeze)
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A name or text may not fit the terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    show_control_characters()
    ignore_write_errors("stderr")
    args = argparse.Namespace()
    try:
        try:
            parse(sys.argv[1:] if argv is None else argv, args)
            check_backend()
            extras.need(args.command, *getattr(COMMANDS[args.command], "NEEDS", ()))
            status = int(COMMANDS[args.command].run(args))
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # Rich turns it into SystemExit
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
        if isinstance(error, PreparationFailed):
            return ExitStatus.NOT_PREPARED
        return ExitStatus.NOT_FINITE if isinstance(error, NotFinite) else ExitStatus.FAILED
    except BrokenPipeError:
        return ExitStatus.BROKEN_PIPE
    except KeyboardInterrupt:
        print_error(INTERRUPTED)
        return ExitStatus.FAILED
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (line := extras.explained(args.command, error)):
            print_error(line)
            return ExitStatus.USAGE
        print_error(_file_system_error(error) or _out_of_memory(error) or _unexpected_error(error, args))
        return ExitStatus.FAILED
    finally:
        _discard_unwritable_output()


def _file_system_error(error: Exception) -> str | None:
    """The message of a file system error that the user can fix; None for any other error."""
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):  # before Python 3.13
        error = OSError(
            errno.ELOOP, os.strerror(errno.ELOOP), str(error).removeprefix("Symlink loop from ")[1:-1]
        )
    if not isinstance(error, OSError) or error.errno not in REFUSED_BY_DISK:
        return None
    if error.errno == errno.ELOOP:
        return f"{error.filename or 'a path'} is a link that leads to itself; name the file or folder that is meant"
    too_long = error.errno == errno.ENAMETOOLONG
    remedy = "shorten it" if too_long else "make it writable, free space or name another place"
    return f"{error.filename or 'the output'} cannot be written or read ({error.strerror}); {remedy}"


def _out_of_memory(error: Exception) -> str | None:
    """The message for a process that gets no memory, of its machine or GPU; None for any other error."""
    if "CUDA out of memory" in str(error):
        wanted = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", str(error))
        size = f" ({wanted[1]} more were needed at once)" if wanted else ""
        return (
            f"CUDA out of memory{size}; in training lower training.micro_batch_size or set "
            "training.activation_checkpointing=full (docs/troubleshooting.md has more keys, megakernel plan CONFIG "
            "says what fits), otherwise take fewer or shorter texts at once"
        )
    if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
        return None
    wanted = re.search(r"allocate (\d+) bytes", str(error))
    size = f" ({int(wanted[1]) / 2**30:,.1f} GiB at once)" if wanted else ""
    return (
        f"this machine has too little memory{size}; take one with more, a smaller model, or several processes that "
        "divide it (megakernel plan CONFIG says what a process needs)"
    )


def _unexpected_error(error: Exception, args: argparse.Namespace) -> str:
    """One line about an unexpected error, whose traceback goes to a file.

    In a job it goes to the process's own log: thousands of processes that fail at once should not write a file each.
    """
    text = f"{type(error).__name__}: {error}"
    if (
        "\nOriginal Traceback" in text
    ):  # of a data worker: its traceback is the message, the error the last line
        text = f"in a data worker: {text.splitlines()[-1]}"
    text = " ".join(text.split())
    if len(text) > _MAX_ERROR_LENGTH:
        text = text[: _MAX_ERROR_LENGTH - 3] + "..."
    if in_job():
        traceback.print_exc()
        return f"{text}; the traceback is above this line"
    name = f"traceback-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (lambda: Path(args.run_folder, "logs"), lambda: Path(tempfile.gettempdir())):
        with suppress(OSError, ValueError, AttributeError):  # no such folder, no run in args, a full disk
            (folder() / name).write_text(traceback.format_exc(), encoding="utf-8")
            return f"{text}; the traceback is in {folder() / name}"
    return f"{text}\n{traceback.format_exc()}"


_MAX_ERROR_LENGTH = 300


def _open_missing_streams() -> None:
    """Open the standard streams that a shell closed (`>&-`): else the next files opened would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null == number:
                os.set_inheritable(null, True)
            else:
                os.dup2(null, number)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _discard_unwritable_output() -> None:
    """Discard output that cannot be written: Python would retry at exit and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(NumberParser):
    """Reports a wrong command line in one line; argparse would print all options first."""

    def error(self, message: str) -> NoReturn:
        print_error(f"{message}{'' if message.endswith('?') else ';'} see {self.prog} --help")
        sys.exit(ExitStatus.USAGE)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Also suggests commands for a word that is none; argparse would list all of them."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            meant = _MEANT.get(value)
            known = meant if meant in action.choices else nearest_first(value, action.choices, most=3)
            self.error(f"{value} is no command; did you mean {known}?")
        super()._check_value(action, value)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Also an option's value `--`, as in `--prompt=--`, of which Python before 3.13 makes an empty list."""
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)


def parse(argv: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:
    """Parse the arguments of one command. Raises SystemExit, after a message, if they are invalid."""
    parser = _Parser(
        prog="megakernel",
        description=megakernel.__doc__,
        epilog=_command_list({**GROUPS, "": ("dev",)}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megakernel {megakernel.__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print a completion script for this shell",
    )
    commands = _add_commands(parser, COMMANDS)
    dev = commands.add_parser(
        "dev",
        description=f"{_DEV_HELP[0].upper()}{_DEV_HELP[1:]}.",
        epilog=_command_list({"commands": DEV}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_commands(dev, DEV)
    parser.set_defaults(parse=parse, commands=tuple(COMMANDS))
    args = argparse.Namespace() if namespace is None else namespace
    _, rest = parser.parse_known_args(argv, args)
    # argparse takes no more positionals after an option: `pretrain CONFIG --nproc 2 training.steps=5`.
    positional = next((name for name in ("overrides", "runs") if hasattr(args, name)), "")
    unknown = [item for item in rest if item.startswith("-") or not positional]
    if unknown:
        text = f"unrecognized arguments: {' '.join(unknown)}"
        if positional == "overrides" and (key := _KEY_AS_OPTION.match(unknown[0])):
            following = [*argv[argv.index(unknown[0]) + 1 :], "-"][0]
            value = key["value"] or ("VALUE" if following.startswith("-") else following)
            text += f"; keys of the configuration have no dashes: write {key['key']}={shlex.quote(value)}"
        commands.choices[args.command].error(text)
    if rest:
        setattr(args, positional, [*getattr(args, positional), *rest])
    return args


_KEY_AS_OPTION = re.compile(r"--(?P<key>\w+(\.\w+)+)(=(?P<value>.*))?\Z", re.DOTALL)
"""A key of the configuration written as an option, as other programs have it: `--training.steps`."""

_DEV_HELP = "commands for scripts and developers"


def _add_commands(parser: argparse.ArgumentParser, names: Iterable[str]) -> Any:
    """Declare the commands and return argparse's subparsers action; the parser's epilog lists them by group."""
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


def _command_list(groups: Mapping[str, Sequence[str]]) -> str:
    """One entry per command, group by group, wrapped as argparse would."""
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
