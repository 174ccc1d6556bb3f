"""Blocks in a Redis server, a master behind Sentinels, or a cluster: a tier that instances share."""

from flexkv_core import DriverSpec, TierCapabilities, hookimpl

from .config import RedisConfig


@hookimpl
def flexkv_driver() -> DriverSpec:
    """The driver ``remote_redis``."""
    return DriverSpec(
        name="remote_redis",
        api=(1, 0),
        config=RedisConfig,
        open="flexkv_driver_remote_redis.tier:open_tier",
        capabilities=TierCapabilities(persistent=True, shared=True, expires=True),
    )
