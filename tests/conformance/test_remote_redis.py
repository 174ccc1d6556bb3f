"""The ``remote_redis`` driver passes the kit."""

from __future__ import annotations

import pytest

from flexkv_core.testing import TierTests
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier
from tests.support.redis_server import RedisServer

SERVERS: dict[str, RedisServer] = {}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        SERVERS[running.unix_url] = running
        yield running


class TestRemoteRedis(TierTests):
    @pytest.fixture
    def medium(self, server):
        server.ask("FLUSHALL")
        return server.unix_url

    def open_tier(self, context, medium):
        # The longest value is a block's, so that the kit tries one that is longer.
        return RedisTier(RedisConfig(url=medium, max_value=context.value_bytes), context)

    def read_medium(self, medium, key):
        return SERVERS[medium].ask("GET", self.name(key))

    def write_medium(self, medium, key, data):
        server = SERVERS[medium]
        server.ask("DEL", self.name(key)) if data is None else server.ask("SET", self.name(key), data)

    def break_medium(self, medium):
        return SERVERS[medium].unreachable()

    def name(self, key):
        return b"flexkv:" + key.hex().encode()
