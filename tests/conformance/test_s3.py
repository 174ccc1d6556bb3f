"""The ``s3`` driver passes the kit: on a small server in memory, and (slow) on moto's and Ceph's."""

from __future__ import annotations

import itertools
import uuid
from contextlib import closing
from functools import cache

import pytest

from flexkv_core.testing import TierTests
from flexkv_driver_s3.tier import S3Tier
from tests.support.child import stopped
from tests.support.s3_client import Bucket, make_client
from tests.support.s3_stub import BUCKET, StubProcess
from tests.support.waiting import DEADLINE_S

_numbers = itertools.count()


class S3Kit(TierTests):
    """A medium says ``endpoint``, ``name`` of the bucket, ``prefix``, ``keys`` and, to stop it, ``pid``.

    Nobody is hasty but the test in which the server is stopped: ``patience_s``.
    """

    kills = 2

    @pytest.fixture
    def patience_s(self, request):
        return 2 if "unreachable" in request.node.name else DEADLINE_S

    def open_tier(self, context, medium):
        options = bucket_of(medium).config(read_timeout_s=medium["patience_s"], prefix=medium["prefix"])
        return S3Tier(options, context)

    def read_medium(self, medium, key):
        return bucket_of(medium).read(key, medium["prefix"])

    def write_medium(self, medium, key, data):
        bucket_of(medium).write(key, data, medium["prefix"])

    def break_medium(self, medium):
        if "pid" not in medium:
            raise NotImplementedError
        return stopped(medium["pid"])

    def disturb_medium(self, medium, how):
        if how != "hung":
            raise NotImplementedError
        return self.break_medium(medium)


@pytest.fixture(scope="module")
def stub():
    with closing(StubProcess()) as server:
        connect(server.endpoint, BUCKET, ["test", "test"])
        yield server
        client_at.cache_clear()


@pytest.fixture(scope="module")
def on_moto(moto):
    connect(moto.endpoint, uuid.uuid4().hex, ["test", "test"])
    yield moto
    client_at.cache_clear()


@pytest.fixture(scope="module")
def on_ceph(ceph):
    name = f"kit-{uuid.uuid4().hex}"
    medium = {"endpoint": ceph.endpoint, "name": name, "keys": [ceph.access, ceph.secret]}
    connect(**medium)
    yield medium
    client_at.cache_clear()


class TestS3(S3Kit):
    @pytest.fixture
    def medium(self, stub, patience_s):
        medium = {"endpoint": stub.endpoint, "name": BUCKET, "prefix": f"kit/{next(_numbers)}"}
        return medium | {"keys": ["test", "test"], "pid": stub.process.pid, "patience_s": patience_s}


@pytest.mark.slow
class TestS3OnMoto(S3Kit):
    @pytest.fixture
    def medium(self, on_moto, patience_s):
        name = uuid.uuid4().hex
        medium = {"endpoint": on_moto.endpoint, "name": name, "prefix": "", "keys": ["test", "test"]}
        bucket_of(medium).create()
        return medium | {"pid": on_moto.process.pid, "patience_s": patience_s}


@pytest.mark.slow
class TestS3OnCeph(S3Kit):
    @pytest.fixture
    def medium(self, on_ceph, patience_s):
        return on_ceph | {"prefix": f"kit/{next(_numbers)}", "patience_s": patience_s}


def connect(endpoint, name, keys):
    """Make the client, and its connection, before the first test counts what it leaves behind."""
    bucket_of({"endpoint": endpoint, "name": name, "keys": keys}).create()


def bucket_of(medium):
    keys = tuple(medium["keys"])
    return Bucket(medium["endpoint"], medium["name"], client_at(medium["endpoint"], keys), keys)


@cache
def client_at(endpoint, keys):
    """One for all tests: making one costs a quarter of a second."""
    return make_client(endpoint, keys)
