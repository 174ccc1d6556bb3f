"""Which faults there are, and seeded schedules of them.  ``faults.FaultTier`` carries them out."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from flexkv_core.keys import BlockKey
from flexkv_core.tier import BufferState, Status


class FaultKind(Enum):
    """What goes wrong with a call."""

    DELAY = "delay"
    """Sleeps ``seconds`` on the wrapper's clock, then works."""
    HANG = "hang"
    """Blocks until ``release``, then works: a late write into the buffers."""
    RAISE = "raise"
    """Raises ``error``; the tier is not asked."""
    FAIL_KEYS = "fail_keys"
    """The keys at ``at`` fail with ``status``; the others work."""
    RETURN_NONE = "return_none"
    """Works, then returns None."""
    RETURN_SHORT = "return_short"
    """Works, then returns one outcome too few."""
    RETURN_LONG = "return_long"
    """Works, then returns one outcome too many."""
    RETURN_JUNK = "return_junk"
    """Works, then returns strings in place of outcomes."""
    TRUNCATE = "truncate"
    """Load: the values at ``at`` come half, and their rest is zeros."""
    FLIP = "flip"
    """Load: one bit of each value at ``at`` is flipped (bit ``bit``, counted over the value)."""
    SWAP = "swap"
    """Load: the values at ``at`` are those of other keys, as far as any were seen."""
    REPLACE = "replace"
    """Load: the values at ``at`` are ``value`` (of another namespace, for one), present or not."""
    LIE = "lie"
    """Says that everything at ``at`` worked; nothing was done."""


LOAD_KINDS = frozenset(
    {FaultKind.TRUNCATE, FaultKind.FLIP, FaultKind.SWAP, FaultKind.REPLACE},
)
"""Kinds that change what a load brings; other operations are left alone by them."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: See ``FaultKind``.
        at: Places in the batch that it strikes; None for all.
        status: For ``FAIL_KEYS``.
        buffer: For ``FAIL_KEYS``: the state that is reported.
        error: For ``RAISE``.
        seconds: For ``DELAY``.
        bit: For ``FLIP``; taken modulo the value's length.
        value: For ``REPLACE``.
    """

    kind: FaultKind
    at: tuple[int, ...] | None = None
    status: Status = Status.UNAVAILABLE
    buffer: BufferState = BufferState.UNTOUCHED
    error: Exception | None = None
    seconds: float = 0.0
    bit: int = 100_003
    value: bytes = b""

    def strikes(self, place: int) -> bool:
        """Whether the key at this place of a batch is concerned."""
        return self.at is None or place in self.at


Schedule = Callable[[str, Sequence[BlockKey]], "Fault | None"]
"""Given the operation and its keys, the fault of this call."""


class SeededFaults:
    """Faults by chance, the same ones for the same seed whatever order threads run in.

    The choice depends on the seed, the operation, the first key, and how often the two met.
    """

    def __init__(self, seed: int, rate: float = 0.2, kinds: Iterable[FaultKind] | None = None) -> None:
        """Strike ``rate`` of all calls with one of ``kinds`` (default: all but hangs, delays and lies)."""
        left_out = {FaultKind.HANG, FaultKind.DELAY, FaultKind.LIE, FaultKind.REPLACE}
        self.seed = seed
        self.rate = rate
        self.kinds = tuple(kinds) if kinds is not None else tuple(k for k in FaultKind if k not in left_out)
        self._met: Counter[tuple[str, bytes]] = Counter()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SeededFaults(seed={self.seed}, rate={self.rate})"

    def __call__(self, operation: str, keys: Sequence[BlockKey]) -> Fault | None:
        first = keys[0] if keys else b""
        with self._lock:
            self._met[operation, first] += 1
            visit = self._met[operation, first]
        chance = random.Random(f"{self.seed} {operation} {first.hex()} {visit}")
        if not keys or chance.random() >= self.rate:
            return None
        kind = chance.choice(self.kinds)
        at = tuple(place for place in range(len(keys)) if chance.random() < 0.5) or (0,)
        status = chance.choice([Status.UNAVAILABLE, Status.TIMEOUT, Status.CORRUPT, Status.DENIED])
        return Fault(kind, at, status, bit=chance.randrange(1 << 24), seconds=chance.random())
