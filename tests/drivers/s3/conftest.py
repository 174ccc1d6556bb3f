"""A server that can be told to misbehave, and tiers in its bucket."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flexkv_core import TierContext
from flexkv_driver_s3.config import S3Config
from flexkv_driver_s3.tier import S3Tier
from tests.support.s3_stub import BUCKET, StubS3
from tests.support.waiting import DEADLINE_S

VALUE_BYTES = 1 << 20
Open = Callable[..., S3Tier]


@pytest.fixture
def stub() -> Iterator[StubS3]:
    server = StubS3()
    yield server
    server.close()


@pytest.fixture
def open_tier(stub: StubS3) -> Iterator[Open]:
    """Opens tiers, which wait long for the server unless they are told otherwise, and closes them."""
    tiers: list[S3Tier] = []

    def opened(*, value_bytes: int = VALUE_BYTES, **options: Any) -> S3Tier:
        given: dict[str, Any] = {
            "bucket": BUCKET,
            "endpoint_url": stub.endpoint,
            "access_key_id": "key",
            "secret_access_key": "much-too-secret",
            "index_ttl_s": 0,
            "list_step_s": DEADLINE_S,
            **{f"{what}_timeout_s": DEADLINE_S for what in ("connect", "read", "request", "list")},
        }
        context = TierContext(name="far", value_bytes=value_bytes, head_bytes=64, identity='{"model": "m"}')
        tier = S3Tier(S3Config(**{**given, **options}), context)
        tiers.append(tier)
        return tier

    yield opened
    for tier in tiers:
        tier.close()


@pytest.fixture(autouse=True)
def _one_thread_warns_of_fork() -> Iterator[None]:
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any fork beside threads; safety after one is what is tested.
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        yield
