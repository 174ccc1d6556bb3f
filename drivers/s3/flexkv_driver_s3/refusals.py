"""What an answer other than success says, and the exceptions for it."""

from __future__ import annotations

import http.client
import re
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

ERROR_BODY_BYTES = 64 << 10
_SIGNED_AT = re.compile(r"[?&]X-Amz-Date=(\d{8}T\d{6}Z)")
_SQUEEZED = ("gzip", "x-gzip", "deflate", "br", "zstd", "compress")
_TAG = re.compile(rb"<(Code|Message|Region)>([^<]{0,500})</")


class RefusedError(Exception):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        code: S3's error code, or an empty string.
        message: S3's message.
        region: The bucket's region where the server named it.
        elsewhere: ``scheme://host`` of the place that a redirection names.
        skew_s: By how much the server's clock differs from the one that the request was signed by.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        region: str = "",
        skew_s: float = 0.0,
        elsewhere: str = "",
    ) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.region = region
        self.skew_s = skew_s
        self.elsewhere = elsewhere
        super().__init__(f"{status} {code} {message}".strip())


class NotS3Error(Exception):
    """An answer that no S3 service gives."""


class TooLongError(Exception):
    """The object is longer than the buffer."""


class ShortBodyError(Exception):
    """The connection ended before the body did."""


def check_form(response: http.client.HTTPResponse) -> None:
    """Whether this is an answer, and its body the object's bytes.

    Raises:
        NotS3Error: something in between has made it another one.
    """
    if response.status < 200:
        # http.client passes over 100 only: the answer itself is still to come, and would be the next one's.
        raise NotS3Error(f"an answer of status {response.status}")
    if response.status < 300 and response.length is None and not response.chunked:
        raise NotS3Error("an answer without a length: its end cannot be told from a lost connection")
    encoding = str(response.headers.get("Content-Encoding", ""))
    if encoding in _SQUEEZED:
        raise NotS3Error(f"a proxy has compressed the answer: {encoding}")


def check_whole(response: http.client.HTTPResponse) -> None:
    """Whether the body is what was asked for, and all of it.

    What is not would be taken for a damaged object, and the good one behind it would be removed.

    Raises:
        NotS3Error: it is a part, nothing, or a page for people.
    """
    if response.status != http.client.OK:
        raise NotS3Error(f"status {response.status} where a whole body was asked for")
    if str(response.headers.get("Content-Type", "")).lower().startswith("text/html"):
        raise NotS3Error("a page for people in the object's place")


def refusal(response: http.client.HTTPResponse, body: bytes, target: str) -> RefusedError | NotS3Error:
    """What the server's error means: its words, and what its headers tell beside them.

    Args:
        response: The answer's status and headers.
        body: The front of its body.
        target: The signed request's path and query.
    """
    found = {name.decode(): text.decode(errors="replace") for name, text in _TAG.findall(body)}
    if response.status == 404 and body and "Code" not in found:
        # A gateway without its store says this of everything.  Taken for a miss, it would empty the index.
        return NotS3Error("404 without a word of S3's")
    place = urlsplit(str(response.headers.get("Location", "")))
    return RefusedError(
        response.status,
        found.get("Code", ""),
        found.get("Message", ""),
        region=found.get("Region") or str(response.headers.get("x-amz-bucket-region", "")),
        skew_s=_skew_s(target, str(response.headers.get("Date", ""))),
        elsewhere=f"{place.scheme}://{place.netloc.rpartition('@')[2]}" if place.netloc else "",
    )


def _skew_s(target: str, date: str) -> float:
    """Seconds between a signature's time and an answer's; 0 where one of them is not told."""
    signed = _SIGNED_AT.search(target)
    try:
        answered = parsedate_to_datetime(date)
    except ValueError:
        return 0.0
    if signed is None or answered.tzinfo is None:
        return 0.0
    at = datetime.strptime(f"{signed[1]}+0000", "%Y%m%dT%H%M%SZ%z")
    return abs((answered - at).total_seconds())
