"""The ``remote_redis`` driver passes the kit."""

from __future__ import annotations

from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier
from tests.support.media import InRedis
from tests.support.waiting import DEADLINE_S


class TestRemoteRedis(InRedis):
    def open_tier(self, context, medium):
        # The longest value is a block's, so that the kit tries one that is longer.
        patience = {"timeout_s": DEADLINE_S, "connect_timeout_s": DEADLINE_S}
        return RedisTier(RedisConfig(url=medium, max_value=context.value_bytes, **patience), context)
