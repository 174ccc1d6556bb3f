"""Tables of the documents that are made from the code: ``python -m tests.docs.tables`` writes them.

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; ``test_tables`` compares.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from flexkv_core import TierCapabilities
from flexkv_core.config.schema import leaves
from flexkv_core.drivers import find_driver, open_tier
from flexkv_core.testing import context_for, small_layout
from flexkv_sglang.options import RULES, Rule
from tests.docs.pages import PAGES

OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"capacity": "1MiB"},
    "ssd": {"path": "FOLDER", "capacity": "1MiB", "min_free": 0},
    "remote_redis": {"url": "unix:///nowhere/redis.sock"},
    "s3": {"bucket": "nowhere", "probe": "none"},
}
"""Driver -> options that open a tier without a service."""

WHEN = {
    "radix_cache_backend": "any other than `flexkv`",
    "disaggregation_mode": "any but `null`",
    "kv_canary": "any but `none`",
    "radix_eviction_policy": "`tlru`",
}
"""Option of SGLang -> values that are refused, where a rule is neither a switch nor a count."""

_SECTION = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SIZES = {"capacity_bytes", "max_value_bytes"}


def table(name: str) -> str:
    """The table of this name, in Markdown."""
    if name == "capabilities":
        return _markdown(["", *(f"`{driver}`" for driver in OPTIONS)], _capabilities())
    if name == "refused options":
        return _markdown(["Option", "Refused", "Reason"], map(_refusal, RULES))
    kind, _, driver = name.partition(" ")
    assert kind == "options", name
    return _markdown(["Option", "Type", "Default", "Meaning"], _options(driver))


def written(text: str) -> str:
    """A page with its tables as they should be."""
    return _SECTION.sub(lambda match: f"{match[1]}\n{table(match[2])}\n{match[3]}", text)


def _options(driver: str) -> Iterator[list[str]]:
    spec, _ = find_driver(driver)
    for leaf in leaves(spec.config):
        yield [f"`{'.'.join(leaf.path)}`", leaf.expected, leaf.default, leaf.field.description or ""]


def _capabilities() -> Iterator[list[str]]:
    found = [capabilities(driver) for driver in OPTIONS]
    for field in fields(TierCapabilities):
        if field.name not in _SIZES:  # they are options
            yield [f"`{field.name}`", *(_cell(getattr(one, field.name)) for one in found)]


def capabilities(driver: str) -> TierCapabilities:
    """What a tier of ``driver`` says of itself, opened with ``OPTIONS`` for small blocks."""
    spec, offer = find_driver(driver)
    with tempfile.TemporaryDirectory() as folder:
        options = {name: folder if value == "FOLDER" else value for name, value in OPTIONS[driver].items()}
        context = context_for(small_layout(), "table")
        with open_tier(spec, offer.provider, spec.config.model_validate(options), context) as tier:
            return tier.capabilities


def _cell(value: bool | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value or "-")


def _refusal(rule: Rule) -> list[str]:
    if rule.field in WHEN:
        when = WHEN[rule.field]
    else:
        when = {"_is_on": "when set", "_is_several": "above 1"}[getattr(rule.excludes, "__name__", "")]
    return [f"`{rule.option}`", when, rule.reason]


def _markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def sections(page: Path) -> list[str]:
    """Names of the tables that a page holds."""
    return [match[2] for match in _SECTION.finditer(page.read_text(encoding="utf-8"))]


def main() -> int:
    """Write every table of every page anew."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
