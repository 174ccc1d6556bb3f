"""A tier whose values are compressed or encrypted on their way in, and turned back on their way out.

The tier behind it sees other bytes under the same keys, and knows nothing of it.  It is given buffers of
this wrapper's own, aligned as it wants them; the caller's are read or filled by the codec.  Both run in
the worker's thread, beside the I/O.

Threads: any, at most as many calls at once as there are buffers for; a further one waits for one.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..buffers import HostRegion
from ..keys import BlockKey
from ..layout import BlockLayout, round_up
from ..metrics import Metrics
from ..models import CodecConfig
from ..tier import BufferState, Outcome, Status, StoredBlock, Tier, failed, loaded
from .base import WrappedTier
from .encoding import ROOM_BYTES, Encoding, UndecodableError, stored_bytes

_BUFFER_BYTES = 16 << 20
"""About so much memory for each call at once; a longer batch goes in several turns."""


class CodecTier(WrappedTier):
    """Encodes what is stored and decodes what is loaded."""

    def __init__(
        self,
        inner: Tier,
        encoding: Encoding,
        config: CodecConfig,
        layout: BlockLayout,
        *,
        name: str,
        metrics: Metrics,
        num_calls: int,
    ) -> None:
        """Take buffers for ``num_calls`` loads and stores at once.

        Raises:
            HostMemoryError: they do not fit.
        """
        super().__init__(inner)
        can = inner.capabilities
        limit = max(1, can.max_value_bytes - ROOM_BYTES) if can.max_value_bytes else 0
        self.capabilities = replace(can, alignment_bytes=1, max_value_bytes=limit)
        self._encoding = encoding
        self._name = name
        self._metrics = metrics
        self._alignment = max(1, can.alignment_bytes)
        size = round_up(stored_bytes(config, layout), self._alignment)
        turn = max(1, min(can.max_batch, _BUFFER_BYTES // size))
        self._region = HostRegion(num_calls * turn * size)
        self._buffers: queue.LifoQueue[list[memoryview]] = queue.LifoQueue()
        for call in range(num_calls):
            at = [(call * turn + i) * size for i in range(turn)]
            self._buffers.put([self._region.view[start : start + size] for start in at])
        self._is_closed = False
        self._num_calls = num_calls
        inner.register(self._region)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [replace(o, num_bytes=0) if o.num_bytes else o for o in self.inner.lookup(keys)]

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self._turns() as buffers:
            if not buffers:
                return self.inner.lookup(keys)  # tells that it is closed
            for start in range(0, len(keys), len(buffers)):
                part = keys[start : start + len(buffers)]
                got = self.inner.load(part, buffers[: len(part)])
                outcomes += [
                    self._decode(key, buffer, outcome, view) if outcome.is_ok else outcome
                    for key, buffer, outcome, view in zip(
                        part, buffers, got, into[start : start + len(part)], strict=False
                    )
                ]
        return outcomes

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        outcomes = [failed(Status.INVALID, f"a value of {len(v)} B is longer than a block") for v in values]
        with self._turns() as buffers:
            if not buffers:
                return self.inner.lookup(keys)
            good = [i for i, value in enumerate(values) if len(value) + ROOM_BYTES <= len(buffers[0])]
            for start in range(0, len(good), len(buffers)):
                part = good[start : start + len(buffers)]
                self._store_turn(part, keys, values, buffers, outcomes)
        return outcomes

    def _store_turn(
        self,
        part: Sequence[int],
        keys: Sequence[BlockKey],
        values: Sequence[memoryview],
        buffers: Sequence[memoryview],
        outcomes: list[Outcome],
    ) -> None:
        encoded = [self._encode(keys[i], values[i], b) for i, b in zip(part, buffers, strict=False)]
        got = self.inner.store([keys[i] for i in part], encoded)
        self._count("store", [values[i] for i in part], encoded, got)
        for i, outcome in zip(part, got, strict=True):
            outcomes[i] = replace(outcome, num_bytes=len(values[i])) if outcome.is_ok else outcome

    def close(self) -> None:
        self._is_closed = True
        self.inner.close()
        for _ in range(self._num_calls):  # those in use are cleared when they come back
            try:
                self._buffers.get_nowait().clear()
            except queue.Empty:
                break
        for _ in range(self._num_calls):
            self._buffers.put([])
        self._region.close()

    def list_blocks(self) -> Iterator[list[StoredBlock]]:
        for batch in self.inner.list_blocks():
            yield [self._listed(block) for block in batch]

    # ---- one value -----------------------------------------------------------------------------

    def _encode(self, key: BlockKey, value: memoryview, buffer: memoryview) -> memoryview:
        length = self._encoding.encode(key, value, buffer)
        padded = round_up(length, self._alignment)
        buffer[length:padded] = bytes(padded - length)
        return buffer[:padded]

    def _decode(self, key: BlockKey, buffer: memoryview, outcome: Outcome, view: memoryview) -> Outcome:
        if outcome.buffer is not BufferState.COMPLETE or not 0 <= outcome.num_bytes <= len(buffer):
            return failed(
                Status.INVALID,
                f"the driver said OK, but {outcome.num_bytes} B, and the buffer {outcome.buffer.value}",
            )
        stored = buffer[: outcome.num_bytes]
        try:
            length = self._encoding.decode(key, stored, view)
        except UndecodableError as exc:
            self._metrics.count("codec_failures", tier=self._name, cause=exc.cause)
            status = Status.CORRUPT if exc.is_damaged else Status.MISS
            return failed(status, str(exc), BufferState.UNCERTAIN)
        self._count("load", [view[:length]], [stored], [outcome])
        return loaded(length)

    def _listed(self, block: StoredBlock) -> StoredBlock:
        try:
            front, length = self._encoding.decode_front(block.key, memoryview(block.head))
        except UndecodableError as exc:
            self._metrics.count("codec_failures", tier=self._name, cause=exc.cause)
            return replace(block, head=b"")
        return replace(block, num_bytes=length, head=front)

    def _count(
        self,
        operation: str,
        raw: Sequence[memoryview],
        stored: Sequence[memoryview],
        outcomes: Sequence[Outcome],
    ) -> None:
        for form, views in (("plain", raw), ("encoded", stored)):
            total = sum(len(view) for view, o in zip(views, outcomes, strict=True) if o.is_ok)
            if total:
                self._metrics.count("codec_bytes", total, tier=self._name, operation=operation, form=form)

    @contextmanager
    def _turns(self) -> Iterator[list[memoryview]]:
        buffers = self._buffers.get()
        try:
            yield buffers
        finally:
            self._buffers.put([] if self._is_closed else buffers)
