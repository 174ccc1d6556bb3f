"""A bucket as a test sees it, behind a tier's back: plain boto3."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from flexkv_core import TierContext
from flexkv_driver_s3.config import S3Config
from flexkv_driver_s3.tier import S3Tier
from tests.support.waiting import DEADLINE_S

KEYS = ("test", "test")


def make_client(endpoint: str, keys: tuple[str, str] = KEYS) -> Any:
    """A boto3 client, to be closed."""
    session = boto3.session.Session(aws_access_key_id=keys[0], aws_secret_access_key=keys[1])
    config = Config(
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return session.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)


class Bucket:
    """Raw objects of one bucket."""

    def __init__(self, endpoint: str, name: str, client: Any, keys: tuple[str, str] = KEYS) -> None:
        self.endpoint, self.name, self.client = endpoint, name, client
        self.keys = {"access_key_id": keys[0], "secret_access_key": keys[1]}

    def create(self) -> Bucket:
        self.client.create_bucket(Bucket=self.name)
        return self

    def config(self, **options: Any) -> S3Config:
        """Options of a tier in this bucket; what others store is seen at once."""
        defaults = {
            "index_ttl_s": 0,
            "read_timeout_s": DEADLINE_S,
            "request_timeout_s": DEADLINE_S,
            "max_concurrency": 4,
            **self.keys,
        }
        return S3Config(bucket=self.name, endpoint_url=self.endpoint, **{**defaults, **options})

    def tier(self, value_bytes: int = 1 << 16, **options: Any) -> S3Tier:
        context = TierContext(name="far", value_bytes=value_bytes, head_bytes=64)
        return S3Tier(self.config(**options), context)

    def names(self, contains: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [row["Key"] for page in pages for row in page.get("Contents", ()) if contains in row["Key"]]

    def name_of(self, key: bytes, prefix: str = "") -> str | None:
        """The object of a key below ``prefix``, whatever its layout and shard."""
        names = [name for name in self.names("blocks/") if name.endswith(key.hex())]
        return next((name for name in names if name.startswith(prefix)), None)

    def read(self, key: bytes, prefix: str = "") -> bytes | None:
        name = self.name_of(key, prefix)
        try:
            return bytes(self.client.get_object(Bucket=self.name, Key=name)["Body"].read()) if name else None
        except ClientError:
            return None

    def write(self, key: bytes, data: bytes | None, prefix: str = "") -> None:
        name = self.name_of(key, prefix)
        if data is None:
            self.client.delete_object(Bucket=self.name, Key=name)
        else:
            self.client.put_object(Bucket=self.name, Key=name, Body=data)
