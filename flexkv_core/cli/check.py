"""``flexkv check``: is this configuration good, and where does each of its values come from?

Prints every value that holds with its origin (flag, environment, file or default), then what was
given and lost.  Secrets are shown as ``****``.  Opens no tier and touches no disk: ``flexkv doctor``
looks at the machine.  Status 1 with the full report if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ._source import add_source, load

if TYPE_CHECKING:
    from ..config import EffectiveConfig


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser(
        "check", help="check a configuration and show each value with its origin", description=__doc__
    )
    add_source(parser)
    parser.add_argument("--print-config", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--changed", action="store_true", help="leave out values that are defaults")


def run(args: argparse.Namespace) -> int:
    """Check, print, and return the exit status."""
    try:
        config = load(args)
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        count = len(exc.findings)
        print(f"{count} finding{'s' if count > 1 else ''}", file=sys.stderr)
        return 1
    print(as_json(config) if args.print_config else as_table(config, changed=args.changed))
    return 0


def as_table(config: EffectiveConfig, *, changed: bool = False) -> str:
    """The values with their origins, the drivers and the notices, as text."""
    where = f"{config.file} (sha256 {config.sha256})" if config.file else "no file"
    values = [value for value in config.values if not (changed and str(value.origin) == "default")]
    left = max((len(value.path) for value in values), default=0)
    middle = min(40, max((len(value.text) for value in values), default=0))
    rows = [f"  {value.path:<{left}}  {value.text:<{middle}}  {value.origin}" for value in values]
    drivers = [f"  {tier.config.name}: {tier.spec.name} from {tier.provider}" for tier in config.tiers]
    notices = [f"note: {line}" for line in config.notices]
    return "\n".join([where, *rows, "drivers", *drivers, *notices, "OK"])


def as_json(config: EffectiveConfig) -> str:
    """The same as JSON: file, sha256, values by path with value and origin, tiers, notices."""
    values = {
        value.path: {
            "value": value.text,
            "origin": value.origin.rank.name.lower(),
            "source": value.origin.name,
        }
        for value in config.values
    }
    tiers = [
        {"name": tier.config.name, "driver": tier.spec.name, "provider": tier.provider}
        for tier in config.tiers
    ]
    whole = {
        "file": config.file,
        "sha256": config.sha256,
        "values": values,
        "tiers": tiers,
        "notices": list(config.notices),
    }
    return json.dumps(whole, indent=2)
