from importlib.metadata import entry_points
from pathlib import Path

import pytest

from flexkv_core.cli import main
from flexkv_core.cli.reference import page
from flexkv_core.config.names import chain_leaves, tier_leaves, variable_of
from flexkv_core.config.seed import SEED_KEYS

PAGE = Path(__file__).parents[2] / "docs" / "chain-reference.md"


def test_the_page_is_the_one_in_the_documents():
    assert PAGE.read_text() == page(), "run: flexkv reference --output docs/chain-reference.md"


def test_the_page_names_every_field_and_variable():
    text = page()
    for leaf in chain_leaves():
        assert f"`{variable_of(leaf.path)}`" in text
    for leaf in tier_leaves():
        assert f"`FLEXKV_TIER_<NAME>_{'_'.join(leaf.path).upper()}`" in text
    for key in SEED_KEYS.values():
        assert f"| `{key.name}` |" in text
    for entry in entry_points(group="flexkv.drivers"):
        if entry.dist is not None and entry.dist.name == "flexkv-core":
            assert f"## Options of driver `{entry.name}`" in text


@pytest.mark.parametrize("leaf", [*chain_leaves(), *tier_leaves()], ids=lambda leaf: ".".join(leaf.path))
def test_every_field_has_a_sentence_and_a_type(leaf):
    assert leaf.field.description
    assert leaf.expected != "anything"


def test_it_can_be_written_to_a_file(tmp_path):
    path = tmp_path / "page.md"
    assert main(["reference", "--output", str(path)]) == 0
    assert path.read_text() == page()
