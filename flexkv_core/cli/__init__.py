"""The ``flexkv`` command: one module a verb.

A module of this package whose name does not begin with ``_`` is a verb (``new_driver`` is
``flexkv new-driver``) and has ``add_parser(subparsers)`` and ``run(args) -> int``.  Only the verb
that is asked for is imported; ``--help`` imports all, so verbs import what is heavy inside ``run``.

Exit status: 0 all is well; 1 a check failed, or the work could not be done; 2 the command line is
wrong, or (``verify``, ``demo``) nothing could be found out; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from ..errors import FlexKVError

OK, FAILED, INTERRUPTED = 0, 1, 130

_DESCRIPTION = "A tiered KV cache for LLM serving: CPU, SSD and remote tiers in a chain written in YAML."
_EPILOG = """\
flexkv VERB --help tells more of each.

Exit status: 0 all is well; 1 a check failed or the work could not be done; 2 wrong usage, or it could \
not be found out (verify, demo).
"""


def verbs() -> dict[str, str]:
    """Every verb with the module that does it, in order of the alphabet."""
    names = sorted(entry.name for entry in pkgutil.iter_modules(__path__) if not entry.name.startswith("_"))
    return {name.replace("_", "-"): f"{__name__}.{name}" for name in names}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser with every verb, or with one."""
    parser = argparse.ArgumentParser(
        prog="flexkv", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=_Help
    )
    parser.add_argument("--version", action="store_true", help="say the version and end")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for verb, module in verbs().items():
        if only in (None, verb):
            import_module(module).add_parser(subparsers)
    for subparser in subparsers.choices.values():
        subparser.formatter_class = _Help
        subparser.description = _plain(subparser.description or "")
    return parser


class _Help(argparse.HelpFormatter):
    """Paragraphs stay paragraphs, each as wide as the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
        return "\n\n".join(textwrap.fill(part, width, initial_indent=indent) for part in paragraphs)


def _plain(doc: str) -> str:
    """A verb's docstring as help: without its own name in front, and without marks of code."""
    text = re.sub(r"^flexkv [^:]*: ", "", doc.replace("``", ""))
    return text[:1].upper() + text[1:]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; default: the process's.

    Returns:
        The exit status.

    Raises:
        SystemExit: argparse's own, for ``--help`` and wrong usage.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"flexkv {words[0]}" if words and words[0] in verbs() else "flexkv"
    try:
        try:
            return _run(words)
        finally:
            _flush()
    except FlexKVError as exc:
        return _failed(name, str(exc))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has gone: no more output, and no complaint
        _let_go_of_output()
        return FAILED
    except OSError as exc:  # a file or folder that was named, or the output's disk is full
        _let_go_of_output()
        where = f"{os.fsdecode(exc.filename)}: " if isinstance(exc.filename, (str, bytes)) else ""
        return _failed(name, where + (exc.strerror or str(exc)))


def _run(words: Sequence[str]) -> int:
    known = verbs()
    parser = build_parser(words[0] if words and words[0] in known else None)
    args = parser.parse_args(words)
    if args.version:
        from .. import __version__

        print(f"flexkv-core {__version__}")
        return OK
    if args.verb is None:
        parser.print_help()
        return OK
    return int(import_module(known[args.verb]).run(args))


def _failed(name: str, what: str) -> int:
    print(f"{name}: " + "\n  ".join(what.splitlines()), file=sys.stderr)
    return FAILED


def _flush() -> None:
    if sys.stdout is not None:  # as in `flexkv check >&-`
        sys.stdout.flush()


def _let_go_of_output() -> None:
    """Have output that cannot be written go nowhere: the interpreter would complain of it at its end."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
