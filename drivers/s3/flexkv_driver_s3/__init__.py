"""Blocks as objects in a bucket of an S3-compatible store."""

from flexkv_core import DriverSpec, TierCapabilities, hookimpl

from .config import S3Config


@hookimpl
def flexkv_driver() -> DriverSpec:
    """The driver ``s3``."""
    return DriverSpec(
        name="s3",
        api=(1, 0),
        config=S3Config,
        open="flexkv_driver_s3.tier:open_tier",
        capabilities=TierCapabilities(persistent=True, shared=True),
    )
