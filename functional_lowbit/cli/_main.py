"""The command line: arguments, exit status, and what happens to errors."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from functional_lowbit._core.version import __version__
from functional_lowbit.cli import _bench, _convert, _inspect, _plan
from functional_lowbit.cli._output import Mistake, as_json

NAME = "functional-lowbit"
COMMANDS = {"plan": _plan, "inspect": _inspect, "convert": _convert, "bench": _bench}
INTERRUPTED, NOBODY_READS = 130, 141  # what a shell says of SIGINT and SIGPIPE
EPILOG = """\
exit status:
  0    all is well
  1    the checkpoint is broken, or cannot be read
  2    a mistake in the arguments, or a place that cannot be written
  130  interrupted

Each command has examples: functional-lowbit inspect --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    A user's mistake is told in one line on stderr. Any other error is a bug of ours, and keeps its traceback.

    Args:
        argv: Arguments; those of the process if None.

    Returns:
        The exit status.

    Example:
        >>> from functional_lowbit.cli import main
        >>> main(["inspect", "missing.pt"])  # and on stderr: functional-lowbit inspect: there is no 'missing.pt'
        2
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack letters
    args = _parser().parse_args(argv)
    try:
        # stdout is for the one document: what other libraries print while they are loaded goes to stderr.
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
            result = COMMANDS[args.command].run(args)
        document = {"command": args.command, "version": __version__, **result.document}
        _put(as_json(document) if args.json else result.text)
        return result.status
    except (Mistake, KeyboardInterrupt) as error:
        if args.debug:
            raise
        text, status = (error, error.status) if isinstance(error, Mistake) else ("interrupted", INTERRUPTED)
        sys.stderr.write(f"{NAME} {args.command}: {text}\n")
        return status
    except BrokenPipeError:  # `| head` has read enough
        return NOBODY_READS


def _put(text: str) -> None:
    """Write to stdout. Where nobody reads, that is a BrokenPipeError; a full disk is a Mistake."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        if isinstance(error, BrokenPipeError):
            raise
        raise Mistake(f"cannot write the output: {error.strerror}") from error


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="write one JSON document to stdout, and nothing else")
    common.add_argument("--debug", action="store_true", help="show the traceback of a mistake too")
    about, as_typed = "Low-bit optimizer states from the command line.", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=NAME, description=about, epilog=EPILOG, formatter_class=as_typed)
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        texts = {"help": module.HELP, "description": module.__doc__, "epilog": module.EXAMPLES}
        command = commands.add_parser(name, **texts, parents=[common], formatter_class=as_typed)
        module.add_arguments(command)
    return parser
