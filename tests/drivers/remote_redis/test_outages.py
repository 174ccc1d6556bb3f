"""Servers that die, hang, stall and come back: bounded in time, never another's bytes."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from contextlib import ExitStack

import pytest

from flexkv_core import BufferState, Outcome, Status, TierTimeoutError, TierUnavailableError
from flexkv_core.testing.kit import Crew
from tests.support.redis_server import Proxy, RedisServer, buffer, key, value
from tests.support.waiting import DEADLINE_S, wait_until

MIB = 1 << 20


def test_cut_in_the_middle_of_a_value(server, open_tier):
    with Proxy(server.path) as proxy, open_tier(proxy.url) as tier:
        keys = [key(i) for i in range(4)]
        tier.store(keys, [value(i) for i in range(4)])
        # The idle connection is replaced by one that ends within its second value.
        proxy.reply_limit = MIB + MIB // 2
        proxy.cut_idle()
        into = [buffer() for _ in keys]
        outcomes = tier.load(keys, into)
        assert [o.status for o in outcomes] == [Status.OK] + [Status.UNAVAILABLE] * 3
        assert into[0] == value(0)
        assert outcomes[1].buffer is BufferState.UNCERTAIN
        assert [o.buffer for o in outcomes[2:]] == [BufferState.UNTOUCHED] * 2
        assert all(set(bytes(view)) == {0xA5} for view in into[2:])
        assert "in the middle of an answer" in outcomes[1].reason
        proxy.reply_limit = None
        assert all(o.is_ok for o in tier.load(keys, into))
        assert into == [value(i) for i in range(4)]


def test_cut_in_the_middle_of_every_kind_of_answer(server, open_tier):
    seen: set[Status] = set()
    with Proxy(server.path) as proxy:
        for limit in range(0, 300, 3):  # a connection's greeting is part of it
            with open_tier(proxy.url) as tier:
                tier.store([key(1), key(2)], [value(1, 10), value(2, 10)])
                proxy.reply_limit = limit
                proxy.cut_idle()
                for call in (
                    lambda: tier.lookup([key(1), key(2)]),
                    lambda: tier.load([key(1), key(2)], [buffer(10), buffer(10)]),
                    lambda: tier.store([key(1), key(2)], [value(1, 10), value(2, 10)]),
                ):
                    try:
                        outcomes = call()
                    except TierUnavailableError:
                        continue
                    seen |= {o.status for o in outcomes}
                proxy.reply_limit = None
                into = buffer(10)
                assert tier.load([key(2)], [into])[0].is_ok
                assert into == value(2, 10)
    assert seen == {Status.OK, Status.UNAVAILABLE}, "some answers were cut between their values"


def test_a_slow_server_costs_one_time_out(server, open_tier):
    with Proxy(server.path) as proxy, open_tier(proxy.url, timeout_s=0.3) as tier:
        keys = [key(i) for i in range(8)]
        with server.client() as client:
            for i, name in enumerate(keys):
                client.set(b"flexkv:" + name.hex().encode(), bytes(value(i)))
        wait_until(lambda: answers(tier), "its connection is made")
        proxy.pace_s = 0.02  # 50 kB/s: bytes keep coming, and the value would take 20 s
        before = proxy.num_connections
        outcomes = tier.load(keys, [buffer() for _ in keys])
        assert {o.status for o in outcomes} == {Status.TIMEOUT}
        assert proxy.num_connections == before, "one that timed out is dropped, and the rest is not tried"
        proxy.pace_s = 0.0
        into = buffer()
        wait_until(lambda: loads(tier, keys[3], into), "the tier is back")
        assert into == value(3)


def test_a_stopped_server_times_out_and_its_late_answers_land_nowhere(tmp_path, open_tier):
    with RedisServer(tmp_path) as server, open_tier(server.unix_url) as patient:
        hasty = open_tier(server.unix_url, timeout_s=0.3)
        keys = [key(i) for i in range(4)]
        patient.store(keys, [value(i) for i in range(4)])
        wait_until(lambda: answers(hasty), "its connection is made")
        views = [buffer() for _ in keys]
        with server.paused():
            for call in (
                lambda: hasty.lookup(keys),
                lambda: hasty.load(keys, views),
                lambda: hasty.store(keys, [value(9)] * 4),
                lambda: hasty.evict([key(7)]),
                hasty.check_health,
            ):
                with pytest.raises(TierTimeoutError) as caught:
                    call()  # the server sleeps on, so that it ends by itself or never
                assert caught.value.retryable
        # The server now reads what was sent to it while it slept; each call has its own answer.
        wait_until(lambda: answers(hasty), "the server answers again")
        assert all(o.is_ok for o in patient.store(keys, [value(i) for i in range(4)]))
        for i in range(4):
            into = buffer()
            wait_until(lambda i=i, into=into: loads(hasty, key(i), into), "it loads again")
            assert into == value(i)
        assert all(set(bytes(view)) == {0xA5} for view in views), "nothing came late"


def test_killed_in_the_middle_of_a_transfer(tmp_path, open_tier):
    with RedisServer(tmp_path) as server, Proxy(server.path) as proxy, open_tier(proxy.url) as tier:
        keys = [key(i) for i in range(8)]
        tier.store(keys, [value(i) for i in range(8)])
        proxy.pace_s = 0.02  # the value would take 20 s
        before = proxy.num_replied
        results: list[object] = []
        worker = threading.Thread(target=lambda: results.append(tier.load(keys, [buffer() for _ in keys])))
        worker.start()
        wait_until(lambda: proxy.num_replied > before + 4096, "the first value is on its way")
        server.kill()
        worker.join(DEADLINE_S)
        (outcomes,) = results
        assert {o.status for o in outcomes} <= {Status.OK, Status.UNAVAILABLE}
        assert outcomes[-1].status is Status.UNAVAILABLE
        with pytest.raises(TierUnavailableError):
            tier.lookup(keys)


def test_killed_while_it_is_written_to(tmp_path, open_tier):
    with RedisServer(tmp_path) as server, open_tier(server.unix_url) as tier:
        keys = [key(i) for i in range(64)]
        stored: list[int] = []
        failures: list[Exception] = []

        def work():
            try:
                while True:
                    outcomes = tier.store(keys, [value(i % 4) for i in range(64)])
                    stored.append(sum(o.is_ok for o in outcomes))
            except TierUnavailableError as exc:
                failures.append(exc)

        worker = threading.Thread(target=work)
        worker.start()
        wait_until(lambda: stored, "a batch was stored")
        server.kill()
        worker.join(DEADLINE_S)
        assert len(failures) == 1


def test_a_restart_is_survived(tmp_path, open_tier):
    with RedisServer(tmp_path) as server, open_tier(server.unix_url) as tier:
        keys = [key(i) for i in range(8)]
        tier.store(keys, [value(i) for i in range(8)])
        crew = Crew(DEADLINE_S)  # so that several connections have to be replaced
        crew.start(4, lambda number: tier.lookup(keys))
        crew.join()
        server.kill()
        with pytest.raises(TierUnavailableError):
            tier.lookup(keys)
        server.start()
        assert {o.status for o in tier.lookup(keys)} == {Status.MISS}, "it kept nothing; that is no failure"
        assert all(o.is_ok for o in tier.store(keys, [value(i) for i in range(8)]))


def test_a_server_that_comes_later(tmp_path, open_tier, caplog):
    tier = open_tier(f"unix://{tmp_path}/sock")
    assert "starts down and comes back by itself" in caplog.text
    assert tier.capabilities.expires
    with pytest.raises(TierUnavailableError):
        tier.check_health()
    with RedisServer(tmp_path):
        tier.check_health()
        assert "it has no maxmemory" in caplog.text, "the advice comes when it can"
        assert tier.store([key(1)], [value(1)])[0].is_ok
        tier.close()


def test_no_more_connections_than_asked_for(server, open_tier):
    tier = open_tier(server.unix_url, connections=3)
    before = int(server.ask("INFO", "clients")["connected_clients"])
    keys = [key(i) for i in range(4)]
    tier.store(keys, [value(i) for i in range(4)])

    def work(number: int) -> None:
        for _ in range(4):
            tier.load(keys, [buffer() for _ in keys])

    crew = Crew(DEADLINE_S)
    crew.start(12, work)
    crew.join()
    assert int(server.ask("INFO", "clients")["connected_clients"]) <= before + 2


def test_waiting_for_a_connection_ends(server, open_tier):
    tier = open_tier(server.unix_url, connections=2, timeout_s=0.2)
    with ExitStack() as calls:
        for _ in range(2):  # that do not come back
            assert tier._servers._places.acquire(timeout=DEADLINE_S)
            calls.callback(tier._servers._places.release)
        with pytest.raises(TierTimeoutError, match=r"all 2 connections were busy for 0\.2 s"):
            tier.lookup([key(1)])
    wait_until(lambda: answers(tier), "they have come back")


def test_first_use_by_32_threads(server, open_tier):
    for _ in range(3):
        tier = open_tier(server.unix_url, connections=8)
        start = threading.Barrier(32)

        def work(number: int, tier=tier, start=start) -> None:
            start.wait(DEADLINE_S)
            mine = value(number, 10_000)
            into = buffer(10_000)
            for _ in range(5):
                assert tier.store([key(number)], [mine])[0].is_ok
                assert tier.load([key(number)], [into])[0].is_ok
                assert into == mine

        crew = Crew(DEADLINE_S)
        crew.start(32, work)
        crew.join()
        tier.close()


def test_close_waits_for_running_calls(tmp_path, open_tier):
    with RedisServer(tmp_path) as server:
        tier = open_tier(server.unix_url)
        keys = [key(i) for i in range(32)]
        tier.store(keys, [value(i % 4) for i in range(32)])
        outcomes: list[Outcome] = []
        is_closed = threading.Event()

        def work(number: int) -> None:
            outcomes.extend(tier.load(keys, [buffer() for _ in keys]))

        def close(number: int) -> None:
            tier.close()
            is_closed.set()

        crew = Crew(DEADLINE_S)
        with server.paused():
            crew.start(1, work)
            wait_until(lambda: tier._num_running, "the load is under way")
            closer = Crew(DEADLINE_S)
            closer.start(1, close)
            wait_until(lambda: tier._is_closed, "the tier is being closed")
            assert tier._num_running == 1
            assert not is_closed.is_set()
        closer.join()
        assert tier._num_running == 0
        crew.join()
        assert [o.status for o in outcomes] == [Status.OK] * len(keys)


def test_a_child_has_connections_of_its_own(server, open_tier):
    """Forked while other threads are in the middle of transfers; the child uses and closes the tier."""
    tier = open_tier(server.unix_url, connections=8)
    keys = [key(i) for i in range(8)]
    tier.store(keys, [value(i) for i in range(8)])

    def work(number: int) -> None:
        into = buffer()
        while not crew.stop.is_set():
            assert tier.load([keys[number]], [into])[0].is_ok
            assert into == value(number)

    crew = Crew(DEADLINE_S)
    crew.start(4, work)
    for _ in range(3):
        assert _in_child(lambda: _uses(tier, keys)) == 0
    crew.stop.set()
    crew.join()
    assert all(o.is_ok for o in tier.lookup(keys))


def _uses(tier, keys) -> bool:
    into = [buffer() for _ in keys]
    is_good = all(o.is_ok for o in tier.load(keys, into)) and into[7] == value(7)
    gc.collect()  # what was inherited goes, and must not take the parent's connections along
    tier.close()
    return is_good


def _in_child(work) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads and fork
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def answers(tier) -> bool:
    """Whether a tier of little patience finds its server quick enough now."""
    try:
        tier.check_health()
    except TierTimeoutError:
        return False
    return True


def loads(tier, key, into) -> bool:
    """The same of a load."""
    try:
        return tier.load([key], [into])[0].is_ok
    except TierTimeoutError:
        return False
