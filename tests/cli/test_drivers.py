import json
from dataclasses import asdict

import pytest

from flexkv_core.cli import main
from flexkv_core.drivers import find_driver
from tests.docs import tables
from tests.support.distributions import add_driver


def test_installed_drivers_are_listed(capsys):
    assert main(["drivers", "--options"]) == 0
    out = capsys.readouterr().out
    assert "cpu" in out
    assert "flexkv_driver_ssd" in out
    assert "capacity*, huge_pages" in out


def test_broken_drivers_are_listed_with_cause_and_the_others_with_them(monkeypatch, tmp_path, capsys):
    add_driver(monkeypatch, tmp_path, "good")
    add_driver(monkeypatch, tmp_path, "sour", "import no_such_module_at_all")
    assert main(["drivers"]) == 1
    out = capsys.readouterr().out
    assert "sour: driver 'sour' of dist-sour 1.0 cannot be imported: ModuleNotFoundError" in out
    assert next(line for line in out.splitlines() if line.startswith("good ")).endswith(" ok")
    assert main(["drivers", "--json"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["good"]["options"] == ["url", "password", "size", "inner", "names"]
    assert rows["good"]["api"] == "1.0"
    assert "no_such_module_at_all" in rows["sour"]["problem"]


@pytest.mark.parametrize("driver", tables.OPTIONS)
def test_a_driver_declares_what_its_tiers_then_say(driver):
    """All that is yes or no: it is listed, and a chain is checked against it before a tier is opened."""
    declared, opened = asdict(find_driver(driver)[0].capabilities), asdict(tables.capabilities(driver))
    flags = [name for name, value in declared.items() if isinstance(value, bool)]
    assert {name: declared[name] for name in flags} == {name: opened[name] for name in flags}
