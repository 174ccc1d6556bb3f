"""Options of the ``s3`` driver."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from flexkv_core import ByteSize, Model, Seconds

_HOST = re.compile(r"(?:(?!-)[a-z0-9-]{1,63}(?<!-)\.)*(?!-)[a-z0-9-]{1,63}(?<!-)\.?")
"""What botocore takes for a host's name: it raises what is no error of its own for anything else."""


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.port is not None and not parts.port:
            return False
        if ":" in host:
            ipaddress.IPv6Address(host)
            return True
    except ValueError:
        return False
    return _HOST.fullmatch(host) is not None


class S3Config(Model):
    """Which bucket, at which endpoint, with which keys, and how patient to be."""

    bucket: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,254}$", description="The bucket; it must exist."
    )
    prefix: str = Field(
        "flexkv",
        pattern=r"^[A-Za-z0-9._/-]*$",
        description="All objects lie below this; several chains may share it, layouts are kept apart.",
    )
    endpoint_url: str | None = Field(
        None, description="`http(s)://host[:port]` of an S3-compatible server; default: AWS."
    )
    region: str | None = Field(
        None, description="The bucket's region; default: what boto3 finds, or us-east-1."
    )
    addressing: Literal["auto", "path", "virtual"] = Field(
        "auto",
        description="Where the bucket's name goes; auto: in the path for an own endpoint, else in the host.",
    )
    access_key_id: SecretStr | None = Field(
        None, description="Access key; default: boto3's own search (environment, profile, instance role)."
    )
    secret_access_key: SecretStr | None = Field(None, description="Secret that belongs to `access_key_id`.")
    session_token: SecretStr | None = Field(None, description="Session token of temporary keys.")
    profile: str | None = Field(None, description="Profile of the AWS configuration files to use.")
    verify: bool = Field(True, description="Check the server's certificate; false only for experiments.")
    ca_file: Path | None = Field(
        None, description="PEM file of the authorities to trust instead of botocore's."
    )
    connect_timeout_s: Seconds = Field(
        2.0, gt=0, description="Longest wait for a connection, seconds, for each address of the endpoint."
    )
    read_timeout_s: Seconds = Field(
        5.0, gt=0, description="Longest silence of the server within a request, seconds."
    )
    request_timeout_s: Seconds = Field(
        20.0,
        gt=0,
        description="Longest time of one request, seconds, however steadily a slow server trickles.",
    )
    max_concurrency: int = Field(8, ge=1, le=64, description="Calls at once; each has its own connections.")
    requests_per_call: int = Field(
        4,
        ge=1,
        le=32,
        description="Requests that one call has under way, each on its own connection: hides their waits.",
    )
    shard_chars: int = Field(
        2,
        ge=0,
        le=4,
        description="Hex digits of the key that name a sub-prefix: 2 makes 256, for stores that scale by "
        "prefix. Equal for all that share the prefix.",
    )
    multipart_above: ByteSize = Field(
        64 << 20, ge=5 << 20, description="Longer values are uploaded in parts; others by one request."
    )
    multipart_part: ByteSize = Field(
        16 << 20, ge=5 << 20, description="Size of a part; the store's least is 5 MiB."
    )
    probe: Literal["write", "read", "none"] = Field(
        "write",
        description="Asked at start: write: list, put, get and delete a small object; read: list and get, "
        "for a read-only tier; none: nothing, so a store that is down does not stop the start.",
    )
    list_timeout_s: Seconds = Field(
        10.0, description="Longest listing at start, seconds; the rest is listed in steps later."
    )
    index_ttl_s: Seconds = Field(
        5.0, description="Blocks that others stored are found after at most so many seconds (journal)."
    )
    relist_every_s: Seconds = Field(
        600.0, gt=0, description="Age at which the listing is begun anew, which also finds deletions."
    )
    list_step_s: Seconds = Field(
        0.2, description="Longest time that one lookup gives to continuing a listing, seconds."
    )
    journal: bool = Field(
        True, description="Write a small object naming the new blocks with each store, and read others'."
    )

    @field_validator("prefix")
    @classmethod
    def _prefix_has_no_empty_parts(cls, value: str) -> str:
        parts = [part for part in value.split("/") if part]
        if {".", ".."} & set(parts):
            raise ValueError("must not have . or .. between its slashes")
        return "/".join(parts)

    @field_validator("endpoint_url")
    @classmethod
    def _endpoint_is_a_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/?#@\s]+/?", value):
            raise ValueError("must be http://host:port or https://host:port, without a path or user")
        if value is not None and not _is_address(value):
            raise ValueError(
                "must name a host of letters, digits, - and dots, or an address (IPv6 in brackets), "
                "and a port up to 65535"
            )
        return value.rstrip("/") if value else value

    @model_validator(mode="after")
    def _keys_come_in_pairs(self) -> S3Config:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key are given together or not at all")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        return self
