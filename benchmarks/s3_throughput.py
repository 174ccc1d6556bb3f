"""The s3 tier against a plain HTTP client and boto3, on one gateway, in one run.

    python -m benchmarks.s3_throughput [--sizes 4,8] [--connections 1,4] [--total-mib 64] [--rounds 7]
        [--endpoint URL --access KEY --secret KEY] [--json FILE]

Without ``--endpoint`` Ceph's gateway is started on loopback (its Debian packages must be installed).
All read and write the same objects with the same number of connections, in turn; speeds are medians of
the rounds, and so are the ratios, each of which is of one round.

* ``tier``: our driver, a thread a connection, as the core has; ``tier, 1 thread``: the same connections
  from one call, which sends its requests ahead;
* ``http.client``: signed beforehand, kept-alive connections, ``readinto`` a buffer, or the buffer sent;
* ``urllib3``: the same URLs, ``.data``;
* ``boto3``: ``get_object()["Body"].read()`` and ``put_object``, with a pool of as many connections.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import urllib3
from botocore.config import Config

from flexkv_core import HostRegion, TierContext
from flexkv_driver_s3.config import S3Config
from flexkv_driver_s3.tier import S3Tier

MIB = 1 << 20
GOAL = 0.9
"""Our GET by the plain client's must not be below this."""

MISSED = 3
"""Exit status where everything was measured, and the goal was missed."""

Share = Callable[[int, Sequence[int]], None]


@dataclass(frozen=True)
class Gateway:
    """Where, and with which keys."""

    endpoint: str
    access: str
    secret: str


class Work:
    """Blocks in memory, their names in a fresh bucket, and ways to move them."""

    def __init__(self, gateway: Gateway, block_bytes: int, count: int, connections: int) -> None:
        self.gateway = gateway
        self.bucket = f"bench-{uuid.uuid4().hex[:12]}"
        self.block_bytes = block_bytes
        self.connections = connections
        self.keys = [os.urandom(32) for _ in range(count)]
        self._regions = [HostRegion(count * block_bytes) for _ in range(2)]
        self.values, self.buffers = (
            [region.view[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]
            for region in self._regions
        )
        for value in self.values:
            value[:] = os.urandom(block_bytes)
        self.client = self._client()
        self.client.create_bucket(Bucket=self.bucket)
        self.tier = self._tier(threads=connections, requests=1)
        self.deep_tier = self._tier(threads=1, requests=connections)
        self.names = [self.tier._names.block(key) for key in self.keys]
        self.urls = {method: [self._presigned(method, n) for n in self.names] for method in ("GET", "PUT")}
        place = urlsplit(gateway.endpoint)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        self.plain = [kind(place.hostname or "", place.port) for _ in range(connections)]
        self.pool = urllib3.PoolManager(maxsize=connections, block=True, retries=False)

    def _client(self) -> Any:
        session = boto3.session.Session(
            aws_access_key_id=self.gateway.access, aws_secret_access_key=self.gateway.secret
        )
        config = Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            max_pool_connections=self.connections,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        endpoint = self.gateway.endpoint
        return session.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)

    def _tier(self, threads: int, requests: int) -> S3Tier:
        config = S3Config(
            bucket=self.bucket,
            endpoint_url=self.gateway.endpoint,
            access_key_id=self.gateway.access,
            secret_access_key=self.gateway.secret,
            max_concurrency=threads,
            requests_per_call=requests,
            index_ttl_s=3600,
            multipart_above=1 << 40,
        )
        return S3Tier(config, TierContext(name="bench", value_bytes=self.block_bytes, head_bytes=64))

    def _presigned(self, method: str, name: str) -> str:
        operation = {"GET": "get_object", "PUT": "put_object"}[method]
        return str(self.client.generate_presigned_url(operation, Params={"Bucket": self.bucket, "Key": name}))

    def ways(self, verb: str) -> dict[str, tuple[int, Share]]:
        """By name: how many threads, and what each does with its share of the blocks."""
        names = ("tier", "tier, 1 thread", "http.client", "urllib3", "boto3")
        functions = [getattr(self, f"_{verb}_{way}") for way in ("tier", "deep", "plain", "urllib3", "boto3")]
        threads = [self.connections, 1] + [self.connections] * 3
        return {name: (n, way) for name, n, way in zip(names, threads, functions, strict=True)}

    def _get_tier(self, _number: int, share: Sequence[int], tier: S3Tier | None = None) -> None:
        for batch in batches(share):
            outcomes = (tier or self.tier).load(
                [self.keys[i] for i in batch], [self.buffers[i] for i in batch]
            )
            assert all(row.is_ok for row in outcomes), outcomes

    def _put_tier(self, _number: int, share: Sequence[int], tier: S3Tier | None = None) -> None:
        for batch in batches(share):
            outcomes = (tier or self.tier).store(
                [self.keys[i] for i in batch], [self.values[i] for i in batch]
            )
            assert all(row.is_ok for row in outcomes), outcomes

    def _get_deep(self, number: int, share: Sequence[int]) -> None:
        self._get_tier(number, share, self.deep_tier)

    def _put_deep(self, number: int, share: Sequence[int]) -> None:
        self._put_tier(number, share, self.deep_tier)

    def _get_plain(self, number: int, share: Sequence[int]) -> None:
        for i in share:
            response = self._plain(number, "GET", i, None)
            view, done = self.buffers[i], 0
            while done < len(view) and (got := response.readinto(view[done:])):
                done += got
            assert done == len(view)

    def _put_plain(self, number: int, share: Sequence[int]) -> None:
        for i in share:
            self._plain(number, "PUT", i, self.values[i]).read()

    def _plain(self, number: int, method: str, i: int, body: Any) -> http.client.HTTPResponse:
        parts = urlsplit(self.urls[method][i])
        self.plain[number].request(method, f"{parts.path}?{parts.query}", body)
        response = self.plain[number].getresponse()
        assert response.status == 200, response.status
        return response

    def _get_urllib3(self, _number: int, share: Sequence[int]) -> None:
        for i in share:
            assert len(self.pool.request("GET", self.urls["GET"][i]).data) == self.block_bytes

    def _put_urllib3(self, _number: int, share: Sequence[int]) -> None:
        for i in share:
            assert self.pool.request("PUT", self.urls["PUT"][i], body=bytes(self.values[i])).status == 200

    def _get_boto3(self, _number: int, share: Sequence[int]) -> None:
        for i in share:
            body = self.client.get_object(Bucket=self.bucket, Key=self.names[i])["Body"]
            assert len(body.read()) == self.block_bytes

    def _put_boto3(self, _number: int, share: Sequence[int]) -> None:
        for i in share:
            self.client.put_object(Bucket=self.bucket, Key=self.names[i], Body=bytes(self.values[i]))

    def close(self) -> None:
        """Remove the objects and the bucket, and close everything."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        for page in pages:
            rows = [{"Key": row["Key"]} for row in page.get("Contents", ())]
            if rows:
                self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": rows, "Quiet": True})
        self.client.delete_bucket(Bucket=self.bucket)
        for thing in (*self.plain, self.tier, self.deep_tier, self.client):
            thing.close()
        self.pool.clear()
        self.values, self.buffers = [], []
        for region in self._regions:
            region.close()


def batches(share: Sequence[int], most: int = 64) -> Iterator[Sequence[int]]:
    """The share in pieces of at most ``most``."""
    for at in range(0, len(share), most):
        yield share[at : at + most]


def measure(work: Work, rounds: int) -> dict[str, dict[str, list[float]]]:
    """GB/s of each round by verb and way; ways take turns, so that all see the same weather."""
    results: dict[str, dict[str, list[float]]] = {"put": {}, "get": {}}
    with ThreadPoolExecutor(work.connections) as threads:
        for verb in results:
            ways = work.ways(verb)
            order = list(ways)
            for turn in range(rounds + 1):
                for name in order:
                    seconds = timed(threads, *ways[name], len(work.keys))
                    if turn:  # the first round warms up
                        rate = len(work.keys) * work.block_bytes / seconds / 1e9
                        results[verb].setdefault(name, []).append(rate)
                order.reverse()
    assert work.buffers == work.values, "what was read is not what was written"
    return results


def timed(threads: ThreadPoolExecutor, count: int, way: Share, blocks: int) -> float:
    """Seconds for all blocks, by ``count`` threads."""
    began = time.perf_counter()
    shares = [range(number, blocks, count) for number in range(count)]
    for done in [threads.submit(way, number, share) for number, share in enumerate(shares)]:
        done.result()
    return time.perf_counter() - began


@contextlib.contextmanager
def gateway_of(options: argparse.Namespace) -> Iterator[Gateway]:
    """The one given, or Ceph's, started here."""
    if options.endpoint:
        yield Gateway(options.endpoint, options.access, options.secret)
        return
    from tests.support.ceph_rgw import ceph_gateway

    with ceph_gateway() as server:
        yield Gateway(server.endpoint, server.access, server.secret)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="4,8", help="block sizes in MiB")
    parser.add_argument("--connections", default="1,4")
    parser.add_argument("--total-mib", type=int, default=64, help="bytes a round, in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--endpoint")
    parser.add_argument("--access", default=os.environ.get("AWS_ACCESS_KEY_ID", "test"))
    parser.add_argument("--secret", default=os.environ.get("AWS_SECRET_ACCESS_KEY", "test"))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    print(machine(options))
    with gateway_of(options) as gateway:
        for size in map(int, options.sizes.split(",")):
            for connections in map(int, options.connections.split(",")):
                count = max(options.total_mib // size, connections)
                with contextlib.closing(Work(gateway, size * MIB, count, connections)) as work:
                    rates = measure(work, options.rounds)
                rows.append({"mib": size, "connections": connections, **rates})
                show(rows[-1])
    is_good = all(share(row["get"], "tier") >= GOAL for row in rows)
    print(f"goal of {GOAL:.0%} of http.client's GET {'met' if is_good else 'missed'}")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine(options), "goal": GOAL, "rows": rows}, indent=1)
        )
    return 0 if is_good else MISSED


def machine(options: argparse.Namespace) -> str:
    """What all of it ran on."""
    gateway = options.endpoint or (
        subprocess.run(["radosgw", "--version"], capture_output=True, text=True, check=True)
        .stdout.partition("(")[0]
        .strip()
        .replace("ceph version", "Ceph gateway")
    )
    return (
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, {gateway}, "
        f"boto3 {boto3.__version__}, urllib3 {version('urllib3')}; "
        f"{options.total_mib} MiB, {options.rounds} rounds"
    )


def share(told: dict[str, list[float]], name: str) -> float:
    """A way's speed by the plain client's, the median of the rounds."""
    return statistics.median(own / plain for own, plain in zip(told[name], told["http.client"], strict=True))


def show(row: dict[str, Any]) -> None:
    print(f"{row['mib']} MiB objects, {row['connections']} connections (GB/s, and by http.client's)")
    for verb in ("get", "put"):
        told = row[verb]
        print(
            f"  {verb.upper()}  "
            + "  ".join(
                f"{name} {statistics.median(told[name]):.2f} ({share(told, name):.0%})" for name in told
            )
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
