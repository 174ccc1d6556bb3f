"""Counters and waits of layerwise loads, over real eventfds, tickets and a fake device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from flexkv_core.errors import TransferError
from flexkv_core.layerwise.counters import LayerCounters
from flexkv_core.layerwise.waits import LayerWaits
from flexkv_core.transfer import CopyJob, PassedFence, Ticket
from tests.support.waiting import DEADLINE_S, wait_until

LAYERS = 4
FOREVER_S = 10 * DEADLINE_S
"""A time-out that must not be what ends a wait."""


class Streams(Ticket):
    """A ticket of a device with streams: layers are ordered once their pieces are submitted."""

    submitted = 0

    def order_layer(self, layer: int, timeout_s: float) -> bool:  # noqa: ARG002 - it knows at once
        return self.submitted > layer and self.error is None


class Queued(Ticket):
    """A ticket of a device whose pieces are queued late: ``order_layer`` waits for that, if it may."""

    submitted = 0

    def order_layer(self, layer: int, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.submitted > layer or self.is_over, timeout_s)
            return self.submitted > layer and self.error is None

    def submit(self, num_layers: int) -> None:
        with self._changed:
            self.submitted = num_layers
            self._changed.notify_all()


def make_ticket(number: int = 1, kind: type[Ticket] = Ticket) -> Ticket:
    return kind(CopyJob(number, [], [], PassedFence(), layerwise=True), 0, LAYERS)


@pytest.fixture
def counters() -> Iterator[LayerCounters]:
    made = LayerCounters(LAYERS)
    yield made
    made.close()
    made.close()


@pytest.fixture
def waits(counters: LayerCounters) -> LayerWaits:
    return LayerWaits(counters, timeout_s=DEADLINE_S, rank=3)


def taken(counters: LayerCounters) -> int:
    """How many counters cannot be taken."""
    return sum(not counter.is_idle for counter in counters.counters)


# ---- counters -------------------------------------------------------------------------------------


def test_a_unit_for_each_load_and_layer(counters: LayerCounters) -> None:
    counter = counters.take()
    assert counter is not None
    first, second = counter.add(), counter.add()
    first(LAYERS)
    assert not counter.wait(0, 0.01), "HS-5: one of two loads has layer 0"
    second(1)
    assert counter.wait(0, 0.01)
    assert not counter.wait(1, 0.01)
    second(3)
    assert counter.wait(2, 0.01)
    assert not counter.wait(3, 0.01)


def test_layers_may_be_skipped_by_the_reader(counters: LayerCounters) -> None:
    """R83: to wait for a layer is to wait for all before it, in one wait as for a graph, or in several."""
    counter = counters.take()
    assert counter is not None
    signal = counter.add()
    signal(2)
    assert not counter.wait(3, 0.01)
    signal(4)
    assert counter.wait(3, 0.01)
    assert counter.wait(0, 0.0)


def test_counters_are_taken_in_turn_and_only_when_idle(counters: LayerCounters) -> None:
    """R82: three, then none until a load has ended."""
    made = [counters.take() for _ in range(3)]
    assert [counter.index for counter in made if counter] == [0, 1, 2]
    for counter in made:
        assert counter is not None
        counter.add()
    assert not counters.has_idle
    assert counters.take() is None
    assert made[1] is not None
    made[1].release()
    assert counters.take() is made[1]


def test_a_counter_is_emptied_when_it_is_taken_again(counters: LayerCounters) -> None:
    """HS-10: units that nobody took do not satisfy the next load."""
    counter = counters.counters[0]
    counter.take()
    counter.add()(LAYERS)
    assert counter.wait(0, 0.01)
    counter.release()
    counter.take()
    counter.add()
    for layer in range(LAYERS):
        assert not counter.wait(layer, 0.0)


def test_a_late_signal_of_an_earlier_use_adds_nothing(counters: LayerCounters) -> None:
    """HS-9: without the generation the wait below would be satisfied."""
    counter = counters.counters[0]
    counter.take()
    stale = counter.add()
    stale(1)
    counter.release()
    counter.take()
    fresh = counter.add()
    stale(LAYERS)
    assert not counter.wait(0, 0.01)
    assert counter.generation == fresh.generation == stale.generation + 1
    stale.generation = counter.generation
    stale._told = 0
    stale(LAYERS)
    assert counter.wait(0, 0.01), "the hazard: a stale signal of the right generation would count"


def test_signals_from_threads_while_counters_turn() -> None:
    """Seeded only by the scheduler of this machine: whatever the order, no wait is satisfied early."""
    counters = LayerCounters(2, num_counters=1)
    (counter,) = counters.counters
    for _ in range(200):
        counter.take()
        signal = counter.add()
        early = threading.Thread(target=signal, args=(2,))
        early.start()
        assert counter.wait(0, DEADLINE_S)
        counter.release()
        counter.take()  # the thread may still be adding layer 1
        counter.add()
        assert not counter.wait(0, 0.0)
        assert not counter.wait(1, 0.0)
        early.join()
        assert not counter.wait(1, 0.0)
        counter.release()
    counters.close()


def test_descriptors_are_those_of_the_seed(counters: LayerCounters) -> None:
    """Semaphores that do not block: each read takes one unit, and an empty one says so."""
    fd = counters.counters[0].descriptors[0]
    os.eventfd_write(fd, 2)
    assert (os.eventfd_read(fd), os.eventfd_read(fd)) == (1, 1)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)
    assert not os.get_inheritable(fd)


def test_a_signal_after_the_end_does_nothing() -> None:
    counters = LayerCounters(LAYERS)
    counter = counters.take()
    assert counter is not None
    signal = counter.add()
    counters.close()
    signal(LAYERS)


# ---- tickets --------------------------------------------------------------------------------------


def test_a_listener_hears_of_layers_and_of_the_end() -> None:
    ticket, heard = make_ticket(), []
    ticket.finish_layer(0)
    ticket.listen(heard.append)
    ticket.finish_layer(2)
    ticket.finish(0.1)
    assert heard == [1, 3, LAYERS]
    late: list[int] = []
    ticket.listen(late.append)
    assert late == [LAYERS]


def test_a_failed_copy_wakes_whoever_waits() -> None:
    """HU-28: errors reach the descriptors."""
    ticket, heard = make_ticket(), []
    ticket.listen(heard.append)
    ticket.finish(0.0, TransferError("no", job=1))
    assert heard == [0, LAYERS]


# ---- waits ----------------------------------------------------------------------------------------


def test_a_pass_waits_for_each_layer(waits: LayerWaits) -> None:
    ticket = make_ticket()
    waits.open(ticket, 7)
    passed: list[int] = []

    def read() -> None:
        for layer in range(LAYERS):
            waits.wait_until(layer)
            passed.append(layer)

    reader = threading.Thread(target=read)
    reader.start()
    for layer in range(LAYERS):
        time.sleep(0.005)
        assert passed == list(range(layer))
        ticket.finish_layer(layer)
        wait_until(lambda layer=layer: len(passed) > layer)
    reader.join()
    ticket.finish(0.0)
    assert [load.task for load in waits.collect()] == [7]
    assert not waits.num_open
    assert not waits.take_failed()


def test_streams_wait_instead_of_the_thread(waits: LayerWaits, counters: LayerCounters) -> None:
    """R59: nothing is there yet, and the thread goes on; a piece that is not submitted is waited for."""
    ticket = make_ticket(kind=Streams)
    assert isinstance(ticket, Streams)
    load = waits.open(ticket, 1)
    ticket.submitted = 2
    began = time.monotonic()
    waits.wait_until(1)
    assert time.monotonic() - began < DEADLINE_S / 2
    assert load.is_ordered
    assert load.ready_to == -1, "another stream that reads the layer has to be ordered, too"
    late = threading.Timer(0.02, ticket.finish_layer, [2])
    late.start()
    waits.wait_until(2)
    assert load.ready_to == 2
    late.join()
    ticket.finish(0.0)
    waits.collect()
    assert not taken(counters)


def test_a_pass_goes_on_when_its_piece_is_queued_late(counters: LayerCounters) -> None:
    """R59: the worker was busy for longer than a look; the bytes themselves never come here."""
    waits = LayerWaits(counters, timeout_s=DEADLINE_S)
    ticket = make_ticket(kind=Queued)
    assert isinstance(ticket, Queued)
    load = waits.open(ticket, 1)
    late = threading.Timer(0.5, ticket.submit, [1])
    late.start()
    waits.wait_until(0)
    assert load.is_ordered
    assert not load.failure
    late.join()
    ticket.finish(0.0)
    waits.collect()


def test_loads_of_one_batch_share_a_counter(waits: LayerWaits, counters: LayerCounters) -> None:
    tickets = [make_ticket(number) for number in range(4)]
    loads = [waits.open(ticket, ticket.job.number) for ticket in tickets[:3]]
    waits.begin_batch()
    loads.append(waits.open(tickets[3], 3))
    assert len({id(load.counter) for load in loads[:3]}) == 1
    assert loads[3].counter is not loads[0].counter
    tickets[3].finish(0.0)
    tickets[0].finish(0.0)
    waits.collect()
    assert taken(counters) == 1, "two of three have not ended"
    for ticket in tickets[1:3]:
        ticket.finish(0.0)
    assert len(waits.collect()) == 2
    assert not taken(counters)


def test_no_counter_is_lent_twice(waits: LayerWaits) -> None:
    for number in range(3):
        assert waits.may_open
        waits.open(make_ticket(number), number)
        waits.begin_batch()
    assert not waits.may_open
    with pytest.raises(AssertionError, match="may_open"):
        waits.open(make_ticket(9), 9)


def test_a_wait_that_takes_too_long_names_what_it_waited_for(counters: LayerCounters) -> None:
    """HS-50, R84: and it is not repeated for the layers behind."""
    waits = LayerWaits(counters, timeout_s=0.05, rank=3)
    slow, quick = make_ticket(1), make_ticket(2)
    waits.open(slow, 41)
    waits.open(quick, 42)
    quick.finish(0.0)
    slow.finish_layer(0)
    for layer in range(LAYERS):
        waits.wait_until(layer)
    (failed,) = waits.take_failed()
    assert failed.failure == (
        "rank 3, task 41, counter 0 (generation 1), layer 1: not there 0.05 s after the load began"
    )
    assert not waits.take_failed()
    assert [load.task for load in waits.collect()] == [42]
    slow.finish(0.0)
    assert [load.task for load in waits.collect()] == [41]


def test_death_of_whoever_copies_wakes_within_a_second(counters: LayerCounters) -> None:
    """R85: all loads at once, not one after the other."""
    waits = LayerWaits(counters, timeout_s=FOREVER_S, is_alive=lambda: False)
    tickets = [make_ticket(number) for number in range(8)]
    for ticket in tickets:
        waits.open(ticket, ticket.job.number)
    tickets[5].finish_layer(0)
    began = time.monotonic()
    waits.wait_until(0)
    assert time.monotonic() - began < DEADLINE_S
    assert {load.task for load in waits.take_failed()} == {0, 1, 2, 3, 4, 6, 7}


def test_a_copy_that_fails_is_told_once(waits: LayerWaits) -> None:
    ticket = make_ticket()
    waits.open(ticket, 1)
    ticket.finish_layer(1)
    waits.wait_until(1)
    killer = threading.Timer(0.02, ticket.finish, [0.0, TransferError("the device is gone", job=1)])
    killer.start()
    began = time.monotonic()
    waits.wait_until(2)
    waits.wait_until(3)
    assert time.monotonic() - began < DEADLINE_S / 2
    (failed,) = waits.take_failed()
    assert "the device is gone" in failed.failure
    killer.join()


def test_too_few_descriptors_are_said_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = os.eventfd

    def few(value: int, flags: int) -> int:
        if len(made) == LAYERS + 1:
            raise OSError(24, "Too many open files")
        made.append(plain(value, flags))
        return made[-1]

    monkeypatch.setattr(os, "eventfd", few)
    with pytest.raises(OSError, match="Too many open files"):
        LayerCounters(LAYERS)
    for fd in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
