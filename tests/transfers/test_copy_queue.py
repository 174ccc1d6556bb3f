"""Who advances a copy: the thread that added it, or the worker of its direction."""

from __future__ import annotations

import threading
from array import array

from flexkv_core.transfer import CopyJob, PassedFence, Ticket
from flexkv_core.transfers.copy_queue import Copy, CopyQueue
from tests.support.waiting import DEADLINE_S


def copy(number: int, *, is_load: bool) -> Copy:
    job = CopyJob(number, [], array("q"), PassedFence())
    return Copy(Ticket(job, 0, 1), iter([None]), is_load=is_load)


def test_a_copy_is_taken_only_where_its_direction_is_idle() -> None:
    queue = CopyQueue()
    first, second, store = copy(1, is_load=True), copy(2, is_load=True), copy(3, is_load=False)
    assert queue.add(first, take=True)
    assert not queue.add(second, take=True)
    assert queue.add(second)
    assert queue.add(store, take=True)
    queue.give_back(store)
    assert queue.heads(lambda _: True) == [store]
    queue.remove(first)
    assert queue.heads(lambda _: True, (True,)) == [second]
    assert not first.is_taken or first.has_begun


def test_the_worker_waits_for_a_taken_copy_to_be_given_back() -> None:
    queue = CopyQueue()
    taken = copy(1, is_load=True)
    assert queue.add(taken, take=True)
    found: list[list[Copy] | None] = []
    worker = threading.Thread(target=lambda: found.append(queue.heads(lambda _: True, (True,))))
    worker.start()
    assert queue.close() == []
    assert not found
    queue.give_back(taken)
    worker.join(DEADLINE_S)
    assert found == [[taken]]
    queue.remove(taken)
    assert queue.heads(lambda _: True) is None
