"""The ring hands out room that nobody uses any more, or names whom to wait for."""

from __future__ import annotations

from collections import deque
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from flexkv_core.transfers.gpu import Event
from flexkv_core.transfers.ring import Ring


class Mark:
    """An event that knows behind which piece it was recorded last."""

    def __init__(self) -> None:
        self.piece = -1


@given(
    capacity=st.integers(1, 12).map(lambda pages: pages * 256),
    sizes=st.lists(st.integers(1, 3000), max_size=150),
)
def test_room_is_free_or_its_last_user_is_named(capacity: int, sizes: list[int]) -> None:
    """Pieces end in order: who waits for one has waited for all before it."""
    ring = Ring(capacity, lambda: cast("Event", Mark()))
    live: deque[tuple[int, int, int]] = deque()
    for number, size in enumerate(min(size, capacity) for size in sizes):
        at, behind = ring.place(size)
        if behind is not None:
            last = cast("Mark", behind).piece
            while live and live[0][2] <= last:
                live.popleft()
        assert at % 256 == 0
        assert at + size <= capacity
        assert all(at + size <= begin or end <= at for begin, end, _ in live)
        live.append((at, at + size, number))
        cast("Mark", ring.keep()).piece = number
    assert len(ring._live) <= 64
