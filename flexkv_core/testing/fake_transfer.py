"""A transfer over ``FakeDevice``: copies run at once, or when the test says so, whole or by layer.

Threads: copies run in the thread that calls ``load``, ``store``, ``step`` or ends a forward pass;
use one thread.  Tickets may be asked from any.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv_core.buffers import HostRegion
from flexkv_core.errors import TransferError
from flexkv_core.transfer import BlockSpan, CopyJob, Fence, Ticket, Transfer

from .device import FakeDevice


@dataclass(eq=False)
class _Copy:
    ticket: Ticket
    is_load: bool
    generations: list[int]
    next_layer: int = 0


class FakeTransfer(Transfer):
    """Copies rows between a ``FakeDevice`` and host slots.

    ``manual=False``: a copy whose fence is passed runs inside ``load`` / ``store``; another one when
    the device's forward pass ends.  ``manual=True``: nothing moves before ``step`` or ``run_all``, so
    that a test scripts late copies; ``fail_next`` and ``refuse_next`` script failing ones.
    """

    def __init__(self, device: FakeDevice, *, manual: bool = False) -> None:
        """A transfer over ``device``; listens to the end of its forward passes."""
        self.device = device
        self.layout = device.layout
        self.manual = manual
        self.regions: list[HostRegion] = []
        self.history: list[Ticket] = []
        self.is_closed = False
        self._queue: list[_Copy] = []
        self._failures: list[tuple[int, bool]] = []
        self._refusals = 0
        device.on_progress.append(self._on_progress)

    @property
    def pending(self) -> list[Ticket]:
        """Copies that have not ended, in the order of submission."""
        return [copy.ticket for copy in self._queue]

    # -- the interface

    def register(self, region: HostRegion) -> None:
        self.regions.append(region)

    def fence(self) -> Fence:
        return self.device.fence()

    def load(self, job: CopyJob) -> Ticket:
        return self._submit(job, is_load=True)

    def store(self, job: CopyJob) -> Ticket:
        return self._submit(job, is_load=False)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._queue:
            self.device.end_forward(None)
            self.run_all()
        self.device.on_progress.remove(self._on_progress)

    # -- the script

    def step(self, layers: int | None = None) -> bool:
        """Run the oldest copy whose fence is passed, by ``layers`` layers or to its end.

        Returns:
            Whether there was one.
        """
        for copy in self._queue:
            if copy.ticket.job.after.is_passed():
                self._advance(copy, layers)
                return True
        return False

    def run_all(self) -> int:
        """Run every copy that can run; returns how many ended."""
        before = len(self._queue)
        while self.step():
            pass
        return before - len(self._queue)

    def fail_next(self, count: int = 1, *, after_layers: int = 0, retryable: bool = False) -> None:
        """The next ``count`` copies to end will end with an error, having moved ``after_layers`` layers."""
        self._failures += [(after_layers, retryable)] * count

    def refuse_next(self, count: int = 1) -> None:
        """The next ``count`` calls of ``load`` or ``store`` raise; nothing moves."""
        self._refusals += count

    # -- how

    def _submit(self, job: CopyJob, *, is_load: bool) -> Ticket:
        if self.is_closed:
            raise TransferError("the transfer is closed", job=job.number)
        if self._refusals:
            self._refusals -= 1
            raise TransferError("refused by the test", job=job.number)
        self._check_job(job)
        ticket = Ticket(job, job.num_tokens * self.layout.token_bytes, self.layout.num_layers)
        copy = _Copy(ticket, is_load, [self.device.generation[slot] for slot in job.device_slots])
        self._queue.append(copy)
        self.history.append(ticket)
        if not self.manual and job.after.is_passed():
            self._advance(copy, None)
        return ticket

    def _check_job(self, job: CopyJob) -> None:
        if job.num_tokens != len(job.device_slots) or not job.spans:
            self.device.violate(f"copy {job.number}: {job.num_tokens} tokens, {len(job.device_slots)} slots")
        for span in job.spans:
            if not 0 <= span.first < span.last <= span.num_tokens <= self.layout.block_tokens:
                self.device.violate(f"copy {job.number}: impossible span {span}")

    def _on_progress(self) -> None:
        if not self.manual:
            self.run_all()

    def _advance(self, copy: _Copy, layers: int | None) -> None:
        ticket = copy.ticket
        last = self.layout.num_layers if layers is None else copy.next_layer + layers
        fail_at, retryable = self._failures[0] if self._failures else (self.layout.num_layers + 1, False)
        try:
            while copy.next_layer < min(last, fail_at, self.layout.num_layers):
                self._copy_layer(copy, copy.next_layer)
                copy.next_layer += 1
                ticket.finish_layer(copy.next_layer - 1)
        except AssertionError as exc:
            self._end(copy, TransferError(f"violation: {exc}", job=ticket.job.number))
            raise
        if copy.next_layer >= fail_at:
            self._failures.pop(0)
            self._end(copy, TransferError("failed by the test", job=ticket.job.number, retryable=retryable))
        elif copy.next_layer >= self.layout.num_layers:
            self._end(copy, None)

    def _end(self, copy: _Copy, error: TransferError | None) -> None:
        self._queue.remove(copy)
        copy.ticket.finish(0.0, error)

    def _copy_layer(self, copy: _Copy, layer: int) -> None:
        for number, plane in enumerate(self.layout.planes):
            if plane.layer == layer:
                at = 0
                for span in copy.ticket.job.spans:
                    self._copy_span(copy, span, number, at)
                    at += span.last - span.first

    def _copy_span(self, copy: _Copy, span: BlockSpan, plane: int, at: int) -> None:
        size = self.layout.planes[plane].row_bytes
        base = self.layout.header_bytes + self.layout.plane_offsets[plane] * span.num_tokens
        for token in range(span.first, span.last):
            row = span.slot.view[base + token * size : base + (token + 1) * size]
            slot = copy.ticket.job.device_slots[at + token - span.first]
            generation = copy.generations[at + token - span.first]
            if copy.is_load:
                self.device.write(plane, int(slot), generation, row)
            else:
                row[:] = self.device.read(plane, int(slot), generation)
