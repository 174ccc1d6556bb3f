"""Drivers that are missing, broken, doubled or foreign: each says whose fault it is and hurts nobody."""

from __future__ import annotations

import textwrap

import pytest

from flexkv_core import (
    DRIVER_API,
    DriverApiError,
    DriverConflictError,
    DriverLoadError,
    DriverNotFoundError,
    TierContext,
)
from flexkv_core.drivers import Observers, find_driver, installed_drivers, open_tier
from flexkv_core.testing import MemoryTier, context_for, small_layout
from tests.support.distributions import add_distribution

GOOD = """
from pydantic import BaseModel
from flexkv_core import DriverSpec, hookimpl

class Options(BaseModel):
    size: int = 1

@hookimpl
def flexkv_driver():
    return DriverSpec(name="{name}", api=(1, 0), config=Options, open="{module}:open_tier")

def open_tier(options, context):
    from flexkv_core.testing import MemoryTier
    return MemoryTier(context)
"""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """``install(name, source)``: a distribution ``dist-<name>`` 2.5 with one driver."""

    def install(name, source=GOOD, *, dist=None, module=None):
        dist = dist or f"dist-{name}"
        module = module or f"module_of_{dist.replace('-', '_')}"
        text = textwrap.dedent(source).replace("{name}", name).replace("{module}", module)
        add_distribution(
            monkeypatch,
            tmp_path / dist,
            dist,
            entry_points={"flexkv.drivers": {name: module}},
            modules={module: text},
            version="2.5",
        )

    return install


def test_good_driver_is_found_and_opened(install):
    install("acme")
    spec, offer = find_driver("acme")
    assert (spec.name, offer.provider) == ("acme", "dist-acme 2.5")
    tier = open_tier(spec, offer.provider, spec.config(), context_for(small_layout()))
    assert isinstance(tier, MemoryTier)
    tier.close()


def test_unknown_name_suggests_one(install):
    install("acme")
    with pytest.raises(
        DriverNotFoundError, match="no driver named 'acne' is installed, did you mean acme"
    ) as e:
        find_driver("acne")
    assert e.value.driver == "acne"
    assert "cpu" in str(e.value), "the installed names are told"
    with pytest.raises(DriverNotFoundError) as e:
        find_driver("zzzzzz")
    assert "did you mean" not in str(e.value)


BROKEN = {
    "import error": (
        "import a_library_that_is_not_there\n",
        "ModuleNotFoundError.*a_library_that_is_not_there",
    ),
    "anything raised on import": ("raise ZeroDivisionError('by zero')\n", "ZeroDivisionError: by zero"),
    "syntax error": ("def (:\n", "SyntaxError"),
    "no hook": ("", "returned nothing"),
    "misspelt hook": (GOOD.replace("def flexkv_driver(", "def flexkv_drivers("), "flexkv_drivers"),
    "wrong signature": (GOOD.replace("def flexkv_driver()", "def flexkv_driver(options)"), "options"),
    "hook raises": (
        GOOD.replace("return DriverSpec", "raise RuntimeError('no') or DriverSpec"),
        "RuntimeError: no",
    ),
    "returns no spec": (GOOD.replace("return DriverSpec(", "return dict("), "must return a DriverSpec.*dict"),
    "another name": (GOOD.replace('name="{name}"', 'name="other"'), "calls itself 'other'"),
}


@pytest.mark.parametrize("fault", list(BROKEN))
def test_broken_driver_says_whose_it_is_and_why(install, fault):
    source, why = BROKEN[fault]
    install("acme", source)
    with pytest.raises(DriverLoadError, match=f"(?s)driver 'acme' of dist-acme 2.5.*{why}") as e:
        find_driver("acme")
    assert (e.value.driver, e.value.provider) == ("acme", "dist-acme 2.5")


@pytest.mark.parametrize("api", [(0, 9), (DRIVER_API[0] + 1, 0), (DRIVER_API[0], DRIVER_API[1] + 1)])
def test_other_interface_version_names_both(install, api):
    install("acme", GOOD.replace("api=(1, 0)", f"api={api}"))
    wanted = f"dist-acme 2.5.*interface {api[0]}.{api[1]}.*offers {DRIVER_API[0]}.{DRIVER_API[1]}"
    with pytest.raises(DriverApiError, match=wanted):
        find_driver("acme")


@pytest.mark.parametrize("api", ["1", "(1,)", "None", "('1', 0)"])
def test_nonsense_for_a_version_is_a_broken_driver(install, api):
    install("acme", GOOD.replace("api=(1, 0)", f"api={api}"))
    with pytest.raises(DriverLoadError, match="dist-acme 2.5.*api"):
        find_driver("acme")


def test_two_distributions_with_one_name_conflict(install):
    install("acme", dist="acme-one")
    install("acme", dist="acme-two")
    with pytest.raises(DriverConflictError, match="acme-one 2.5") as e:
        find_driver("acme")
    assert "acme-two 2.5" in str(e.value)
    assert "uninstall one" in str(e.value)


def test_same_target_twice_is_no_conflict(install):
    install("acme", dist="acme-one", module="module_of_acme")
    install("acme", dist="acme-again", module="module_of_acme")
    assert len(installed_drivers()["acme"]) == 1
    assert find_driver("acme")[0].name == "acme"


def test_broken_driver_that_nobody_names_disturbs_nobody(install):
    install("acme")
    install("bad", "raise RuntimeError('at import')\n")
    assert find_driver("acme")[0].name == "acme"
    assert "bad" in installed_drivers(), "the list shows it all the same"
    with pytest.raises(DriverLoadError):
        find_driver("bad")
    assert find_driver("acme")[0].name == "acme", "nothing is left of the failure"


@pytest.mark.parametrize(
    ("target", "why"),
    [("nowhere_at_all:open_tier", "nowhere_at_all"), ("{module}:nothing", "nothing")],
)
def test_opener_that_is_not_there(install, target, why):
    install("acme", GOOD.replace('open="{module}:open_tier"', f'open="{target}"'))
    spec, offer = find_driver("acme")
    with pytest.raises(DriverLoadError, match=f"dist-acme 2.5.*{why}"):
        open_tier(spec, offer.provider, spec.config(), context_for(small_layout()))


@pytest.mark.parametrize("fault", ["open='module'", "open=':f'", "open=None", "config=dict", "config=None"])
def test_nonsense_in_a_spec_is_a_broken_driver(install, fault):
    field = fault.split("=")[0]
    install(
        "acme",
        GOOD.replace("return DriverSpec(", "return replace(DriverSpec(")
        .replace(':open_tier")', f':open_tier"), {fault})')
        .replace("from pydantic", "from dataclasses import replace\nfrom pydantic"),
    )
    with pytest.raises(DriverLoadError, match=f"dist-acme 2.5 gives {field}="):
        find_driver("acme")


def test_opener_whose_module_raises(install):
    install("bad", "raise RuntimeError('no library')\n", module="module_that_raises")
    install("acme", GOOD.replace('open="{module}:open_tier"', 'open="module_that_raises:open_tier"'))
    spec, offer = find_driver("acme")
    with pytest.raises(DriverLoadError, match="dist-acme 2.5.*RuntimeError: no library"):
        open_tier(spec, offer.provider, spec.config(), context_for(small_layout()))


def test_opener_that_returns_no_tier(install):
    install("acme", GOOD.replace("return MemoryTier(context)", "return None"))
    spec, offer = find_driver("acme")
    with pytest.raises(DriverLoadError, match="dist-acme 2.5.*NoneType, not a Tier"):
        open_tier(spec, offer.provider, spec.config(), context_for(small_layout()))


def test_outside_package_in_the_place_of_one_of_ours(install, monkeypatch):
    """The core holds no list of drivers: with ours gone, a stranger's ``cpu`` is *the* cpu."""
    install("cpu", dist="their-cpu")
    ours = [entry for entry in _entries() if entry.value != "flexkv_driver_cpu"]
    monkeypatch.setattr(
        "flexkv_core.drivers.entry_points", lambda group: [e for e in ours if e.group == group]
    )
    spec, offer = find_driver("cpu")
    assert offer.provider == "their-cpu 2.5"
    context = TierContext(name="host", value_bytes=8192, head_bytes=4096)
    assert isinstance(open_tier(spec, offer.provider, spec.config(), context), MemoryTier)


def _entries():
    from importlib.metadata import entry_points

    return list(entry_points(group="flexkv.drivers"))


def test_broken_observer_is_left_out_with_its_provider(monkeypatch, tmp_path, caplog):
    add_distribution(
        monkeypatch,
        tmp_path / "watcher",
        "watcher",
        entry_points={"flexkv.observers": {"watch": "watcher_module"}},
        modules={"watcher_module": "raise RuntimeError('at import')\n"},
    )
    observers = Observers.installed()
    observers.stored("host", [bytes(32)], 1)
    assert "watch of watcher 1.0" in caplog.text


def test_observer_that_raises_is_silenced_and_hurts_nobody(caplog):
    from flexkv_core import hookimpl

    class Bad:
        calls = 0

        @hookimpl
        def flexkv_blocks_stored(self, tier):
            self.calls += 1
            raise RuntimeError("observer")

    class Good:
        calls = 0

        @hookimpl
        def flexkv_blocks_stored(self, keys, num_bytes):
            self.calls += 1

    bad, good = Bad(), Good()
    observers = Observers([bad, good])
    for _ in range(3):
        observers.stored("host", [bytes(32)], 1)
    assert (bad.calls, good.calls) == (1, 3)
    assert "is silenced" in caplog.text


def test_observer_with_a_misspelt_hook_is_refused_and_forgotten():
    from flexkv_core import hookimpl

    class Misspelt:
        @hookimpl
        def flexkv_blocks_stord(self, tier):
            raise AssertionError("never called")

    observers = Observers()
    with pytest.raises(Exception, match="flexkv_blocks_stord"):
        observers.add(Misspelt())
    observers.stored("host", [], 0)
