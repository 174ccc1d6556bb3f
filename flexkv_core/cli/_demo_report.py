"""What the demonstration found: one row a request, what each must show, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from flexkv_core.units import format_bytes

from ._serving import Answer
from .verify import restorable


class Source(str, Enum):
    """Where a prompt's KV has to come from."""

    COMPUTED = "computed"
    HOST = "CPU tier"
    STORAGE = "SSD, restarted"


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


def faults(row: Row, page: int) -> list[str]:
    """What is not as it should be; empty if all is well."""
    found = []
    want = expected(row, page)
    got = {name: row.answer.by_tier.get(name, 0) for name in want}
    if got != want:
        found.append(f"tokens by tier are {got}, expected {want}")
    if not row.is_equal:
        found.append("the output differs from the one that was computed")
    if row.must_contain not in row.answer.text:
        found.append(f"the answer lacks {row.must_contain!r}: {row.answer.text!r}")
    if row.must_be_faster and row.source is not Source.COMPUTED and row.times_faster <= 1:
        found.append(f"no faster than computing it ({row.times_faster:.2f} times)")
    return [f"{row.prompt}, {row.source.value}: {fault}" for fault in found]


def expected(row: Row, page: int) -> dict[str, int]:
    """Tokens by tier: all that a tier can give back, out of the one that had to serve it."""
    whole = restorable(row.answer.prompt_tokens, page)
    return {
        "device": 0,
        "host": whole if row.source is Source.HOST else 0,
        "storage": whole if row.source is Source.STORAGE else 0,
    }


HEADINGS = ("prompt", "served from", "tokens cached", "KV", "first token", "faster", "output", "answer")


def table(rows: Sequence[Row], token_bytes: int) -> str:
    """All rows, aligned, for a terminal of about 120 columns."""
    lines = [HEADINGS, *(_cells(row, token_bytes) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    shown.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in shown)


def _cells(row: Row, token_bytes: int) -> tuple[str, ...]:
    answer, is_first = row.answer, row.source is Source.COMPUTED
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
