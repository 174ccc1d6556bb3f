"""Configuration files for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from flexkv_core import ConfigError
from flexkv_core.config import load_config

CHAIN: dict[str, Any] = {
    "version": 1,
    "namespace": {"model": "tiny", "revision": "r1"},
    "block_tokens": 32,
    "tiers": [
        {"name": "host", "driver": "cpu", "options": {"capacity": "64MiB"}},
        {"name": "disk", "driver": "ssd", "options": {"path": "/disk/kv", "capacity": "1GiB"}},
    ],
}


def write(folder: Path, content: Any, name: str = "chain.yaml") -> str:
    """Write ``content`` (a text, or a tree) and return the file's path."""
    path = folder / name
    if not isinstance(content, str):
        content = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
    path.write_text(content, encoding="utf-8")
    return str(path)


def findings(file: str | None = None, **sources: Any) -> list[str]:
    """The lines of the report that loading must end in, each with its source."""
    sources.setdefault("environ", {})
    try:
        load_config(file, **sources)
    except ConfigError as exc:
        return str(exc).splitlines()
    raise AssertionError("this configuration should have been refused")
