"""What is asked of the store, one function a request; botocore finds the keys and the place.

One ``Service`` a process.

Threads: a botocore client may be used from any thread once it exists; making one is what is not
safe, so each ``Service`` has a session of its own and is made under ``_making``.
"""

from __future__ import annotations

import ssl
import threading
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from hashlib import md5
from typing import Any
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import escape

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import NoCredentialsError
from botocore.httpsession import get_cert_path
from botocore.loaders import create_loader

from .answers import read_deletion, read_listing, read_text
from .config import S3Config
from .errors import EXPECTED, fault_of, is_missing
from .exchange import Exchange
from .refusals import NotS3Error, RefusedError
from .signing import Signer
from .sockets import WireLimits
from .wire import Wire

PAGE_KEYS = 1000
_LISTED_BYTES = 1200
"""Most that a listing says of one object: its name, 1 KiB at most, and some marks."""
_ANSWER_BYTES = 64 << 10
_NO_BULK_DELETE = frozenset(
    ("NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidRequest", "InvalidArgument")
    + ("InvalidDigest", "MalformedXML", "BadRequest", "XAmzContentSHA256Mismatch", "400", "405", "411", "501")
)
"""Codes of endpoints that know no multi-object delete, or not with today's checksum headers."""

_making = threading.Lock()
_descriptions = create_loader()
"""botocore's description of S3, read once (a quarter of a second); used under ``_making``."""

_left_behind: list[Service] = []
"""Clients of a parent process: closing one could wait for a lock that a vanished thread holds."""


def after_fork() -> None:
    """In a child: no other thread is left that could be making a client."""
    global _making
    _making = threading.Lock()


class Service:
    """A client, a signer and a wire for one bucket."""

    def __init__(self, config: S3Config) -> None:
        """Make the client; asks nobody but, where keys come from one, the instance's key service.

        Raises:
            botocore.exceptions.BotoCoreError, OSError: no keys, no profile, or a bad ``ca_file``.
        """
        self._config = config
        self._bucket = config.bucket
        self._has_bulk_delete = True
        cafile = get_cert_path(True) if config.ca_file is None else str(config.ca_file)
        with _making:
            session = _session(config)
            region = config.region or session.region_name or "us-east-1"
            self.client: Any = session.client(
                "s3",
                endpoint_url=config.endpoint_url,
                region_name=region,
                verify=cafile if config.verify else False,
                config=_client_config(config),
            )
            credentials = session.get_credentials()
        if credentials is None:
            self.client.close()
            raise NoCredentialsError
        # botocore's own rules for endpoint and addressing give the place where objects lie.
        place = self.client.generate_presigned_url("get_object", Params={"Bucket": self._bucket, "Key": "x"})
        base_url = place.partition("?")[0].removesuffix("/x")
        tls = _tls(config, cafile) if urlsplit(base_url).scheme == "https" else None
        self.wire = Wire(base_url, Signer(credentials, region, base_url).sign, tls, _limits(config))

    def get(self, name: str, limit: int, query: str = "") -> bytes:
        """A small object's bytes, at most ``limit``."""
        buffer = bytearray(limit)
        return bytes(buffer[: self.wire.send("GET", name, query=query).read_into(memoryview(buffer))])

    def put(self, name: str, body: bytes) -> None:
        """Put a small object."""
        self.wire.send("PUT", name, memoryview(body)).finish()

    def page(
        self, prefix: str, after: str = "", limit: int = PAGE_KEYS
    ) -> tuple[list[tuple[str, int]], bool]:
        """Names and lengths of the next objects below ``prefix``, in order; and whether there are more."""
        query = {"list-type": "2", "max-keys": str(limit), "prefix": prefix, "start-after": after}
        text = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items() if value)
        rows, is_more = read_listing(self.get("", _ANSWER_BYTES + limit * _LISTED_BYTES, text))
        if rows and rows[-1][0] <= after:
            raise NotS3Error("a listing that does not go on after the name it was given")
        return rows, is_more

    def delete(self, names: Sequence[str]) -> dict[str, BaseException]:
        """Delete objects; returns those that failed.  A missing object counts as deleted."""
        if self._has_bulk_delete and len(names) > 1:
            try:
                return self._delete_together(names)
            except RefusedError as exc:
                if (exc.code or str(exc.status)) not in _NO_BULK_DELETE:
                    raise
                self._has_bulk_delete = False
        return self._delete_singly(names)

    def _delete_together(self, names: Sequence[str]) -> dict[str, BaseException]:
        failures: dict[str, BaseException] = {}
        for start in range(0, len(names), PAGE_KEYS):
            objects = "".join(
                f"<Object><Key>{escape(name)}</Key></Object>" for name in names[start : start + PAGE_KEYS]
            )
            body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
            # The one request whose body S3 wants a sum of.
            digest = b64encode(md5(body, usedforsecurity=False).digest()).decode()
            sent = self.wire.send("POST", "", memoryview(body), "delete=", {"Content-MD5": digest})
            answer = bytearray(_ANSWER_BYTES + PAGE_KEYS * _LISTED_BYTES)
            failures.update(read_deletion(bytes(answer[: sent.read_into(memoryview(answer))])))
        return failures

    def _delete_singly(self, names: Sequence[str]) -> dict[str, BaseException]:
        failures: dict[str, BaseException] = {}
        for number, name in enumerate(names):
            try:
                self.wire.send("DELETE", name).finish()
            except EXPECTED as exc:
                failures[name] = exc
                if not is_missing(exc) and fault_of(exc).is_general:
                    failures.update(dict.fromkeys(names[number:], exc))  # would fail in the same way now
                    break
        return failures

    def begin_parts(self, name: str) -> Exchange:
        """Begin an upload in parts; its answer names the upload."""
        return self.wire.send("POST", name, query="uploads=")

    def put_parts(self, begun: Exchange, name: str, value: memoryview) -> None:
        """Upload a long value in parts; it appears when all are there, and is given up as a whole."""
        answer = bytearray(_ANSWER_BYTES)
        size = begun.read_into(memoryview(answer))
        upload = f"uploadId={quote(read_text(bytes(answer[:size]), 'UploadId'), safe='')}"
        try:
            tags: list[str] = []
            for start in range(0, len(value), self._config.multipart_part):
                piece = value[start : start + self._config.multipart_part]
                headers = self.wire.send("PUT", name, piece, f"partNumber={len(tags) + 1}&{upload}").finish()
                tags.append(str(headers.get("ETag", "")))
            self._complete(name, upload, tags)
        except BaseException:
            # Whatever ended it, an interrupt too, the parts would be paid for and never seen.  Best effort:
            # what cannot be given up now is what a lifecycle rule for incomplete uploads removes.
            with suppress(*EXPECTED):
                self.wire.send("DELETE", name, query=upload).finish()
            raise

    def _complete(self, name: str, upload: str, tags: Sequence[str]) -> None:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        answer = bytearray(_ANSWER_BYTES)
        size = self.wire.send("POST", name, memoryview(body), upload).read_into(memoryview(answer))
        read_text(bytes(answer[:size]), "ETag")  # the status is 200 even for a failure: the body tells

    def forget(self) -> None:
        """In a child after a fork: let go of the parent's connections without taking any of its locks."""
        self.wire.forget()
        _left_behind.append(self)

    def close(self) -> None:
        """Close idle connections."""
        self.wire.close()
        self.client.close()


def _session(config: S3Config) -> Any:
    session = botocore.session.Session(profile=config.profile)
    session.register_component("data_loader", _descriptions)
    return boto3.session.Session(botocore_session=session, **_keys(config))


def _client_config(config: S3Config) -> Config:
    style = config.addressing
    if style == "auto" and config.endpoint_url is not None:
        style = "path"
    return Config(
        signature_version="s3v4",
        s3={"addressing_style": style},
        connect_timeout=config.connect_timeout_s,
        read_timeout=config.read_timeout_s,
        # Deadlines and retries are the core's, once.
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=config.max_concurrency,
        # Values carry their own checksum, and other vendors' servers refuse these headers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # The endpoint is asked directly, by botocore as by the wire.
        proxies={},
        user_agent_extra="flexkv",
    )


def _keys(config: S3Config) -> dict[str, str]:
    if config.access_key_id is None or config.secret_access_key is None:
        return {}
    keys = {
        "aws_access_key_id": config.access_key_id.get_secret_value(),
        "aws_secret_access_key": config.secret_access_key.get_secret_value(),
    }
    if config.session_token is not None:
        keys["aws_session_token"] = config.session_token.get_secret_value()
    return keys


def _tls(config: S3Config, cafile: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cafile)
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _limits(config: S3Config) -> WireLimits:
    return WireLimits(
        connect_s=config.connect_timeout_s,
        silence_s=config.read_timeout_s,
        request_s=config.request_timeout_s,
        max_idle=config.max_concurrency * config.requests_per_call,
    )
