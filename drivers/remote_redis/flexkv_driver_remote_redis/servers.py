"""One process's connections: a server, a master behind Sentinels, or a cluster.

redis-py connects, authenticates, encrypts and pools; how many connections are in use at once is
bounded here, and those that are well stay with their wires (see ``kept``).  The library's own
retries are off: the core retries, with one deadline for all.

Threads: any.  ``_lock`` covers the making of the client and the refresh of a cluster's map; the
pools have locks of their own, and no lock is held while bytes move.
"""

from __future__ import annotations

import inspect
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from time import monotonic
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from .config import RedisConfig, TlsConfig
from .faults import refusal_of
from .kept import Held, KeptWires
from .raw_wire import RawWire
from .sentinels import Sentinels
from .wire import ClientWire, Wire

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 30
_REFRESH_S = 1.0
"""A cluster's map is asked for again at most this often."""

_VERIFY = {"full": ("required", True), "authority": ("required", False), "none": ("none", False)}


class Servers:
    """Connections to one server, or to whichever server Sentinels call the master.

    Attributes:
        has_redirects: Whether a server may name another one for a key.
    """

    has_redirects = False

    def __init__(self, config: RedisConfig) -> None:
        """Connect to nothing yet."""
        self._config = config
        self._places = threading.BoundedSemaphore(config.connections)
        self._lock = threading.Lock()
        self._client: Any = None
        self._helpers: list[Any] = []  # further clients that the library made, to be closed as well
        self._kept = KeptWires()
        self.is_raw = True

    def routes(self, names: Sequence[bytes]) -> list[tuple[Any, list[int]]]:
        """Which pool has which of the names, by their places.  Raises what connecting raises."""
        return [(self.client().connection_pool, list(range(len(names))))]

    def client(self) -> Any:
        """The library's client, made when first asked for."""
        client = self._client
        if client is None:
            with self._connecting():
                client = self._client = self._client or self._make_client()
        return client

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """One at a time; who waits for another's attempt waits no longer than for a server."""
        if not self._lock.acquire(timeout=self._config.timeout_s):
            raise redis.TimeoutError("the servers do not answer: another call is still trying to connect")
        try:
            yield
        finally:
            self._lock.release()

    def one_client(self) -> Any:
        """The library's client of one server, for questions about the server itself."""
        return self.client()

    def client_wire(self) -> Wire | None:
        """A wire that follows a cluster's redirections; None where there are none to follow."""
        return None

    def note_trouble(self) -> None:
        """Something failed that a newer view of the servers may cure."""

    @contextmanager
    def wire(self, pool: Any) -> Iterator[Wire]:
        """Borrow a connection of ``pool``.

        It goes back only if every reply was read; after any exception it is closed.

        Raises:
            redis.RedisError: it cannot be had: all are busy, or the server is not to be reached.
        """
        if not self._places.acquire(timeout=self._config.timeout_s):
            raise redis.TimeoutError(
                f"all {self._config.connections} connections were busy for {self._config.timeout_s:g} s"
            )
        try:
            held = self._kept.take(pool) or self._connect(pool)
            is_clean = False
            try:
                yield held.wire
                is_clean = not held.wire.num_pending and not held.wire.is_spent
            finally:
                if not is_clean:
                    self._kept.drop_all()  # what is wrong with one is likely wrong with all
                    held.drop()
                elif held.wire.is_quiet:
                    self._kept.keep(held)
                else:
                    held.give_back()
        finally:
            self._places.release()

    def _connect(self, pool: Any) -> Held:
        connection = _take(pool)
        with ExitStack() as undo:
            undo.callback(pool.release, connection)
            undo.callback(connection.disconnect)
            held = Held(pool, connection, self._wire_on(connection))
            undo.pop_all()
        return held

    def close(self) -> None:
        """Close every connection; a later call would connect again."""
        self._kept.drop_all()
        with self._lock:
            clients, self._client, self._helpers = [self._client, *self._helpers], None, []
        for client in clients:
            if client is not None:
                self._close(client)

    def _close(self, client: Any) -> None:
        if hasattr(client, "connection_pool"):
            client.connection_pool.disconnect()
        client.close()

    def _wire_on(self, connection: Any) -> Wire:
        sock = _socket_of(connection)
        if sock is not None:
            return RawWire(sock, self._config.timeout_s)
        if self.is_raw:
            self.is_raw = False
            logger.warning(
                "[FlexKV] remote_redis: redis-py %s shows no socket on its connections: values are "
                "copied through its parser, which is several times slower",
                redis.__version__,
            )
        return ClientWire(partial(_round_trip, connection), refusal_of)

    def _make_client(self) -> Any:
        config, address = self._config, self._config.address
        if address.path:
            return redis.Redis(unix_socket_path=address.path, **connection_options(config))
        if config.sentinel is None:
            return redis.Redis(host=address.host, port=address.port, **connection_options(config))
        own = {"username": config.sentinel.username, "password": _secret(config.sentinel.password)}
        options = connection_options(config)
        sentinel: Any = Sentinels  # redis-py annotates it in part
        sentinels = sentinel(config.members, sentinel_kwargs={**options, "db": 0, **own})
        self._helpers = list(sentinels.sentinels)
        return sentinels.master_for(config.sentinel.master, **options)


class ClusterServers(Servers):
    """Connections to the masters of a cluster, each name by its slot."""

    has_redirects = True

    def __init__(self, config: RedisConfig) -> None:
        """Connect to nothing yet."""
        super().__init__(config)
        self._is_stale = False
        self._refreshed_at = 0.0

    def routes(self, names: Sequence[bytes]) -> list[tuple[Any, list[int]]]:
        client = self.client()
        self._refresh(client)
        places: dict[str, tuple[Any, list[int]]] = {}
        for place, name in enumerate(names):
            node = client.get_node_from_key(name)
            pool = client.get_redis_connection(node).connection_pool
            places.setdefault(node.name, (pool, []))[1].append(place)
        return list(places.values())

    def one_client(self) -> Any:
        client = self.client()
        return client.get_redis_connection(client.get_default_node())

    def client_wire(self) -> Wire:
        return ClientWire(self.client().execute_command, refusal_of)

    def note_trouble(self) -> None:
        self._is_stale = True

    def _refresh(self, client: Any) -> None:
        if not self._is_stale or monotonic() < self._refreshed_at + _REFRESH_S:
            return
        if not self._lock.acquire(blocking=False):
            return  # another call is at it; until it is done the old map will do
        try:
            self._refreshed_at = monotonic()
            client.nodes_manager.initialize()
            self._is_stale = False
        finally:
            self._lock.release()

    def _make_client(self) -> Any:
        options = connection_options(self._config)
        del options["db"]
        node: Any = ClusterNode  # redis-py annotates it in part
        nodes = [node(host, port) for host, port in self._config.members]
        try:
            return RedisCluster(startup_nodes=list(nodes), require_full_coverage=False, **options)
        finally:
            # The cluster's own addresses are used from here on, not the ones that it was found by.
            for found in nodes:
                if found.redis_connection is not None:
                    found.redis_connection.connection_pool.disconnect()


def open_servers(config: RedisConfig) -> Servers:
    """Connections as the options ask for them; none is made yet."""
    return ClusterServers(config) if config.cluster else Servers(config)


def connection_options(config: RedisConfig) -> dict[str, Any]:
    """What every connection is made with."""
    options: dict[str, Any] = {
        "db": config.address.db,
        "username": config.username,
        "password": _secret(config.password),
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.connect_timeout_s,
        "max_connections": _UNBOUNDED,
        # Values are bytes whatever the protocol; 2 has no messages that nobody asked for.
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if not config.address.path:
        options["socket_keepalive"] = True
    if config.address.has_tls:
        options.update(_tls_options(config.tls or TlsConfig()))
    return options


def _tls_options(tls: TlsConfig) -> dict[str, Any]:
    requires, checks_name = _VERIFY[tls.verify]
    return {
        "ssl": True,
        "ssl_cert_reqs": requires,
        "ssl_check_hostname": checks_name,
        "ssl_ca_certs": tls.ca_file,
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
        "ssl_password": _secret(tls.key_password),
    }


def _secret(value: Any) -> str | None:
    return None if value is None else value.get_secret_value()


def _socket_of(connection: Any) -> socket.socket | None:
    # No public name leads to it.  Source: redis-py 5.1 to 8.1, connection.py.
    sock = getattr(connection, "_sock", None)
    return sock if isinstance(sock, socket.socket) else None


def _take(pool: Any) -> Any:
    return pool.get_connection("GET") if _wants_command() else pool.get_connection()


@cache
def _wants_command() -> bool:
    # Until redis-py 5.3 a pool had to know the command; since then it warns if it is told.
    wanted = inspect.signature(redis.ConnectionPool.get_connection).parameters["command_name"]
    return wanted.default is inspect.Parameter.empty


def _round_trip(connection: Any, *command: object) -> object:
    connection.send_command(*command)
    return connection.read_response()
