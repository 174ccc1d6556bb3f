"""Many threads at first use, forks, and no more connections than were allowed."""

from __future__ import annotations

import os
import threading

from flexkv_core import Status
from tests.support.s3_values import values
from tests.support.waiting import DEADLINE_S


def in_threads(count, work):
    """Run ``work(number)`` in so many threads at once; raises the first error."""
    gate, errors = threading.Barrier(count), []

    def run(number):
        try:
            gate.wait(DEADLINE_S)
            work(number)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def use(tier, number):
    keys, data = values(3, 5000, seed=number)
    assert {row.status for row in tier.store(keys, data)} == {Status.OK}
    into = [memoryview(bytearray(6000)) for _ in keys]
    assert {row.status for row in tier.load(keys, into)} == {Status.OK}
    assert [view[:5000] for view in into] == data


def test_first_use_by_32_threads_at_once(open_tier):
    for _ in range(5):
        tier = open_tier(probe="none", max_concurrency=32, requests_per_call=2)
        in_threads(32, lambda number, tier=tier: use(tier, number))
        tier.close()


def test_32_tiers_are_opened_at_once(open_tier):
    in_threads(32, lambda number: use(open_tier(), number))


def test_connections_are_as_many_as_allowed_and_kept(stub, open_tier):
    tier = open_tier(max_concurrency=4, requests_per_call=3, index_ttl_s=3600)
    in_threads(4, lambda number: [use(tier, 10 * number + turn) for turn in range(4)])
    assert stub.num_connections <= 4 * 3 + 1


def test_a_miss_costs_no_connection(stub, open_tier):
    """What was given back belongs to whoever takes it next, who would be cut off in mid-answer."""
    tier = open_tier(max_concurrency=4, requests_per_call=3)
    before = stub.num_connections
    for seed in range(20):
        keys, _ = values(3, 5000, seed=seed)
        into = [memoryview(bytearray(6000)) for _ in keys]
        assert {row.status for row in tier.load(keys, into)} == {Status.MISS}
    assert stub.num_connections <= before + 2


def test_child_uses_connections_and_locks_of_its_own(stub, open_tier):
    tier = open_tier()
    keys, data = values(4, 5000, seed=99)
    tier.store(keys, data)
    before = stub.num_connections

    def child():
        assert {row.status for row in tier.lookup(keys)} == {Status.OK}, "known as to the parent"
        in_threads(4, lambda number: use(tier, number))
        tier.close()

    assert fork_and(child) == 0
    assert stub.num_connections > before
    use(tier, 5)
    assert {row.status for row in tier.lookup(values(3, 5000, seed=1)[0])} == {Status.OK}, "the child tells"


def test_fork_while_other_threads_are_at_work(open_tier):
    tier = open_tier(max_concurrency=8)
    stop = threading.Event()

    def work(number):
        while not stop.is_set():
            use(tier, number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    try:
        for turn in range(5):
            assert fork_and(lambda turn=turn: use(tier, 100 + turn)) == 0
    finally:
        stop.set()
        for worker in workers:
            worker.join(DEADLINE_S)


def fork_and(work):
    """Run ``work`` in a forked child; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as exc:
            os.write(2, f"in the child: {exc!r}\n".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
