"""A master that a Sentinel names, before and after a failover."""

from __future__ import annotations

import subprocess
import traceback

import pytest
import redis

from flexkv_core import TierAccessError, TierTimeoutError, TierUnavailableError
from tests.support.redis_server import RedisServer, closed_port, free_port, key, value
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture
def watched(tmp_path):
    """Master, replica and one Sentinel; yields them with the Sentinel's port."""
    quick = ("--repl-diskless-sync-delay", "0")
    with RedisServer(tmp_path / "a", *quick, port=free_port()) as master:
        follows = ("--replicaof", "127.0.0.1", str(master.port))
        with RedisServer(tmp_path / "b", *quick, *follows, port=free_port()) as replica:
            wait_until(lambda: replica.ask("INFO")["master_link_status"] == "up", "the replica follows")
            port = free_port()
            config = tmp_path / "sentinel.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nlogfile {tmp_path}/sentinel.log\n"
                f"sentinel monitor kv 127.0.0.1 {master.port} 1\n"
                # So long that no master is taken for dead because a machine is busy: a failover is asked for.
                "sentinel down-after-milliseconds kv 600000\n"
            )
            process = subprocess.Popen(["redis-server", str(config), "--sentinel"])
            try:
                yield master, replica, port
            finally:
                process.kill()
                process.wait(DEADLINE_S)


def test_failover_is_followed(watched, open_tier):
    master, replica, port = watched
    tier = open_tier(f"redis://127.0.0.1:{port}", sentinel={"master": "kv"})
    wait_until(lambda: _stores(tier), "the Sentinel answers")
    assert master.ask("DBSIZE") == 1
    wait_until(lambda: replica.ask("DBSIZE") == 1, "the replica has it too")
    with redis.Redis(port=port) as sentinel:
        wait_until(lambda: _swaps(sentinel), "the Sentinel knows the replica")
        wait_until(lambda: _is_master(replica), "the replica is the master")
    master.kill()
    # The connection leads to nobody now: dropped, and asked for anew.
    wait_until(lambda: _stores(tier), "the Sentinel names the new one")
    assert tier.lookup([key(1)])[0].is_ok
    with pytest.raises(TierUnavailableError, match="name no master 'other'"):
        open_tier(f"redis://127.0.0.1:{port}", sentinel={"master": "other"}).lookup([key(1)])


def test_a_sentinel_that_does_not_answer_is_named_without_secrets(tmp_path, open_tier, caplog):
    """redis-py's own text repeats its clients, in some versions with their passwords."""
    sentinel = {"master": "kv", "password": "much-too-secret"}
    options = ("--requirepass", "right")  # a Sentinel asks for its password as any server does
    with (
        RedisServer(tmp_path, *options, port=free_port(), probe={"password": "right"}) as server,
        pytest.raises(TierAccessError, match="no Sentinel names the master: wrong username") as denied,
    ):
        open_tier(server.url, sentinel=sentinel).lookup([key(1)])
    with closed_port() as port, pytest.raises(TierUnavailableError, match="master: .*refused") as refused:
        open_tier(f"redis://127.0.0.1:{port}", sentinel=sentinel).lookup([key(1)])
    told = caplog.text + "".join(
        line for raised in (denied, refused) for line in traceback.format_exception(raised.value)
    )
    assert "much-too-secret" not in told
    assert "<redis" not in told


def _swaps(sentinel):
    try:
        return sentinel.execute_command("SENTINEL", "FAILOVER", "kv")
    except redis.ResponseError:  # NOGOODSLAVE: it has not heard of any
        return False


def _is_master(server):
    try:
        return server.ask("ROLE")[0] == b"master"
    except redis.ConnectionError:  # the Sentinel has it close every connection when it changes sides
        return False


def _stores(tier):
    try:
        return tier.store([key(1)], [value(1)])[0].is_ok
    except (TierUnavailableError, TierTimeoutError):
        return False
