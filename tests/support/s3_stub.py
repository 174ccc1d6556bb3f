"""A small S3 server in memory, fast and thread-safe, that can be told to misbehave.

It knows path style, objects, listings, multi-object deletion and multipart uploads; it checks no signatures
(moto's and Ceph's servers do).  Run as a module it is a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from flexkv_core.cli._process import free_port
from tests.support.child import ChildServer
from tests.support.waiting import DEADLINE_S

BUCKET = "bucket"
How = Callable[["Handler"], None]


class StubS3:
    """A server with one bucket, and rules for how to treat the next requests."""

    def __init__(self, tls: ssl.SSLContext | None = None, port: int = 0, host: str = "127.0.0.1") -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self._rules: list[tuple[str, str, How, int]] = []
        self._connections: list[socket.socket] = []
        if not port and ":" not in host:
            port = free_port()  # none that the kernel gives to a client once this server is closed
        kind = _Server6 if ":" in host else _Server
        self._server = kind((host, port), Handler)
        self._server.stub = self
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme = "http" if tls is None else "https"
        self.port = self._server.server_port
        self.endpoint = (
            f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
        )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def treat(self, method: str, contains: str, how: How, times: int = 1 << 30) -> None:
        """The next ``times`` requests of ``method`` whose path contains this are answered by ``how``."""
        with self.lock:
            self._rules.append((method, contains, how, times))

    def behave(self) -> None:
        """Forget all rules."""
        with self.lock:
            self._rules.clear()

    def rule_for(self, method: str, path: str) -> How | None:
        with self.lock:
            self.requests.append((method, path))
            for number, (verb, contains, how, times) in enumerate(self._rules):
                if method == verb and contains in path and times > 0:
                    self._rules[number] = (verb, contains, how, times - 1)
                    return how
        return None

    def count(self, method: str, contains: str = "") -> int:
        """Requests of this kind so far."""
        with self.lock:
            return sum(verb == method and contains in path for verb, path in self.requests)

    @property
    def num_connections(self) -> int:
        """Connections taken so far."""
        return len(self._connections)

    def connected(self, connection: socket.socket) -> None:
        with self.lock:
            self._connections.append(connection)

    def close(self) -> None:
        """Stop listening, and break every connection."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)
        with self.lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    stub: StubS3
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def process_request(self, request: Any, client_address: Any) -> None:
        self.stub.connected(request)
        super().process_request(request, client_address)

    def handle_error(self, *_args: Any) -> None:
        """Clients that go away in the middle are what the tests are about."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    timeout = DEADLINE_S
    server: _Server

    def setup(self) -> None:
        super().setup()
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()

    def log_message(self, *_args: Any) -> None:
        pass

    def _handle(self) -> None:
        self.stub = self.server.stub
        parts = urlsplit(self.path)
        self.query = {
            name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        bucket, _, self.name = unquote(parts.path).lstrip("/").partition("/")
        how = self.stub.rule_for(self.command, self.path)
        if how is not None:
            how(self)
            return
        body = self.body()
        if not self.name and self.command == "PUT":
            self.answer(200)  # a bucket is made
        elif bucket != BUCKET:
            self.refuse(404, "NoSuchBucket")
        else:
            getattr(self, f"_{self.command.lower()}")(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def body(self) -> bytes:
        """The whole body; one whose sender went away in the middle is no request, as at any S3 server."""
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        if len(data) < length:
            raise ConnectionResetError
        return data

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str = "no", **headers: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self.answer(status, text.encode(), **headers)

    def value(self) -> bytes | None:
        with self.stub.lock:
            return self.stub.objects.get(self.name)

    def _get(self, _body: bytes) -> None:
        if not self.name:
            self._list()
            return
        value = self.value()
        if value is None:
            self.refuse(404, "NoSuchKey")
        else:
            self.answer(200, value)

    def _list(self) -> None:
        prefix, after = self.query.get("prefix", ""), self.query.get("start-after", "")
        limit = int(self.query.get("max-keys", 1000))
        with self.stub.lock:
            rows = sorted(
                (n, len(v)) for n, v in self.stub.objects.items() if n.startswith(prefix) and n > after
            )
        contents = "".join(
            f"<Contents><Key>{n}</Key><Size>{size}</Size></Contents>" for n, size in rows[:limit]
        )
        more = "true" if len(rows) > limit else "false"
        text = (
            f"<ListBucketResult xmlns='urn:s3'>{contents}<IsTruncated>{more}</IsTruncated></ListBucketResult>"
        )
        self.answer(200, text.encode())

    def _put(self, body: bytes) -> None:
        with self.stub.lock:
            if "uploadId" in self.query:
                self.stub.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = body
            else:
                self.stub.objects[self.name] = body
        self.answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def _post(self, body: bytes) -> None:
        if "delete" in self.query:
            names = re.findall(r"<Key>([^<]*)</Key>", body.decode())
            with self.stub.lock:
                for name in names:
                    self.stub.objects.pop(name, None)
            self.answer(200, b"<DeleteResult/>")
        elif "uploads" in self.query:
            with self.stub.lock:
                upload = f"up/{len(self.stub.uploads)}+"
                self.stub.uploads[upload] = {}
            text = f"<UploadId>{escape(upload)}</UploadId>"
            self.answer(
                200, f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>".encode()
            )
        else:
            with self.stub.lock:
                parts = self.stub.uploads.pop(self.query["uploadId"])
                self.stub.objects[self.name] = b"".join(parts[number] for number in sorted(parts))
            self.answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

    def _delete(self, _body: bytes) -> None:
        with self.stub.lock:
            if "uploadId" in self.query:
                self.stub.uploads.pop(self.query["uploadId"], None)
            else:
                self.stub.objects.pop(self.name, None)
        self.answer(204)


# ---- ways to misbehave, for ``StubS3.treat`` -------------------------------------------------------


def cut_after(num_bytes: int) -> How:
    """Send the head and some of the body, then reset the connection."""

    def how(handler: Handler) -> None:
        handler.body()
        _begin(handler, num_bytes)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return how


def end_after(num_bytes: int) -> How:
    """Send the head and some of the body, then end the connection in good order."""

    def how(handler: Handler) -> None:
        _begin(handler, num_bytes)

    return how


def _begin(handler: Handler, num_bytes: int) -> None:
    value = handler.value() or b""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(value)))
    handler.end_headers()
    handler.wfile.write(value[:num_bytes])
    handler.wfile.flush()
    handler.close_connection = True


def refuse(status: int, code: str, message: str = "no", **headers: str) -> How:
    """Answer with an error of S3."""

    def how(handler: Handler) -> None:
        handler.body()
        handler.refuse(status, code, message, **headers)

    return how


class StubProcess(ChildServer):
    """The stub as a process of its own."""

    def __init__(self) -> None:
        super().__init__("tests.support.s3_stub")


if __name__ == "__main__":
    print(StubS3().endpoint, flush=True)
    sys.stdin.read()
    os._exit(0)  # at once, whatever its connections are at
