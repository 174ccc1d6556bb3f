"""Tiers behind a codec pass the kit: memory, ``ssd`` and ``remote_redis``, zstd, AES-GCM and both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexkv_core.metrics import Metrics
from flexkv_core.models import CodecConfig
from flexkv_core.testing import MemoryTier, TierTests
from flexkv_core.wrappers.codec import CodecTier
from flexkv_core.wrappers.encoding import Encoding, head_bytes, stored_bytes
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier
from flexkv_driver_ssd.config import SsdConfig
from flexkv_driver_ssd.tier import SsdTier
from tests.support.media import InMemory, InRedis, OnDisk
from tests.support.waiting import DEADLINE_S

pytest.importorskip("zstandard", reason="the extra zstd is not installed")
pytest.importorskip("cryptography", reason="the extra crypto is not installed")

KEY = "00112233445566778899aabbccddeeff" * 2
ZSTD = {"compress": "zstd"}
AES = {"encrypt": {"key": KEY}}


class CodecKit(TierTests):
    """A driver's tier that is opened for encoded values, behind the codec."""

    codec = {**ZSTD, **AES}
    kills = 2

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


class MemoryCodecKit(CodecKit, InMemory):
    def open_inner(self, context, medium):
        return MemoryTier(context, self.capabilities, medium)


class TestMemoryZstd(MemoryCodecKit):
    codec = ZSTD


class TestMemoryAes(MemoryCodecKit):
    codec = AES


class TestMemoryBothAligned(MemoryCodecKit):
    capabilities = replace(MemoryCodecKit.capabilities, alignment_bytes=4096, max_batch=5, max_concurrency=1)


class TestSsdBoth(CodecKit, OnDisk):
    def open_inner(self, context, medium):
        capacity = self.capacity_values * context.value_bytes
        config = SsdConfig(path=str(medium), capacity=capacity, min_free=0, slab=capacity // 4)
        return SsdTier(config, context)


class TestRedisBoth(CodecKit, InRedis):
    def open_inner(self, context, medium):
        patience = {"timeout_s": DEADLINE_S, "connect_timeout_s": DEADLINE_S}
        return RedisTier(RedisConfig(url=medium, max_value=context.value_bytes, **patience), context)
