"""``flexkv receipts``: what each request got from which tier, how fast, and why not more.

Reads a server's log.  The lines of finished transfers (``engine.log_transfers``) give the table;
at DEBUG each lookup also tells why it promised no more.  Failures follow with their causes, and the
last line of counters.  Status 1 if the log has no line of the chain.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..units import format_bytes
from ._receipt_lines import Promise, ServerLog, Transfer, read_log

HEADINGS = ("request", "what", "jobs", "tokens", "from", "bytes", "ms", "GB/s", "why not more")
_TO_THE_RIGHT = (2, 3, 5, 6, 7)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser(
        "receipts", help="read a server's log: each request's transfers in a table", description=__doc__
    )
    parser.add_argument("log", metavar="LOGFILE", help="the server's log; - for standard input")


def run(args: argparse.Namespace) -> int:
    """Read, print, and return the exit status."""
    try:
        source = _standard_input() if args.log == "-" else args.log
        with open(source, encoding="utf-8", errors="replace", closefd=args.log != "-") as file:
            found = read_log(file)
    except OSError as exc:
        print(f"flexkv receipts: {args.log}: {exc.strerror}", file=sys.stderr)
        return 1
    if found.is_empty:
        print(f"{args.log}: none of its {found.num_lines} lines is of the chain", file=sys.stderr)
        return 1
    print(report(found))
    return 0


def _standard_input() -> int:
    if sys.stdin is None:  # as in `flexkv receipts - <&-`; the number may be another file's by now
        raise OSError(errno.EBADF, "there is no standard input")
    return sys.stdin.fileno()


def report(found: ServerLog) -> str:
    """The whole output: the table with its totals, the failures, the counters."""
    bad = [
        f"  {failure.kind} {failure.rid}: {failure.status}, {failure.cause}"
        + (f" (from {_origin(failure.by_tier)})" if failure.by_tier else "")
        for failure in found.failures
    ]
    lines = [
        *_table([*_requests(found), *_totals(found.transfers)]),
        "",
        f"{len(bad)} failed or cancelled" if bad else "none failed",
        *bad,
        *_choices(found),
        f"counters: {found.counters or 'no such line'}",
    ]
    return "\n".join(map(_printable, lines))


def _requests(found: ServerLog) -> Iterator[tuple[str, ...]]:
    """For each request one row a way, in the log's order; one for a lookup that led to no load."""
    rows: dict[str, dict[str, list[Transfer]]] = {}
    for transfer in found.transfers:
        rows.setdefault(transfer.rid, {}).setdefault(transfer.way, []).append(transfer)
    for rid in [*rows, *(rid for rid in found.promises if rid not in rows)]:
        ways, promise = rows.get(rid, {}), found.promises.get(rid)
        for way, transfers in ways.items():
            yield (rid, way, *_facts(transfers), _why(promise) if way == "H2D" else "")
        if promise is not None and "H2D" not in ways:
            origin = _origin(promise.by_tier) or "-"
            yield (rid, "lookup", "-", f"{promise.promised:,}", origin, "-", "-", "-", _why(promise))


def _choices(found: ServerLog) -> Iterator[str]:
    """What was weighed between loading and computing, with its numbers."""
    if found.choices:
        yield f"{len(found.choices)} weighed against computing"
    for choice in found.choices.values():
        facts = {
            name: choice.facts.get(name, "?") for name in ("tokens", "loaded", "load", "recompute", "why")
        }
        yield (
            f"  {choice.rid}: {choice.action}, tier {choice.tier}: {facts['loaded']} of {facts['tokens']} "
            f"tokens loaded; all by load {facts['load']}, by compute {facts['recompute']} ({facts['why']})"
        )


def _totals(transfers: Sequence[Transfer]) -> Iterator[tuple[str, ...]]:
    for way in dict.fromkeys(transfer.way for transfer in transfers):
        yield ("total", way, *_facts([entry for entry in transfers if entry.way == way]), "")


def _facts(transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """Jobs, tokens, tiers, bytes, milliseconds, GB/s."""
    num_bytes, seconds = sum(e.num_bytes for e in transfers), sum(e.seconds for e in transfers)
    by_tier: Counter[str] = Counter()
    for entry in transfers:
        by_tier.update(entry.by_tier)
    return (
        f"{len(transfers):,}",
        f"{sum(e.tokens for e in transfers):,}",
        _origin(by_tier) or "-",
        format_bytes(num_bytes),
        f"{seconds * 1e3:.1f}",
        f"{num_bytes / seconds / 1e9:.2f}" if seconds > 0 else "-",
    )


def _why(promise: Promise | None) -> str:
    if promise is None:
        return ""
    counts = f"{promise.promised:,} promised of {promise.prompt:,}, {promise.device:,} on the device"
    return f"{promise.why} ({counts})"


def _origin(by_tier: Mapping[str, int]) -> str:
    return " ".join(f"{tier}:{tokens}" for tier, tokens in by_tier.items())


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [HEADINGS, *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    cells.insert(1, tuple("-" * width for width in widths))
    return [_line(row, widths) for row in cells]


def _line(row: Iterable[str], widths: Sequence[int]) -> str:
    texts = [
        cell.rjust(widths[column]) if column in _TO_THE_RIGHT else cell.ljust(widths[column])
        for column, cell in enumerate(row)
    ]
    return "  ".join(texts).rstrip()


def _printable(text: str) -> str:
    """Without control characters: request ids come from whoever sent them."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
