"""What the demonstration found: one row a request, what each must show, and the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from flexkv_core.units import format_bytes

from ._receipt_lines import MARK, read_log
from ._serving import Answer
from .verify import restorable


class Source(str, Enum):
    """Where a prompt's KV has to come from."""

    COMPUTED = "computed"
    HOST = "CPU tier"
    STORAGE = "SSD, restarted"
    REMOTE = "Redis, new server"
    OUTAGE = "computed, Redis dead"
    RECOVERED = "Redis, back again"

    @property
    def is_hit(self) -> bool:
        """Whether a tier has to serve it."""
        return self not in (Source.COMPUTED, Source.OUTAGE)


@dataclass(frozen=True)
class Row:
    """One request.

    Attributes:
        prompt: What was asked, for people.
        source: Where the KV had to come from.
        answer: What came.
        first: The answer to the same prompt when it was computed; the same object in that row.
        must_contain: Text that belongs in the answer.
        must_be_faster: Whether the prompt is long enough that a hit has to save time.
    """

    prompt: str
    source: Source
    answer: Answer
    first: Answer
    must_contain: str = ""
    must_be_faster: bool = False

    @property
    def times_faster(self) -> float:
        """Time to the first token when computed, over this one's."""
        return self.first.first_token_s / max(self.answer.first_token_s, 1e-9)

    @property
    def is_equal(self) -> bool:
        """Whether the same tokens came as when the prompt was computed."""
        return self.answer.output_ids == self.first.output_ids


def faults(row: Row, page: int, block: int) -> list[str]:
    """What is not as it should be; empty if all is well.

    Args:
        row: What was asked.
        page: The engine's page, in tokens.
        block: The chain's block, in tokens.
    """
    found = []
    want = expected(row, page, block)
    got = {name: row.answer.by_tier.get(name, 0) for name in want}
    if got != want:
        found.append(f"tokens by tier are {got}, expected {want}")
    if not row.is_equal:
        found.append("the output differs from the one that was computed")
    if row.must_contain not in row.answer.text:
        found.append(f"the answer lacks {row.must_contain!r}: {row.answer.text!r}")
    if row.must_be_faster and row.source.is_hit and row.times_faster <= 1:
        found.append(f"no faster than computing it ({row.times_faster:.2f} times)")
    return [f"{row.prompt}, {row.source.value}: {fault}" for fault in found]


def expected(row: Row, page: int, block: int) -> dict[str, int]:
    """Tokens by tier: all that a tier can give back, out of the one that had to serve it.

    Own tiers give whole pages; a shared tier keeps whole blocks only.
    """
    tokens = row.answer.prompt_tokens
    storage = {
        Source.STORAGE: restorable(tokens, page),
        Source.REMOTE: restorable(tokens, block),
        Source.RECOVERED: restorable(tokens, block),
    }
    return {
        "device": 0,
        "host": restorable(tokens, page) if row.source is Source.HOST else 0,
        "storage": storage.get(row.source, 0),
    }


@dataclass(frozen=True)
class Outage:
    """What a server's log said of a tier that was away for a while.

    Attributes:
        down: Why the tier was taken for down; empty if it never was.
        is_back: Whether it was said to be up again afterwards.
        counted: What its counters of failures showed at last, by series.
    """

    down: str = ""
    is_back: bool = False
    counted: Sequence[str] = ()


def outage_of(log: str, tier: str) -> Outage:
    """Read a server's log for what befell a tier."""
    state = re.compile(re.escape(f"{MARK}tier {tier} is ") + r"(up|down)(?:: (.*))?")
    states = [(found[1], found[2] or "") for found in state.finditer(log)]
    downs = [number for number, (name, _) in enumerate(states) if name == "down"]
    counters = read_log(log.splitlines()).counters
    return Outage(
        down=states[downs[0]][1] if downs else "",
        is_back=bool(downs) and states[-1][0] == "up",
        counted=[
            series for series in counters.split() if "_failures{" in series and f'tier="{tier}"' in series
        ],
    )


def outage_faults(outage: Outage) -> list[str]:
    """What a tier's absence did not show; empty if all is well."""
    found = []
    if not outage.down:
        found.append("the log does not say that the tier is down, and why")
    if not outage.is_back:
        found.append("the log does not say that the tier is up again")
    if not any(series.startswith("lookup_failures") for series in outage.counted):
        found.append("no failed lookup was counted")
    return [f"Redis, killed: {fault}" for fault in found]


def outage_lines(outage: Outage) -> list[str]:
    """The same, for people."""
    return [f"down: {outage.down}", *outage.counted, *(["up again"] if outage.is_back else [])]


HEADINGS = ("prompt", "served from", "tokens cached", "KV", "first token", "faster", "output", "answer")


def table(rows: Sequence[Row], token_bytes: int) -> str:
    """All rows, aligned, for a terminal of about 120 columns."""
    lines = [HEADINGS, *(_cells(row, token_bytes) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    shown.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in shown)


def _cells(row: Row, token_bytes: int) -> tuple[str, ...]:
    answer, is_first = row.answer, row.answer is row.first
    tiers = ", ".join(f"{name} {count:,}" for name, count in answer.by_tier.items() if count)
    cached = f"{answer.cached_tokens:,} of {answer.prompt_tokens:,}"
    return (
        row.prompt,
        row.source.value,
        f"{cached} ({tiers})" if tiers else cached,
        format_bytes(answer.tier_tokens * token_bytes) if answer.tier_tokens else "-",
        f"{answer.first_token_s:.3f} s",
        "-" if is_first else f"{row.times_faster:.1f} x",
        "-" if is_first else "equal" if row.is_equal else "DIFFERENT",
        _shorten(answer.text),
    )


def _shorten(text: str, width: int = 26) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 3].rstrip() + "..."
