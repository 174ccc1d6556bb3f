"""Every chain in ``examples/`` is one that loads, with the drivers that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv_core.config import load_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_loads(path: Path) -> None:
    config = load_config(path, environ={})
    assert config.chain.tiers


def test_there_are_some() -> None:
    assert len(EXAMPLES) >= 2
