"""``flexkv drivers``: which drivers are installed, by whom, and which of them are broken and why.

What a tier can do is shown as its driver states it for default options (see also ``flexkv doctor``);
options are shown with ``--options``.
Status 1 if a driver is broken, so that a build can be checked.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields

from ..tier import TierCapabilities


@dataclass(frozen=True)
class Row:
    """One offered name.

    Attributes:
        name: What chains write.
        provider: Distribution and version; two where they disagree.
        module: What the entry point names.
        api: Driver interface that it was written for; empty if that could not be asked.
        can: What its tiers can do, in words.
        options: The options' names, those without a default marked ``*``.
        problem: Why it cannot be used; empty if it can.
    """

    name: str
    provider: str
    module: str
    api: str = ""
    can: str = ""
    options: tuple[str, ...] = ()
    problem: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser("drivers", help="list the installed drivers", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--options", action="store_true", help="also name each driver's options")


def run(args: argparse.Namespace) -> int:
    """List, and return the exit status."""
    found = rows()
    if args.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
    else:
        print(table(found, options=args.options))
    return 1 if any(row.problem for row in found) else 0


def rows() -> list[Row]:
    """Every installed driver; each is imported to see whether it can be."""
    from ..drivers import find_driver, installed_drivers
    from ..errors import DriverError

    found = []
    for name, offers in installed_drivers().items():
        provider = " and ".join(offer.provider for offer in offers)
        module = " and ".join(offer.target for offer in offers)
        try:
            spec, _ = find_driver(name)
        except DriverError as exc:
            found.append(Row(name, provider, module, problem=str(exc)))
            continue
        fields = getattr(spec.config, "model_fields", {})
        options = tuple(f"{option}*" if field.is_required() else option for option, field in fields.items())
        api = ".".join(map(str, spec.api))
        found.append(Row(name, provider, module, api, _can(spec.capabilities), options))
    return found


def table(found: list[Row], *, options: bool = False) -> str:
    """The rows as text."""
    if not found:
        return "no drivers are installed"
    cells = [("driver", "provider", "module", "api", "can", "state")]
    cells += [(row.name, row.provider, row.module, row.api or "-", row.can, _state(row)) for row in found]
    widths = [max(len(cell[column]) for cell in cells) for column in range(5)]
    lines = []
    for number, cell in enumerate(cells):
        text = "  ".join(f"{cell[column]:<{widths[column]}}" for column in range(5))
        lines.append(f"{text}  {cell[5]}".rstrip())
        if options and number and found[number - 1].options:
            lines.append(f"    options (* required): {', '.join(found[number - 1].options)}")
    broken = [f"{row.name}: {row.problem}" for row in found if row.problem]
    return "\n".join([*lines, *broken])


def _can(capabilities: TierCapabilities | None) -> str:
    """The yes-or-no capabilities that hold, by name; ``?`` where the driver does not say."""
    if capabilities is None:
        return "?"
    names = [field.name for field in fields(capabilities) if getattr(capabilities, field.name) is True]
    return ", ".join(names) or "-"


def _state(row: Row) -> str:
    return "BROKEN, see below" if row.problem else "ok"
