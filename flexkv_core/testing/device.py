"""A KV pool without a device: rows in plain memory, a generation for each slot, forward passes on call.

It finds what a real device hides: a slot read before the forward pass wrote it, written while one
may still write it, or touched after it was freed and given to somebody else.

Threads: one, the test's.  ``violations`` may be read by any.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flexkv_core.layout import BlockLayout
from flexkv_core.transfer import Fence

from .values import kv_row, kv_sums

POISON = 0xDB
"""Fills freed rows, so that whoever reads one is seen."""


class DeviceViolation(AssertionError):
    """Somebody touched device memory when it was not theirs."""


@dataclass(eq=False)
class _Forward:
    number: int
    slots: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)


class DeviceFence(Fence):
    """Passed when every forward pass that was begun before it has ended."""

    def __init__(self, device: FakeDevice, begun: int) -> None:
        self._device = device
        self._begun = begun

    def is_passed(self) -> bool:
        return self._device.forwards_ended >= self._begun

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - time stands still: nobody else would end a forward
        return self.is_passed()


class FakeDevice:
    """``num_slots`` token slots in every plane of ``layout``.  Slot 0 is the engine's dummy."""

    def __init__(self, layout: BlockLayout, num_slots: int = 1024, *, weights: int = 0) -> None:
        """A pool, all free.  ``weights`` seeds the KV that forward passes write."""
        self.layout = layout
        self.num_slots = num_slots
        self.weights = weights
        self.planes = [bytearray([POISON]) * (num_slots * plane.row_bytes) for plane in layout.planes]
        self.generation = [0] * num_slots
        self.violations: list[str] = []
        self.forwards_ended = 0
        self.on_progress: list[Callable[[], None]] = []
        self._forwards: deque[_Forward] = deque()
        self._begun = 0
        self._free = list(range(num_slots - 1, 0, -1))
        self._is_taken = bytearray(num_slots)

    # -- slots

    @property
    def num_free(self) -> int:
        """Slots that ``allocate`` can still give."""
        return len(self._free)

    def allocate(self, count: int) -> array[int]:
        """``count`` free slots, in any order.  Raises MemoryError if there are fewer."""
        if count > len(self._free):
            raise MemoryError(f"{count} device slots wanted, {len(self._free)} free")
        slots = array("q", [self._free.pop() for _ in range(count)])
        for slot in slots:
            self._is_taken[slot] = 1
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back: their rows are poisoned and their generation rises."""
        for slot in slots:
            if not self._is_taken[slot]:
                self.violate(f"device slot {slot} freed twice")
            self._is_taken[slot] = 0
            self.generation[slot] += 1
            for plane, rows in zip(self.layout.planes, self.planes, strict=True):
                rows[slot * plane.row_bytes : (slot + 1) * plane.row_bytes] = (
                    bytes([POISON]) * plane.row_bytes
                )
            self._free.insert(0, slot)

    # -- forward passes

    def forward(self, slots: Sequence[int], tokens: Sequence[int], num_cached: int = 0) -> None:
        """A whole forward pass: write the KV of ``tokens[num_cached:]`` into ``slots[num_cached:]``."""
        self.begin_forward(slots, tokens, num_cached)
        self.end_forward(None)

    def begin_forward(self, slots: Sequence[int], tokens: Sequence[int], num_cached: int = 0) -> None:
        """Queue a forward pass that has not written yet; ``end_forward`` lets it."""
        self._begun += 1
        sums = kv_sums(tokens, self.weights)[num_cached:]
        self._forwards.append(_Forward(self._begun, list(slots[num_cached : len(tokens)]), sums))

    def end_forward(self, count: int | None = 1) -> None:
        """End the oldest ``count`` forward passes (None: all), then tell ``on_progress``."""
        for _ in range(len(self._forwards) if count is None else count):
            forward = self._forwards.popleft()
            for slot, row_sum in zip(forward.slots, forward.sums, strict=True):
                for number in range(len(self.planes)):
                    self._put(number, slot, kv_row(row_sum, number, self.layout.planes[number].row_bytes))
            self.forwards_ended = forward.number
        for tell in list(self.on_progress):
            tell()

    def fence(self) -> DeviceFence:
        """A fence behind all forward passes begun so far."""
        return DeviceFence(self, self._begun)

    # -- rows, as a transfer sees them

    def read(self, plane: int, slot: int, generation: int) -> bytes:
        """One row.  A violation if the slot changed hands or a forward pass has yet to write it."""
        self._check(slot, generation, "read")
        size = self.layout.planes[plane].row_bytes
        return bytes(self.planes[plane][slot * size : (slot + 1) * size])

    def write(self, plane: int, slot: int, generation: int, row: bytes | memoryview) -> None:
        """Set one row.  A violation as for ``read``."""
        self._check(slot, generation, "written")
        self._put(plane, slot, row)

    def check(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Assert that ``slots`` hold the KV of ``tokens``, in order, in every plane."""
        self.check_from(slots, tokens, 0)

    def check_from(self, slots: Sequence[int], tokens: Sequence[int], start: int) -> None:
        """As ``check``, for the tokens from ``start`` on; slots before are not looked at."""
        pairs = list(enumerate(zip(slots, kv_sums(tokens, self.weights), strict=False)))
        for at, (slot, row_sum) in pairs[start:]:
            for number, plane in enumerate(self.layout.planes):
                size = plane.row_bytes
                got = self.planes[number][slot * size : (slot + 1) * size]
                if got != kv_row(row_sum, number, size):
                    raise AssertionError(
                        f"token {at} (device slot {slot}) holds wrong KV in layer {plane.layer}.{plane.kind}"
                        + (": never written" if set(got) == {POISON} else "")
                    )

    def assert_clean(self) -> None:
        """Raise DeviceViolation if anything was touched out of turn so far."""
        if self.violations:
            raise DeviceViolation("; ".join(self.violations))

    def _put(self, plane: int, slot: int, row: bytes | memoryview) -> None:
        size = self.layout.planes[plane].row_bytes
        self.planes[plane][slot * size : (slot + 1) * size] = row

    def _check(self, slot: int, generation: int, verb: str) -> None:
        if not 0 < slot < self.num_slots or not self._is_taken[slot]:
            self.violate(f"device slot {slot} {verb} while it is free")
        if self.generation[slot] != generation:
            self.violate(f"device slot {slot} {verb} after it was freed and given away")
        if any(slot in forward.slots for forward in self._forwards):
            self.violate(f"device slot {slot} {verb} while a forward pass may still write it")

    def violate(self, what: str) -> None:
        """Note that something was done wrong, for ``assert_clean``, and raise DeviceViolation."""
        self.violations.append(what)
        raise DeviceViolation(what)
