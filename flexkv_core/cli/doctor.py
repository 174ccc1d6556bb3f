"""``flexkv doctor``: will it run here?  PASS, WARN or FAIL for each thing, with the mend.

Looks at Python and packages, memory against the configured pools, shared memory, memlock, huge
pages, each directory, the services that tiers are kept in, the drivers, the installed engines and the
GPUs.  Changes nothing; a small file is made and removed in each directory.  Status 1 if anything is FAIL.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..memory import memlock_limit_bytes
from ._findings import Line, State, bad, good
from ._source import add_source, load, positive

if TYPE_CHECKING:
    from ..config import EffectiveConfig, ResolvedTier
    from ..models import Needs


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser(
        "doctor", help="check whether it will run on this machine", description=__doc__
    )
    add_source(parser)
    parser.add_argument(
        "--ranks", type=positive, default=1, metavar="N", help="engine processes on this host (default 1)"
    )
    parser.add_argument("--no-gpu", action="store_true", help="do not start torch to look for GPUs")
    parser.add_argument("--offline", action="store_true", help="do not open the tiers that are services")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Look, print as it goes, and return the exit status."""
    counts = dict.fromkeys(State, 0)
    shown: list[dict[str, str]] = []
    for line in examine(args):
        counts[line.state] += 1
        if args.json:
            shown.append(
                {"state": line.state.value, "name": line.name, "found": line.found, "mend": line.mend}
            )
        else:
            print(line)
            sys.stdout.flush()
    if args.json:
        print(json.dumps(shown, indent=2))
    else:
        print(", ".join(f"{count} {state.value}" for state, count in counts.items()))
    return 1 if counts[State.FAIL] else 0


def examine(args: argparse.Namespace) -> Iterator[Line]:
    """Every finding, as it is found."""
    from . import _machine, _places

    yield from _machine.python_lines()
    config: EffectiveConfig | None = None
    try:
        config = load(args)
    except ConfigError as exc:
        for line in str(exc).splitlines():
            yield bad("configuration", line, "correct it; flexkv reference tells every field")
    else:
        yield good("configuration", config.describe()[0].removeprefix("configuration: "))
    needs = tier_needs(config)
    staging = config.chain.staging if config is not None and not any(need.host_bytes for need in needs) else 0
    found: list[str] | str = [] if args.no_gpu else _machine.gpus()
    if not args.no_gpu:
        yield _machine.gpu_line(found)
    yield from _machine.memory_lines(needs, staging, args.ranks)
    yield _machine.shared_memory_line()
    pinned = staging + sum(need.host_bytes for need in needs)
    yield _machine.memlock_line(pinned, memlock_limit_bytes(), len(found) if isinstance(found, list) else 0)
    shares = [
        (path, args.ranks * need.disk_bytes // len(need.directories), need.min_free_bytes)
        for need in needs
        for path in need.directories
    ]
    for share in shares:
        yield from _places.directory_lines(*share)
    yield from _places.shared_lines(shares)
    for tier in config.tiers if config is not None and not args.offline else ():
        if needs_of(tier) is None:
            yield from _places.service_lines(tier)
    named = [tier.spec.name for tier in config.tiers] if config is not None else None
    yield from _places.driver_lines(named)
    yield from _places.engine_lines()


def tier_needs(config: EffectiveConfig | None) -> Sequence[Needs]:
    """What each tier takes of this machine, for the drivers that say so."""
    found = [needs_of(tier) for tier in config.tiers] if config is not None else []
    return [needs for needs in found if needs is not None]


def needs_of(tier: ResolvedTier) -> Needs | None:
    """What one tier takes of this machine; None where its driver does not say."""
    from ..models import Needs

    ask = getattr(tier.options, "needs", None)
    needs = ask() if callable(ask) else None
    return needs if isinstance(needs, Needs) else None
