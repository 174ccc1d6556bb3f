"""What is asked when a tier is opened, so that wrong settings fail then, in one line."""

from __future__ import annotations

import hashlib
import os

from .config import S3Config
from .errors import EXPECTED, is_missing
from .names import Names
from .service import Service


def probe(service: Service, config: S3Config, names: Names, identity: str) -> None:
    """List one name; then put, get and delete something small, or only get, as ``config.probe`` says.

    What is put is the namespace's readable identity, which is kept, and an object that is deleted again.

    Raises:
        What the service raises.
    """
    service.page(names.blocks, limit=1)
    content = identity.encode()
    name = f"{names.root}/namespaces/{hashlib.sha256(content).hexdigest()[:16]}.json"
    if config.probe == "write":
        service.put(name, content)
    _get(service, name, len(content), must_exist=config.probe == "write")
    if config.probe == "write":
        trial = f"{names.root}/probe/{os.urandom(8).hex()}"
        service.put(trial, b"flexkv")
        for failure in service.delete([trial]).values():
            raise failure


def _get(service: Service, name: str, num_bytes: int, *, must_exist: bool) -> None:
    try:
        service.get(name, num_bytes)
    except EXPECTED as exc:
        if must_exist or not is_missing(exc):
            raise
