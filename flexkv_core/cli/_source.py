"""Arguments that several verbs share, such as those that name a configuration."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import EffectiveConfig


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add ``FILE`` and ``--set``."""
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="chain file or flat file (.yaml, .yml, .json); default: FLEXKV_CONFIG_PATH, else none",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_pair,
        help="a value that beats environment and file: engine.prefetch=false, tiers.disk.write=back, "
        "cpu_cache_gb=8; may be repeated",
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError("expected NAME=VALUE")
    return name.strip(), value


def load(args: argparse.Namespace) -> EffectiveConfig:
    """Read the configuration that the arguments name.

    Raises:
        ConfigError: with every finding.
    """
    from ..config import load_config

    flags: dict[str, Any] = dict(args.set)
    return load_config(args.file, flags=flags)


def positive(text: str) -> int:
    """A number of 1 or more, for ``type=``."""
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError("expected a whole number of 1 or more")
    return int(text)
