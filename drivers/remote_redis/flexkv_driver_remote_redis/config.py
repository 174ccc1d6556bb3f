"""Options of the ``remote_redis`` driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from flexkv_core import ByteSize, Model, Seconds

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        host: Name or address; empty for a Unix socket.
        port: TCP port.
        path: Path of the Unix socket; empty for TCP.
        db: Number of the database.
        has_tls: Whether the connection is encrypted.
    """

    host: str
    port: int
    path: str
    db: int
    has_tls: bool

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.has_tls else 'redis'}://{host}:{self.port}"


def _split(text: str) -> SplitResult:
    # The standard library's own messages repeat what they do not like: a password, if it has a slash in it.
    try:
        return urlsplit(text)
    except ValueError:
        raise ValueError("what is in brackets must be an address of version 6") from None


def _port(parts: SplitResult, default_port: int) -> int:
    try:
        port = parts.port
    except ValueError:
        raise ValueError("the port must be a number up to 65535") from None
    return port if port is not None else default_port


def parse_url(url: str, default_port: int = DEFAULT_PORT) -> Address:
    """Read ``redis://host:port/db``, ``rediss://...`` (TLS) or ``unix:///path``.

    Raises:
        ValueError: with what to write instead; never with the url, which may hold a password.
    """
    parts = _split(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError("must begin with redis://, rediss:// (TLS) or unix:///")
    if parts.password is not None or parts.username is not None:
        raise ValueError("must hold no credentials: give `username` and `password` as options of their own")
    if parts.query or parts.fragment:
        raise ValueError("must hold no query: each setting is an option of its own")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError("must name a socket, as unix:///run/redis/redis.sock")
        return Address("", 0, unquote(parts.path), 0, has_tls=False)
    if not parts.hostname:
        raise ValueError("must name a host, as redis://10.0.0.5:6379")
    db = parts.path.strip("/") or "0"
    if not db.isdigit():
        raise ValueError("must end in a database number or in nothing")
    return Address(parts.hostname, _port(parts, default_port), "", int(db), has_tls=parts.scheme == "rediss")


def parse_node(node: str, default_port: int) -> tuple[str, int]:
    """Read ``host`` or ``host:port``.  Raises ValueError."""
    parts = _split(f"//{node}")
    if not parts.hostname or parts.path or parts.username is not None:
        raise ValueError("each must be host or host:port")
    return parts.hostname, _port(parts, default_port)


class TlsConfig(Model):
    """How a ``rediss://`` server is checked, and what this side shows."""

    ca_file: str | None = Field(None, description="PEM file of trusted authorities; default: the system's.")
    cert_file: str | None = Field(None, description="PEM file of this side's certificate.")
    key_file: str | None = Field(None, description="PEM file of this side's key.")
    key_password: SecretStr | None = Field(None, description="Password of the key file.")
    verify: Literal["full", "authority", "none"] = Field(
        "full",
        description="full: certificate and host name; authority: certificate only; "
        "none: encrypted, but anybody may answer.",
    )


class SentinelConfig(Model):
    """A master that Sentinels name; ``url`` and ``nodes`` are then the Sentinels' addresses."""

    master: str = Field(min_length=1, description="Name of the master as the Sentinels know it.")
    username: str | None = Field(None, description="ACL user at the Sentinels, if they ask for one.")
    password: SecretStr | None = Field(None, description="Password at the Sentinels, if they ask for one.")


class RedisConfig(Model):
    """Which server, how it is reached, and for how long blocks are kept."""

    url: str = Field(
        description="redis://host:port/db, rediss://host:port/db for TLS, or unix:///path. No credentials."
    )
    nodes: tuple[str, ...] = Field(
        (), description="Further host:port of the same cluster or Sentinels, tried in turn."
    )
    cluster: bool = Field(False, description="The server is a Redis Cluster; blocks are routed by slot.")
    sentinel: SentinelConfig | None = Field(None, description="Ask Sentinels for the master.")
    username: str | None = Field(None, description="ACL user; default: the server's default user.")
    password: SecretStr | None = Field(None, description="Password; write it as ${VARIABLE}.")
    tls: TlsConfig | None = Field(None, description="How TLS is checked; only with rediss://.")
    prefix: str = Field(
        "flexkv:",
        max_length=128,
        pattern=r"^[^{}\s]*$",
        description="Every key begins with this (an ACL can be bound to it); 64 hex digits follow.",
    )
    ttl_s: Seconds | None = Field(
        None, ge=0.001, description="Blocks expire so long after they were stored. Default: never."
    )
    ttl_refresh: bool = Field(
        False, description="A load starts a block's time anew. Needs ttl_s and Redis 6.2 or later."
    )
    connections: int = Field(
        4,
        ge=1,
        le=64,
        description="Most connections, which is also most calls at once. "
        "One rarely fills a link; more than the server has io-threads gains little.",
    )
    connect_timeout_s: Seconds = Field(
        2.0, gt=0, description="Longest wait for a connection; a server on the same network answers in ms."
    )
    timeout_s: Seconds = Field(
        5.0,
        gt=0,
        description="Longest time for one block on the wire, or for one lookup; then the connection goes.",
    )
    max_value: ByteSize = Field(
        512 << 20,
        gt=0,
        le=512 << 20,
        description="Longest block; the server's own limit (proto-max-bulk-len) is 512 MiB unless raised.",
    )
    required: bool = Field(
        False,
        description="Refuse to start when the server cannot be used at start. "
        "By default the tier starts down, with one line in the log, and comes back by itself.",
    )

    @field_validator("url")
    @classmethod
    def _url_is_readable(cls, url: str) -> str:
        parse_url(url)
        return url

    @field_validator("nodes")
    @classmethod
    def _nodes_are_readable(cls, nodes: tuple[str, ...]) -> tuple[str, ...]:
        for node in nodes:
            parse_node(node, DEFAULT_PORT)
        return nodes

    @model_validator(mode="after")
    def _options_agree(self) -> RedisConfig:
        address = parse_url(self.url)
        if self.cluster and self.sentinel is not None:
            raise ValueError("cluster and sentinel exclude each other")
        if self.nodes and not self.cluster and self.sentinel is None:
            raise ValueError("nodes is for a cluster or for Sentinels: set one of them")
        if address.path and (self.cluster or self.sentinel is not None):
            raise ValueError("a cluster or Sentinel is not reached through a Unix socket")
        if self.cluster and address.db:
            raise ValueError("a cluster has no databases: leave the number off the url")
        if self.tls is not None and not address.has_tls:
            raise ValueError("tls is set, but the url does not begin with rediss://")
        if self.ttl_refresh and self.ttl_s is None:
            raise ValueError("ttl_refresh needs ttl_s")
        if self.username is not None and self.password is None:
            raise ValueError("username needs password")
        return self

    @property
    def address(self) -> Address:
        """Where ``url`` points."""
        return parse_url(self.url, SENTINEL_PORT if self.sentinel is not None else DEFAULT_PORT)

    @property
    def members(self) -> list[tuple[str, int]]:
        """Host and port of ``url`` and of every one of ``nodes``."""
        first = self.address
        return [(first.host, first.port), *(parse_node(node, first.port) for node in self.nodes)]
