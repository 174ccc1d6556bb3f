"""One line of ``flexkv doctor``: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """How one thing is.  Only ``FAIL`` makes the exit status 1."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        state: How it is.
        name: What was looked at.
        found: What was found, with numbers.
        mend: What to do; empty for ``PASS``.
    """

    state: State
    name: str
    found: str
    mend: str = ""

    def __str__(self) -> str:
        mend = f"\n      mend: {self.mend}" if self.mend else ""
        return f"{self.state.value}  {self.name}: {self.found}{mend}"


def good(name: str, found: str) -> Line:
    """All is well."""
    return Line(State.PASS, name, found)


def doubtful(name: str, found: str, mend: str) -> Line:
    """It works, less well than it could, or only as long as nobody asks for more."""
    return Line(State.WARN, name, found, mend)


def bad(name: str, found: str, mend: str) -> Line:
    """It cannot work."""
    return Line(State.FAIL, name, found, mend)
