"""Tiers behind a codec pass the kit: memory, ``ssd`` and ``remote_redis``, zstd, AES-GCM and both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.metrics import Metrics
from flexkv_core.models import CodecConfig
from flexkv_core.testing import Medium, MemoryTier, TierTests
from flexkv_core.wrappers.codec import CodecTier
from flexkv_core.wrappers.encoding import Encoding, head_bytes, stored_bytes
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier
from flexkv_driver_ssd.config import SsdConfig
from flexkv_driver_ssd.tier import SsdTier
from tests.support.redis_server import RedisServer
from tests.support.ssd_disk import peek, remove, spots
from tests.support.ssd_disk import replace as put_on_disk

pytest.importorskip("zstandard", reason="the extra zstd is not installed")
pytest.importorskip("cryptography", reason="the extra crypto is not installed")

KEY = "00112233445566778899aabbccddeeff" * 2
ZSTD = {"compress": "zstd"}
AES = {"encrypt": {"key": KEY}}
SERVERS: dict[str, RedisServer] = {}


class CodecKit(TierTests):
    """A driver's tier that is opened for encoded values, behind the codec."""

    codec = {**ZSTD, **AES}

    def open_tier(self, context, medium):
        config = CodecConfig.model_validate(self.codec)
        inner = self.open_inner(
            replace(
                context,
                value_bytes=stored_bytes(config, self.layout),
                head_bytes=head_bytes(config, self.layout),
            ),
            medium,
        )
        return CodecTier(
            inner,
            Encoding(config, self.layout),
            config,
            self.layout,
            name=context.name,
            metrics=Metrics(),
            num_calls=inner.capabilities.max_concurrency,
        )

    def open_inner(self, context, medium):
        raise NotImplementedError


class MemoryCodecKit(CodecKit):
    capabilities = TierCapabilities(can_list=True)

    @pytest.fixture
    def medium(self):
        return Medium()

    def open_inner(self, context, medium):
        return MemoryTier(context, self.capabilities, medium)

    def read_medium(self, medium, key):
        return medium.values.get(key)

    def write_medium(self, medium, key, data):
        medium.values.pop(key, None)
        if data is not None:
            medium.values[key] = data


class TestMemoryZstd(MemoryCodecKit):
    codec = ZSTD


class TestMemoryAes(MemoryCodecKit):
    codec = AES


class TestMemoryBothAligned(MemoryCodecKit):
    capabilities = replace(MemoryCodecKit.capabilities, alignment_bytes=4096, max_batch=5, max_concurrency=1)


class TestSsdBoth(CodecKit):
    def open_inner(self, context, medium):
        capacity = self.capacity_values * context.value_bytes
        config = SsdConfig(path=str(medium), capacity=capacity, min_free=0, slab=capacity // 4)
        return SsdTier(config, context)

    def read_medium(self, medium, key):
        spot = spots(medium).get(key)
        return None if spot is None else peek(spot)

    def write_medium(self, medium, key, data):
        spot = spots(medium)[key]
        remove(spot) if data is None else put_on_disk(spot, data)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        SERVERS[running.unix_url] = running
        yield running


class TestRedisBoth(CodecKit):
    @pytest.fixture
    def medium(self, server):
        server.ask("FLUSHALL")
        return server.unix_url

    def open_inner(self, context, medium):
        return RedisTier(RedisConfig(url=medium, max_value=context.value_bytes), context)

    def read_medium(self, medium, key):
        return SERVERS[medium].ask("GET", b"flexkv:" + key.hex().encode())

    def write_medium(self, medium, key, data):
        name, server = b"flexkv:" + key.hex().encode(), SERVERS[medium]
        server.ask("DEL", name) if data is None else server.ask("SET", name, data)

    def break_medium(self, medium):
        return SERVERS[medium].unreachable()
