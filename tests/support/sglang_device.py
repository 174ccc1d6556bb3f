"""The device of the scheduler model in ``sglang_world``: SGLang's pools, a stream that can lag, fake KV."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from flexkv_core import Fence, Ticket, TransferError
from flexkv_core.transfers.planes import DevicePlanes
from flexkv_core.transfers.torch_copy import TorchTransfer
from tests.support.waiting import DEADLINE_S

LAYERS, HEADS, HEAD_DIM = 2, 2, 8


class Stream:
    """The device's forward stream: passes run in order, at once, or when the test lets them."""

    def __init__(self) -> None:
        self.lags = False
        self.is_running = False
        self.queued = 0
        self.done = 0
        self.behind: list[Ticket] = []
        self.layers_behind: list[tuple[int, int, Ticket]] = []
        self._passes: deque[Callable[[], None]] = deque()

    def launch(self, run: Callable[[], None]) -> None:
        self.queued += 1
        self._passes.append(run)
        if not self.lags:
            self.run()

    def run(self, count: int | None = None) -> None:
        """Run the oldest ``count`` passes that are queued; default: all."""
        for _ in range(len(self._passes) if count is None else count):
            for ticket in self.behind:
                if not ticket.wait(DEADLINE_S):
                    raise AssertionError("the stream waits for a copy that does not end")
            self.behind.clear()
            self.is_running = True
            try:
                self._passes.popleft()()
            finally:
                self.is_running = False
            self.done += 1

    def reach(self, layer: int) -> None:
        """The pass that runs reads ``layer``: what it was ordered behind must be there."""
        for number, at, ticket in self.layers_behind:
            if number <= self.done + 1 and at <= layer and not ticket.wait_layer(at, DEADLINE_S):
                assert ticket.error is not None, "the stream waits for a layer that does not come"

    def order(self, layer: int, ticket: Ticket) -> bool:
        """The pass that runs, or is launched next, reads ``layer`` only when the copy has brought it."""
        self.layers_behind.append((self.queued + (not self.is_running), layer, ticket))
        return True

    def abandon(self) -> None:
        """Forget the passes that are queued: nobody looks at their results any more."""
        self._passes.clear()
        self.done = self.queued

    def fence(self) -> StreamFence:
        return StreamFence(self, self.queued)


class StreamFence(Fence):
    """Passed once all passes have run that were queued when it was taken."""

    def __init__(self, stream: Stream, number: int) -> None:
        self._stream = stream
        self._number = number

    def is_passed(self) -> bool:
        return self._stream.done >= self._number

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not self.is_passed() and time.monotonic() < end:
            time.sleep(0.0002)
        return self.is_passed()


class GatedTransfer(TorchTransfer):
    """The portable transfer, whose copies wait while a gate is shut, whatever the stream does.

    Attributes:
        holds_loads, holds_stores: The gates.
        layers: Loads stop before this layer.
        fails_at: The next load fails at this layer.
        refuses: So many of the next copies are refused.
        orders: Its tickets order the stream behind them, as on a device with streams.
    """

    def __init__(self, planes: DevicePlanes, stream: Stream) -> None:
        self.holds_loads = False
        self.holds_stores = False
        self.layers = LAYERS
        self.fails_at: int | None = None
        self.refuses = 0
        self.orders = False
        self._stream = stream
        self._each = len(planes.planes) // LAYERS
        super().__init__(planes, fence=stream.fence)
        self._plain_load, self._device.load = self._device.load, self._load_rows  # type: ignore[method-assign]  # watched

    def _load_rows(self, plane: int, *rows: Any) -> None:
        layer = plane // self._each
        while layer >= self.layers:
            time.sleep(0.0002)
        if self.fails_at == layer:
            self.fails_at = None
            raise OSError("the device has failed")
        self._plain_load(plane, *rows)

    def _may_begin(self, copy: Any) -> bool:
        if self.holds_loads if copy.is_load else self.holds_stores:
            time.sleep(0.001)  # the worker asks again at once, for the fence itself may be passed
            return False
        return super()._may_begin(copy)

    def _submit(self, job: Any, *, is_load: bool) -> Any:
        if self.refuses:
            self.refuses -= 1
            raise TransferError("refused by the test", job=job.number)
        ticket = super()._submit(job, is_load=is_load)
        if self.orders:
            ticket.order_behind = lambda _: self._stream.behind.append(ticket) is None
            ticket.order_layer = lambda layer, _: self._stream.order(layer, ticket)
        return ticket

    def close(self) -> None:
        self.holds_loads = self.holds_stores = False
        self.layers = LAYERS
        super().close()


def kv_rows(hashes: Sequence[int], plane: int, row_bytes: int) -> np.ndarray[Any, Any]:
    """``uint8 [len(hashes), row_bytes]``: what the model computes for these tokens."""
    base = np.array(hashes, dtype=np.uint64)[:, None]
    with np.errstate(over="ignore"):
        rows = base * np.uint64(2 * plane + 1) + np.arange(row_bytes // 8, dtype=np.uint64)
    return rows.view(np.uint8)


def make_pool(kind: str, size: int, page: int) -> Any:
    common_args = {
        "size": size,
        "page_size": page,
        "dtype": torch.float32,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=24, qk_rope_head_dim=8, **common_args)
    return MHATokenToKVPool(head_num=HEADS, head_dim=HEAD_DIM, **common_args)


def pool_planes(pool: Any, kind: str) -> list[np.ndarray[Any, Any]]:
    """The pool's tensors as ``uint8 [slots, row_bytes]``, by layer, k before v."""
    names = ["kv_buffer"] if kind == "mla" else ["k_buffer", "v_buffer"]
    tensors = [getattr(pool, name)[layer] for layer in range(LAYERS) for name in names]
    return [tensor.reshape(tensor.shape[0], -1).view(torch.uint8).numpy() for tensor in tensors]
