"""Sets of keys that forget: what was heard of blocks lately.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ..keys import BlockKey

_KNOWN_LIMIT = 200_000
"""Answers of each kind: 13 million tokens in blocks of 64, in some 40 MiB."""
_NEVER = float("-inf")
_OWED_LIMIT = 100_000
"""Blocks that a tier missed and values that could not be removed: so many of each are remembered."""


class RecentKeys:
    """A set of keys that forgets the oldest beyond a limit."""

    def __init__(self, limit: int = _OWED_LIMIT) -> None:
        """No keys."""
        self._limit = limit
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._keys)

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Remember keys."""
        self._keys.update(dict.fromkeys(keys))
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def take(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Forget those of the keys that are here, and return them."""
        found = [key for key in keys if key in self._keys] if self._keys else []
        for key in found:
            del self._keys[key]
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()


class KnownKeys:
    """What a shared tier said of keys, for a while: there, or not there."""

    def __init__(self, found_s: float = 60.0, missing_s: float = 2.0) -> None:
        """Believe a positive answer for ``found_s`` seconds and a negative one for ``missing_s``."""
        self._spans = {True: found_s, False: missing_s}
        self._there: OrderedDict[BlockKey, float] = OrderedDict()
        self._missing: OrderedDict[BlockKey, float] = OrderedDict()  # until when, the first to end first

    def __len__(self) -> int:
        return len(self._there) + len(self._missing)

    def note(self, key: BlockKey, now: float, *, is_there: bool) -> None:
        """Remember an answer, or what a load or store found out."""
        mine, other = (self._there, self._missing) if is_there else (self._missing, self._there)
        other.pop(key, None)
        mine[key] = now + self._spans[is_there]
        mine.move_to_end(key)
        self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        """Two of each kind at most, so that no note takes long: one is added at a time."""
        for answers in (self._there, self._missing):
            for _ in range(2):
                if answers and (len(answers) > _KNOWN_LIMIT or next(iter(answers.values())) < now):
                    answers.popitem(last=False)

    def get(self, key: BlockKey, now: float) -> bool | None:
        """True, False, or None where nothing recent is known."""
        if self._there.get(key, _NEVER) >= now:
            return True
        return False if self._missing.get(key, _NEVER) >= now else None

    def there_until(self, keys: Sequence[BlockKey], start: int, stop: int, now: float) -> int:
        """One behind the last of ``keys[start:stop]`` that is known to be there, without a gap."""
        get = self._there.get
        for at in range(start, stop):
            if get(keys[at], _NEVER) < now:
                return at
        return stop

    def clear(self) -> None:
        """Forget everything."""
        self._there.clear()
        self._missing.clear()
