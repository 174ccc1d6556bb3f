"""A device that runs its streams in any order that events allow, in host memory.

It is as asynchronous as a real one: work runs on a thread of its own, streams are interleaved at
random (by seed), a wait for an event that was never recorded does nothing, and recording an event
again moves it.  It is stricter: a launch that reads host memory that is not pinned, or a copy
across two pinned chunks, is a fault.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from flexkv_core.transfers.gpu import Event, Gpu, Move, PinError
from flexkv_core.transfers.regions import Int64
from flexkv_core.transfers.tables import SPAN_FIELDS
from tests.support.waiting import DEADLINE_S


class SimulatedStream:
    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self.work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()


class SimulatedEvent(Event):
    def __init__(self, gpu: SimulatedGpu, *, is_timed: bool) -> None:
        self._gpu = gpu
        self.is_timed = is_timed
        self.recorded = 0
        self.passed = 0
        self.passed_at = 0.0

    def record(self, stream: SimulatedStream) -> None:
        self.recorded += 1
        number = self.recorded

        def arrive() -> None:
            self.passed_at = perf_counter()
            self.passed = max(self.passed, number)

        self._gpu.run(stream, arrive)

    def query(self) -> bool:
        self._gpu.raise_if_dead()
        return self.passed >= self.recorded

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        assert self.is_timed, "not timed"
        assert end_event.is_timed, "not timed"
        assert self.query(), "not passed"
        assert end_event.query(), "not passed"
        return 1e3 * (end_event.passed_at - self.passed_at)

    def synchronize(self) -> None:
        wanted = self.recorded
        self._gpu.block_until(lambda: self.passed >= wanted)


class Memory:
    def __init__(self, num_bytes: int) -> None:
        self.data = np.full(num_bytes + 256, 0xEE, dtype=np.uint8)
        self.at = -self.data.ctypes.data % 256

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data) + self.at


class SimulatedTable(Memory):
    """Words of the host, which the device reads when the sending runs, and their place there."""

    def __init__(self, num_words: int) -> None:
        super().__init__(8 * num_words)
        self.host = np.full(num_words, -7, dtype=np.int64)

    def write(self, at: int, words: np.ndarray) -> None:
        content = np.ascontiguousarray(words, dtype=np.int64).view(np.uint8)
        begin = self.at + 8 * at
        self.data[begin : begin + content.size] = content

    def read(self, at: int) -> int:
        return int(self.data[self.at + 8 * at : self.at + 8 * at + 8].view(np.int64)[0])


class SimulatedGpu(Gpu):
    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.changed = threading.Condition()
        self.streams: list[SimulatedStream] = []
        self.is_open = True
        self.is_held = False
        self.captures = False
        self.binds = True
        self.holds_tensors = False
        self.dead: Exception | None = None
        self.pinned: dict[int, int] = {}
        self.most_pins: int | None = None
        self.pin_status = 2
        self.log: list[str] = []
        self.fail_after: int | None = None
        self.fault: BaseException = RuntimeError("launch refused")
        self.thread = threading.Thread(target=self._work, name="simulated-gpu", daemon=True)
        self.thread.start()

    # --- what a test does with it

    def hold(self) -> None:
        """Nothing runs until ``go``."""
        with self.changed:
            self.is_held = True

    def go(self) -> None:
        with self.changed:
            self.is_held = False
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.is_open = False
            self.changed.notify_all()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        if self.dead is None:
            assert not any(stream.work for stream in self.streams)

    def run(self, stream: SimulatedStream, action: Callable[[], None]) -> None:
        with self.changed:
            self.raise_if_dead()
            stream.work.append((lambda: True, action))
            self.changed.notify_all()

    def raise_if_dead(self) -> None:
        if self.dead is not None:
            raise RuntimeError("the simulated device has failed") from self.dead

    def block_until(self, is_so: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: is_so() or self.dead is not None, DEADLINE_S)
        self.raise_if_dead()

    # --- Gpu

    def bind(self) -> None:
        return

    def is_bound(self) -> bool:
        return self.binds and not self.captures

    def stream(self) -> SimulatedStream:
        stream = SimulatedStream(self)
        with self.changed:
            self.streams.append(stream)
        return stream

    def event(self, *, timed: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self, is_timed=timed)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        wanted = event.recorded
        with self.changed:
            self.raise_if_dead()
            stream.work.append((lambda: event.passed >= wanted, lambda: None))
            self.changed.notify_all()

    def drain(self, stream: SimulatedStream) -> None:
        self.block_until(lambda: not stream.work)

    def allocate(self, num_bytes: int, stream: SimulatedStream) -> Memory:
        return Memory(num_bytes)

    def table(self, num_words: int, stream: SimulatedStream) -> SimulatedTable:
        return SimulatedTable(num_words)

    def send(
        self, stream: SimulatedStream, table: SimulatedTable, num_words: int, *, may_block: bool
    ) -> None:
        self.run(stream, lambda: table.write(0, table.host[:num_words]))

    def put(self, stream: SimulatedStream, table: SimulatedTable, at: int, words: torch.Tensor) -> None:
        self.run(stream, lambda: table.write(at, words.numpy()))

    def word(self, table: SimulatedTable, at: int) -> int:
        return table.read(at)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.holds_tensors

    def copy_run(
        self, stream: SimulatedStream, target: int, source: int, num_bytes: int, *, may_block: bool
    ) -> None:
        self._count()
        self._check_chunks(target, source, num_bytes, is_pinned=False)
        self.log.append("copy")
        self.run(stream, lambda: ctypes.memmove(target, source, num_bytes) and None)

    def copy(self, stream: SimulatedStream, runs: Int64, *, is_pinned: bool, may_block: bool) -> None:
        self._count()
        assert runs.flags.c_contiguous
        copies = runs.T.tolist()
        for target, source, num_bytes in copies:
            self._check_chunks(target, source, num_bytes, is_pinned=is_pinned)
        self.log += ["copy"] * len(copies)
        self.rng.shuffle(copies)
        for target, source, num_bytes in copies:
            self.run(stream, lambda t=target, s=source, n=num_bytes: ctypes.memmove(t, s, n) and None)

    def _check_chunks(self, target: int, source: int, num_bytes: int, *, is_pinned: bool) -> None:
        touched = [
            c for c, size in self.pinned.items() if c < max(target, source) + num_bytes and c + size > 0
        ]
        for chunk in touched:
            for address in (target, source):
                assert not address < chunk < address + num_bytes, "a copy across two pinned chunks"
        ends = (range(c, c + size) for c, size in self.pinned.items())
        assert not is_pinned or any(target in chunk or source in chunk for chunk in ends), "not pinned"

    def move(self, stream: SimulatedStream, move: Move, *, may_block: bool) -> None:
        self._count()
        self.log.append("staged" if move.is_staged else "direct")
        self.run(stream, lambda: self._execute(move))

    def pin(self, address: int, num_bytes: int) -> None:
        if self.most_pins is not None and len(self.pinned) >= self.most_pins:
            raise PinError(self.pin_status, "simulated")
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        with self.changed:
            assert not any(stream.work for stream in self.streams), "unpinned while work is queued"
        del self.pinned[address]

    def is_capturing(self) -> bool:
        return self.captures

    # --- inside

    def _count(self) -> None:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise self.fault

    def _work(self) -> None:
        while True:
            with self.changed:
                ready = self._ready()
                while not ready:
                    if not self.is_open:
                        return
                    self.changed.wait()
                    ready = self._ready()
                stream = self.rng.choice(ready)
                action = stream.work[0][1]
            try:
                action()
            except Exception as fault:
                with self.changed:
                    self.dead = fault
                    self.changed.notify_all()
                return
            with self.changed:
                stream.work.popleft()
                self.changed.notify_all()

    def _ready(self) -> list[SimulatedStream]:
        if self.is_held and self.is_open:
            return []
        return [stream for stream in self.streams if stream.work and stream.work[0][0]()]

    def _execute(self, move: Move) -> None:
        word = move.word_bytes
        assert word in (1, 2, 4, 8)
        planes = _table(move.planes, (move.first_plane + move.num_planes) * 4).reshape(-1, 4)[
            move.first_plane :
        ]
        spans = _table(move.job, (move.first_span + move.num_spans) * SPAN_FIELDS).reshape(-1, SPAN_FIELDS)
        spans = spans[move.first_span :]
        for payload, num_tokens, first, length, slot_at, before in spans.tolist():
            slots = _table(move.job + 8 * (move.slots_at + slot_at), length).tolist()
            base = payload
            if move.is_staged:
                base = move.ring + word * (
                    (before - int(spans[0, 5])) * move.group_words - num_tokens * move.offset0
                )
            for address, stride, words, offset in planes.tolist():
                assert length * words <= move.longest_run
                for token, slot in enumerate(slots):
                    if not 0 <= slot < move.num_slots:
                        ctypes.c_int64.from_address(move.job + 8 * move.fault_at).value = 1
                        continue
                    linear = base + word * (num_tokens * offset + (first + token) * words)
                    page = address + word * slot * stride
                    target, source = (page, linear) if move.to_device else (linear, page)
                    if not move.is_staged:
                        assert any(c <= linear < c + size for c, size in self.pinned.items()), "not pinned"
                    ctypes.memmove(target, source, words * word)


def _table(address: int, count: int) -> Any:
    if count == 0:
        return np.empty(0, dtype=np.int64)
    return np.frombuffer((ctypes.c_int64 * count).from_address(address), dtype=np.int64).copy()
