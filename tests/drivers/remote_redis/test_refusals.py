"""What a server may refuse: each is named in one clear line, and of the right kind."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import contextmanager

import pytest
import redis

from flexkv_core import Status, TierAccessError, TierTimeoutError, TierUnavailableError
from flexkv_core.errors import TierError
from flexkv_driver_remote_redis.faults import fault_of
from tests.support.redis_server import RedisServer, buffer, closed_port, free_port, key, name, value
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with a password, and with users of few rights."""
    options = ("--requirepass", "correct horse")
    with RedisServer(tmp_path_factory.mktemp("guarded"), *options, probe={"password": "correct horse"}) as up:
        up.ask("ACL", "SETUSER", "few", "on", ">pw", "~flexkv:*", "+get", "+set", "+strlen", "+unlink")
        up.ask("ACL", "SETUSER", "reader", "on", ">pw", "~flexkv:*", "+get", "+strlen")
        up.ask("ACL", "SETUSER", "elsewhere", "on", ">pw", "~other:*", "+@all")
        yield up


def one_line(error: TierError) -> str:
    assert error.tier == "far"
    assert "\n" not in str(error)
    return str(error)


def test_password(guarded, open_tier):
    with open_tier(guarded.unix_url, password="correct horse") as tier:
        assert tier.store([key(1)], [value(1)])[0].is_ok


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"password": "wrong"}, "wrong username or password"),
        ({}, "wants a password"),
        ({"username": "nobody", "password": "correct horse"}, "wrong username or password"),
        ({"username": "elsewhere", "password": "pw"}, "lacks rights"),
    ],
)
def test_no_access(guarded, open_tier, caplog, options, hint):
    tier = open_tier(guarded.unix_url, **options)
    assert hint in caplog.text
    assert "starts down" in caplog.text
    for call in (
        lambda: tier.lookup([key(1), key(2)]),
        lambda: tier.load([key(1), key(2)], [buffer(), buffer()]),
        lambda: tier.store([key(1), key(2)], [value(1), value(2)]),
        lambda: tier.evict([key(1)]),
        tier.check_health,
    ):
        with pytest.raises(TierAccessError, match=hint) as caught:
            call()
        text = one_line(caught.value)
        assert not any(secret in text + caplog.text for secret in ("correct horse", "'pw'"))
        assert not caught.value.retryable


def test_no_access_can_stop_the_start(guarded, open_tier):
    with pytest.raises(TierAccessError, match="wants a password"):
        open_tier(guarded.unix_url, required=True)


def test_four_rights_are_enough(guarded, open_tier, caplog):
    caplog.set_level(logging.INFO)
    tier = open_tier(guarded.unix_url, username="few", password="pw")
    assert tier.store([key(3)], [value(3)])[0].is_ok
    assert tier.load([key(3)], [buffer()])[0].is_ok
    assert tier.lookup([key(3)])[0].is_ok
    assert tier.evict([key(3)])[0].is_ok
    assert "does not tell its settings" in caplog.text
    assert tier.capabilities.expires, "it may, for all that is known"


def test_a_reader_may_read(guarded, open_tier):
    guarded.ask("SET", name(4), bytes(value(4)))
    tier = open_tier(guarded.unix_url, username="reader", password="pw")
    assert tier.load([key(4)], [buffer()])[0].is_ok
    with pytest.raises(TierAccessError, match="lacks rights"):
        tier.store([key(4)], [value(4)])


def test_out_of_memory_is_no_space_and_ends_the_batch(tmp_path, open_tier, caplog):
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with RedisServer(tmp_path, *options) as server, open_tier(server.unix_url) as tier:
        assert "once full it refuses every store" in caplog.text
        assert not tier.capabilities.expires
        keys = [key(i) for i in range(64)]
        outcomes = tier.store(keys, [value(i) for i in range(64)])
        assert [o.status for o in outcomes] == [Status.OK] * outcomes.count(outcomes[0]) + [
            Status.NO_SPACE
        ] * (64 - outcomes.count(outcomes[0]))
        kept = outcomes.count(outcomes[0])
        assert 2 <= kept <= 8
        assert "maxmemory-policy" in outcomes[-1].reason
        received = server.ask("INFO", "stats")["total_net_input_bytes"]
        assert received < 40 << 20, "what cannot be kept is not sent"
        assert [o.is_ok for o in tier.lookup(keys)] == [o.is_ok for o in outcomes]
        into = buffer()
        assert tier.load([keys[0]], [into])[0].is_ok
        assert into == value(0)
        tier.evict(keys)
        assert tier.store(keys[:2], [value(0), value(1)])[0].is_ok


def test_a_server_that_evicts_takes_all_and_forgets_some(tmp_path, open_tier, caplog):
    options = ("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
    with RedisServer(tmp_path, *options) as server, open_tier(server.unix_url) as tier:
        assert tier.capabilities.expires
        assert "WARNING" not in caplog.text
        keys = [key(i) for i in range(32)]
        assert all(o.is_ok for o in tier.store(keys, [value(i) for i in range(32)]))
        outcomes = tier.lookup(keys)
        assert {o.status for o in outcomes} == {Status.OK, Status.MISS}
        into = [buffer() for _ in keys]
        for i, outcome in enumerate(tier.load(keys, into)):
            assert outcome.status in (Status.OK, Status.MISS)
            assert not outcome.is_ok or into[i] == value(i)


def test_volatile_eviction_wants_a_ttl(tmp_path, open_tier, caplog):
    with RedisServer(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "volatile-lru") as server:
        keys, values = [key(i) for i in range(16)], [value(i) for i in range(16)]
        with open_tier(server.unix_url) as tier:
            assert "evicts only keys that expire" in caplog.text
            assert tier.store(keys, values)[-1].status is Status.NO_SPACE
            tier.evict(keys)
        caplog.clear()
        with open_tier(server.unix_url, ttl_s=3600) as tier:
            assert caplog.text == ""
            assert all(o.is_ok for o in tier.store(keys, values))


def test_a_block_larger_than_the_server_can_keep(tmp_path, open_tier, caplog):
    options = ("--maxmemory", "2mb", "--maxmemory-policy", "allkeys-lru")
    with RedisServer(tmp_path, *options) as server, open_tier(server.unix_url, value_bytes=4 << 20) as tier:
        assert "smaller than one block" in caplog.text
        assert tier.store([key(1)], [value(1, 4 << 20)])[0].status in (Status.NO_SPACE, Status.OK)
        tier.load([key(1)], [buffer(4 << 20)])


def test_a_server_with_a_lower_limit_for_values(tmp_path, open_tier, caplog):
    options = ("--proto-max-bulk-len", "1mb")
    with RedisServer(tmp_path, *options) as server, open_tier(server.unix_url, value_bytes=4 << 20) as tier:
        assert "proto-max-bulk-len" in caplog.text
        (outcome,) = tier.store([key(1)], [value(1, 4 << 20)])
        assert outcome.status is Status.INVALID
        assert "invalid bulk length" in outcome.reason
        assert tier.store([key(1)], [value(1)])[0].is_ok


def test_a_read_only_replica(tmp_path, open_tier, caplog):
    with RedisServer(tmp_path / "master", "--repl-diskless-sync-delay", "0", port=free_port()) as master:
        master.ask("SET", name(1), bytes(value(1)))
        with RedisServer(tmp_path / "copy", "--replicaof", "127.0.0.1", str(master.port)) as replica:
            wait_until(lambda: replica.ask("GET", name(1)), "the replica has caught up")
            with open_tier(replica.unix_url) as tier:
                assert "read-only replica" in caplog.text
                assert tier.load([key(1)], [buffer()])[0].is_ok
                with pytest.raises(TierUnavailableError, match="read-only replica") as caught:
                    tier.store([key(2), key(3)], [value(2), value(3)])
                assert "READONLY" in one_line(caught.value)


def test_a_server_that_is_loading(tmp_path, open_tier):
    with RedisServer(tmp_path, "--enable-debug-command", "yes") as server:
        server.ask("DEBUG", "POPULATE", "40000", "filler", "100")
        server.ask("SAVE")
        server.kill()
        # Each key is waited for when it is loaded, so that loading takes 40 s whatever the machine.
        server.start("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
        with open_tier(server.unix_url) as tier, pytest.raises(TierUnavailableError, match="still loading"):
            tier.lookup([key(1)])


def test_a_cluster_node_that_is_not_called_one(tmp_path, open_tier):
    with RedisServer(tmp_path, "--cluster-enabled", "yes", port=free_port()) as server:
        tier = open_tier(server.unix_url)
        with pytest.raises(TierUnavailableError, match="CLUSTERDOWN"):
            tier.lookup([key(1)])


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("redis://127.0.0.1:{port}", "refused"),
        ("unix:///nowhere/redis.sock", "No such file"),
        ("redis://no-such-host.invalid", "resol|not known|No address"),
    ],
)
def test_refused_and_unresolved(open_tier, url, hint):
    with closed_port() as port:
        url = url.format(port=port)
        with open_tier(url) as tier, pytest.raises(TierUnavailableError, match=hint) as caught:
            tier.lookup([key(1)])
        assert url in one_line(caught.value)
        with pytest.raises(TierUnavailableError):
            open_tier(url, required=True)


@contextmanager
def listener(answer: bytes | None):
    """Something else on a port: says ``answer`` to all that it is asked, or never anything."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as ear:
        ear.settimeout(0.02)

        def serve():
            ends = []
            while not stop.is_set():
                try:
                    ends.append(ear.accept()[0])
                    if answer is not None:
                        ends[-1].settimeout(DEADLINE_S)
                        ends[-1].recv(4096)
                        ends[-1].sendall(answer)
                except TimeoutError:
                    continue
            for end in ends:
                end.close()

        thread = threading.Thread(target=serve, name="listener")
        thread.start()
        try:
            yield f"redis://127.0.0.1:{ear.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


def test_rights_in_a_cluster(tmp_path, open_tier):
    """There the library asks for the slots, and for the commands."""
    with RedisServer(tmp_path, "--cluster-enabled", "yes", port=free_port()) as server:
        server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in server.ask("CLUSTER", "INFO"), "the cluster is up")
        few = ["+get", "+set", "+strlen", "+unlink"]
        server.ask("ACL", "SETUSER", "few", "on", ">pw", "~flexkv:*", *few)
        tier = open_tier(server.url, cluster=True, username="few", password="pw")
        with pytest.raises(TierAccessError, match=r"in a cluster \+cluster\|slots \+command"):
            tier.store([key(1)], [value(1)])
        server.ask("ACL", "SETUSER", "few", "+cluster|slots", "+command")
        assert tier.store([key(1)], [value(1)])[0].is_ok
        with pytest.raises(TierAccessError, match="wrong username or password"):
            open_tier(server.url, cluster=True, username="few", password="no").lookup([key(1)])


LACKS = {
    "a command": (("--rename-command", "STRLEN", ""), "", "unknown command"),
    "the database": ((), "/99", "DB index is out of range"),
}


@pytest.mark.parametrize("what", LACKS)
def test_a_server_that_refuses_every_question_is_not_healthy(tmp_path, open_tier, caplog, what):
    options, path, hint = LACKS[what]
    with RedisServer(tmp_path, *options, port=free_port()) as server:
        tier = open_tier(server.url + path)
        assert hint in caplog.text
        assert "the tier starts down" in caplog.text
        with pytest.raises(TierError, match=hint) as raised:
            tier.check_health()
        assert not raised.value.retryable
        with pytest.raises(TierError, match=hint):
            open_tier(server.url + path, required=True)


def test_a_server_without_auth_is_named_without_the_password(tmp_path, open_tier, caplog):
    """A command that it does not know is repeated by the server with what was sent."""
    with RedisServer(tmp_path, "--rename-command", "AUTH", "", port=free_port()) as server:
        tier = open_tier(server.url, password="much-too-secret", timeout_s=DEADLINE_S)
        with pytest.raises(TierError, match="unknown command") as raised:
            tier.check_health()
        (outcome,) = tier.load([key(1)], [buffer()])
    assert "unknown command" in outcome.reason
    assert "much-too-secret" not in f"{raised.value}{outcome.reason}{caplog.text}"


def test_too_many_clients_are_named():
    # As the library tells it.  Whether it can is a matter of who is faster: the server closes at once.
    fault = fault_of(redis.ConnectionError("max number of clients reached"))
    assert fault.status is Status.UNAVAILABLE
    assert "the server has too many clients" in fault.reason


def test_what_is_no_redis(open_tier):
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url, open_tier(url) as tier:
        with pytest.raises(TierUnavailableError, match="no Redis server") as caught:
            tier.lookup([key(1)])
        one_line(caught.value)


def test_a_server_that_never_answers_holds_nobody_up(open_tier):
    with listener(None) as url:
        tier = open_tier(url, timeout_s=0.2, connect_timeout_s=0.2)
        with tier, pytest.raises(TierTimeoutError) as caught:
            tier.lookup([key(1)])
        assert caught.value.retryable
        one_line(caught.value)
