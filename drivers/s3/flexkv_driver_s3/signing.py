"""Signatures in a request's address: AWS's version 4, for names that need no quoting.

botocore's signer takes 0.2 ms a request, a sixth of the processor time that an object of 4 MiB costs on
this side, since it parses and quotes the address again and again and derives the day's key each time.
This one takes a tenth of that; a test holds it against botocore's.

Threads: any.  The day's key is replaced as a whole; two threads that derive it at once derive the same.
"""

from __future__ import annotations

import hmac
import time
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlsplit

from .errors import SKEW_S

_ALGORITHM = "AWS4-HMAC-SHA256"


def utc_now() -> time.struct_time:
    """What a signature says of the time."""
    return time.gmtime()


class Signer:
    """Signs requests to one host."""

    def __init__(self, credentials: Any, region: str, base_url: str) -> None:
        """Sign for the host of ``base_url`` with botocore's ``credentials``."""
        self._credentials = credentials
        self._region = region
        self._host = _host_header(base_url)
        self._kept: tuple[tuple[str, str], bytes] = (("", ""), b"")

    def sign(self, method: str, path: str, query: str = "") -> str:
        """Path and query with a signature, good for as long as clocks may differ.

        Args:
            method: The request's verb.
            path: Of letters, digits and ``-_.~/`` only.
            query: ``name=value`` joined by ``&``, values quoted.
        """
        keys = self._credentials.get_frozen_credentials()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", utc_now())
        scope = f"{stamp[:8]}/{self._region}/s3/aws4_request"
        signed = (
            f"X-Amz-Algorithm={_ALGORITHM}&X-Amz-Credential={quote(f'{keys.access_key}/{scope}', safe='')}"
            f"&X-Amz-Date={stamp}&X-Amz-Expires={SKEW_S}"
        )
        if keys.token is not None:
            signed += f"&X-Amz-Security-Token={quote(keys.token, safe='')}"
        signed += "&X-Amz-SignedHeaders=host"
        if query:  # in the order of names; those of S3 in small letters come after these
            signed = "&".join([signed, *sorted(query.split("&"), key=lambda pair: pair.partition("="))])
        request = f"{method}\n{path}\n{signed}\nhost:{self._host}\n\nhost\nUNSIGNED-PAYLOAD"
        text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(self._key(keys.secret_key, stamp[:8]), text.encode(), "sha256").hex()
        return f"{path}?{signed}&X-Amz-Signature={signature}"

    def _key(self, secret: str, date: str) -> bytes:
        made_of, key = self._kept
        if made_of != (secret, date):
            key = f"AWS4{secret}".encode()
            for word in (date, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, word.encode(), "sha256")
            self._kept = (secret, date), key
        return key


def _host_header(base_url: str) -> str:
    """What ``http.client`` sends as ``Host``, which is what is signed."""
    parts = urlsplit(base_url)
    host = (parts.hostname or "").partition("%")[0]  # the zone of an address is this machine's own affair
    host = f"[{host}]" if ":" in host else host
    usual = {"http": 80, "https": 443}[parts.scheme]
    return host if parts.port in (None, usual) else f"{host}:{parts.port}"
