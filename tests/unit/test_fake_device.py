"""The CPU simulation parts find what they are there to find."""

import pytest

from flexkv_core import BlockSpan, CopyJob, HostRegion, PassedFence, SlotPool, TransferError
from flexkv_core.testing import (
    DeviceViolation,
    FakeClock,
    FakeDevice,
    FakeTransfer,
    ManualExecutor,
    small_layout,
)
from flexkv_core.testing.values import kv_payload, kv_sums

LAYOUT = small_layout(block_tokens=4)


class Rig:
    """A device, a transfer and one host slot."""

    def __init__(self, *, manual: bool = False) -> None:
        self.device = FakeDevice(LAYOUT, 32)
        self.transfer = FakeTransfer(self.device, manual=manual)
        self.region = HostRegion(2 * LAYOUT.slot_bytes)
        pool = SlotPool(self.region, LAYOUT.slot_bytes)
        self.slot = pool.slot(pool.take(1)[0])
        self.device_slots = self.device.allocate(4)

    def job(self, *, after=None, device_slots=None, first=0, last=4, num_tokens=4) -> CopyJob:
        slots = self.device_slots[: last - first] if device_slots is None else device_slots
        spans = [BlockSpan(self.slot, num_tokens, first, last)]
        return CopyJob(1, spans, slots, after or self.transfer.fence())


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def manual():
    return Rig(manual=True)


def test_round_trip(rig):
    tokens = [5, 6, 7, 8]
    rig.device.forward(rig.device_slots, tokens)
    assert rig.transfer.store(rig.job()).is_ok
    payload = rig.slot.view[LAYOUT.header_bytes :][: LAYOUT.block_bytes]
    assert bytes(payload) == kv_payload(LAYOUT, kv_sums(tokens))
    target = rig.device.allocate(4)
    assert rig.transfer.load(rig.job(device_slots=target)).is_ok
    rig.device.check(target, tokens)
    rig.device.assert_clean()


def test_kv_depends_on_the_whole_prefix(rig):
    rig.device.forward(rig.device_slots, [5, 6, 7, 8])
    with pytest.raises(AssertionError, match="token 1 .*wrong KV"):
        rig.device.check(rig.device_slots, [5, 1, 7, 8])
    with pytest.raises(AssertionError, match="token 0 .*never written"):
        rig.device.check(rig.device.allocate(4), [5, 6, 7, 8])


def test_store_waits_for_the_forward_that_writes_its_slots(rig):
    rig.device.begin_forward(rig.device_slots, [1, 2, 3, 4])
    ticket = rig.transfer.store(rig.job())
    assert not ticket.is_over
    assert not ticket.job.after.wait(0)
    rig.device.end_forward()
    assert ticket.is_ok


def test_missing_fence_is_a_violation(rig):
    rig.device.begin_forward(rig.device_slots, [1, 2, 3, 4])
    with pytest.raises(DeviceViolation, match="forward pass may still write"):
        rig.transfer.load(rig.job(after=PassedFence()))
    with pytest.raises(DeviceViolation):
        rig.device.assert_clean()
    rig.device.end_forward()


def test_late_copy_to_a_freed_slot_is_a_violation(manual):
    manual.device.forward(manual.device_slots, [1, 2, 3, 4])
    ticket = manual.transfer.store(manual.job())
    manual.device.free(manual.device_slots)
    manual.device.allocate(31)
    with pytest.raises(DeviceViolation, match="freed and given away"):
        manual.transfer.step()
    assert ticket.is_over
    assert not ticket.is_ok


def test_slot_freed_twice_is_a_violation(rig):
    rig.device.free(rig.device_slots)
    with pytest.raises(DeviceViolation, match="freed twice"):
        rig.device.free(rig.device_slots)


def test_layers_become_ready_one_by_one(manual):
    manual.device.forward(manual.device_slots, [1, 2, 3, 4])
    ticket = manual.transfer.load(manual.job())
    assert [ticket.is_layer_ready(0), ticket.is_layer_ready(1)] == [False, False]
    assert manual.transfer.step(layers=1)
    assert [ticket.is_layer_ready(0), ticket.is_layer_ready(1), ticket.is_over] == [True, False, False]
    assert manual.transfer.step(layers=1)
    assert ticket.is_ok
    assert not manual.transfer.step()


def test_scripted_failures(manual):
    manual.device.forward(manual.device_slots, [1, 2, 3, 4])
    manual.transfer.fail_next(after_layers=1, retryable=True)
    ticket = manual.transfer.store(manual.job())
    assert manual.transfer.run_all() == 1
    assert ticket.error is not None
    assert ticket.error.retryable
    assert not ticket.is_layer_ready(0)
    manual.transfer.refuse_next()
    with pytest.raises(TransferError, match="refused"):
        manual.transfer.store(manual.job())
    assert manual.transfer.pending == []


def test_close_ends_every_copy(manual):
    manual.device.begin_forward(manual.device_slots, [1, 2, 3, 4])
    ticket = manual.transfer.store(manual.job())
    manual.transfer.close()
    manual.transfer.close()
    assert ticket.is_ok
    with pytest.raises(TransferError, match="closed"):
        manual.transfer.store(manual.job())


def test_clock_and_executor_move_when_told():
    clock = FakeClock(10.0)
    clock.advance(2.5)
    assert clock() == 12.5
    executor = ManualExecutor()
    first, second = executor.submit(divmod, 7, 2), executor.submit(divmod, 7, 0)
    assert not first.done()
    assert executor.run_all() == 2
    assert first.result() == (3, 1)
    assert isinstance(second.exception(), ZeroDivisionError)
    third = executor.submit(divmod, 1, 1)
    executor.shutdown(cancel_futures=True)
    assert third.cancelled()
    with pytest.raises(RuntimeError):
        executor.submit(divmod, 1, 1)
