"""Every chain in ``examples/`` is one that loads, with the drivers that are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexkv_core.config import load_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_loads(path: Path) -> None:
    secrets = dict.fromkeys(re.findall(r"\$\{(\w+)\}", path.read_text()), "5e" * 32)
    config = load_config(path, environ=secrets)
    assert config.chain.tiers
    assert config.notices == ()


def test_there_is_one_for_each_driver() -> None:
    shown = "\n".join(path.read_text() for path in EXAMPLES)
    for folder in EXAMPLES[0].parents[1].glob("drivers/*"):
        assert f"driver: {folder.name}\n" in shown, folder.name
