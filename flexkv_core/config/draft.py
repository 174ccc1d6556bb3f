"""The chain while it is put together: a plain tree, and for each value where it came from.

Values may be put in any order: a flag beats the environment, the environment beats the file, the
file beats a default.  Whoever loses is named in a notice; two names of one source that say
different things are a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from .report import Report, where
from .schema import Path, dotted


class Rank(IntEnum):
    """Where values come from; the higher one wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3


@dataclass(frozen=True)
class Origin:
    """Where one value came from.

    Attributes:
        rank: Which kind of source.
        name: The flag's or variable's name, the file's path, or empty for a default.
    """

    rank: Rank = Rank.DEFAULT
    name: str = ""

    def __str__(self) -> str:
        return f"{self.rank.name.lower()} {self.name}".strip()


DEFAULT = Origin()


@dataclass(frozen=True)
class Given:
    """One value as a source gave it.  ``value`` may be a secret and is in no repr."""

    name: str
    value: Any = field(repr=False)
    origin: Origin


@dataclass
class Draft:
    """The tree of a chain file, and the origins of what did not come from one.

    Attributes:
        tree: What will be validated.
        base: Origin of whatever stands in ``tree`` and not in ``origins``.
        report: Where faults and notices go.
    """

    report: Report
    tree: dict[str, Any] = field(default_factory=dict, repr=False)
    base: Origin = DEFAULT
    origins: dict[Path, Origin] = field(default_factory=dict)
    _general: set[Path] = field(default_factory=set)

    def origin(self, path: Path) -> Origin:
        """Where the value at ``path`` came from."""
        for length in range(len(path), 0, -1):
            found = self.origins.get(path[:length])
            if found is not None:
                return found
        return self.base if self._has(path) else DEFAULT

    def fault(self, path: Path, line: str) -> None:
        """Add a finding about the value at ``path``, naming the source that it came from."""
        origin = self.origin(path)
        if origin.rank is Rank.ENVIRONMENT:
            self.report.fault(f"{origin.name} ({dotted(path)}): {line}", "environment")
        elif origin.rank is Rank.FLAG:
            self.report.fault(where(path, line), "flag")
        else:
            self.report.fault(where(path, line))

    def put(self, path: Path, given: Given, *, general: bool = False) -> None:
        """Set one value, if its source outranks the one that set it before.

        Args:
            path: Where it goes; what stands above it must be there or absent, not something else.
            given: The value and its source.
            general: It is meant for several places, so another name of the same source that
                means this one place beats it, in whichever order they are put.
        """
        holder, last = self._holder(path), str(path[-1])
        if holder is None:
            return  # the file has something else there, which its own finding tells
        old = self.origin(path)
        is_there = last in holder
        is_same = is_there and holder[last] == given.value
        if is_there and old.rank > given.origin.rank:
            if not is_same:
                self.report.notice(f"{given.origin} loses to {old} for {dotted(path)}")
            return
        if is_there and not is_same and old.rank is given.origin.rank and old.name != given.origin.name:
            if general:
                self.report.notice(
                    f"{given.origin} loses to {old} for {dotted(path)}, the more specific name"
                )
                return
            self._settle(path, old, given.origin)
        if is_there and not is_same and Rank.DEFAULT < old.rank < given.origin.rank:
            self.report.notice(f"{old} loses to {given.origin} for {dotted(path)}")
        holder[last] = given.value
        self.origins[path] = given.origin
        (self._general.add if general else self._general.discard)(path)

    def _settle(self, path: Path, old: Origin, new: Origin) -> None:
        if path in self._general:
            self.report.notice(f"{old} loses to {new} for {dotted(path)}, the more specific name")
        else:
            line = f"{new.name}: {old.name} says something else for {dotted(path)}"
            self.report.fault(line, new.rank.name.lower())

    def _holder(self, path: Path) -> dict[str, Any] | None:
        """The mapping that the last part of ``path`` is a key of, made where it is absent."""
        place: Any = self.tree
        for part in path[:-1]:
            if isinstance(place, list) and isinstance(part, int) and part < len(place):
                place = place[part]
            elif isinstance(place, dict) and isinstance(part, str):
                if place.get(part) is None:  # absent, or null
                    place[part] = {}
                place = place[part]
            else:
                return None
        return place if isinstance(place, dict) else None

    def _has(self, path: Path) -> bool:
        place: Any = self.tree
        for part in path:
            try:
                place = place[part]
            except (KeyError, IndexError, TypeError):
                return False
        return True
