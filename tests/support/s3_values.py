"""Values to keep in a bucket, and what became of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from flexkv_core import Outcome, Status, TierTimeoutError


def values(count: int, num_bytes: int = 100_000, seed: int = 1) -> tuple[list[bytes], list[memoryview]]:
    """Keys, and a value for each."""
    chance = random.Random(seed)
    keys = [chance.randbytes(32) for _ in range(count)]
    return keys, [memoryview(chance.randbytes(num_bytes)) for _ in range(count)]


def buffers(count: int, num_bytes: int = 1 << 20) -> list[memoryview]:
    """Room to load into."""
    return [memoryview(bytearray(num_bytes)) for _ in range(count)]


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


def tried(call: Callable[[], Sequence[Outcome]]) -> list[Status]:
    """What a call of a tier of little patience met: one TIMEOUT where the whole call ended in one."""
    try:
        return statuses(call())
    except TierTimeoutError:
        return [Status.TIMEOUT]
