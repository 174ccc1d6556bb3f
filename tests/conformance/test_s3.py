"""The ``s3`` driver passes the kit, on moto's server."""

from __future__ import annotations

import uuid
from contextlib import closing
from functools import cache

import pytest

from flexkv_core.testing import TierTests
from flexkv_driver_s3.tier import S3Tier
from tests.support.s3_client import Bucket, make_client
from tests.support.s3_moto import MotoServer, stopped


@pytest.fixture(scope="module")
def moto():
    with closing(MotoServer()) as server:
        yield server
        client_at(server.endpoint).close()


class TestS3(TierTests):
    kills = 2

    @pytest.fixture
    def medium(self, moto):
        medium = {"endpoint": moto.endpoint, "name": uuid.uuid4().hex, "pid": moto.process.pid}
        bucket_of(medium).create()
        return medium

    def open_tier(self, context, medium):
        return S3Tier(bucket_of(medium).config(read_timeout_s=2), context)

    def read_medium(self, medium, key):
        return bucket_of(medium).read(key)

    def write_medium(self, medium, key, data):
        bucket_of(medium).write(key, data)

    def break_medium(self, medium):
        return stopped(medium["pid"])


def bucket_of(medium):
    return Bucket(medium["endpoint"], medium["name"], client_at(medium["endpoint"]))


@cache
def client_at(endpoint):
    """One for all tests: making one costs a quarter of a second."""
    return make_client(endpoint)
