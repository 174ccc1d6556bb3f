"""The border to the engine, on the real server: a driver that misbehaves, and a bug of the adapter.

Whatever happens below, SGLang's scheduler sees a prompt that has to be computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._serving import Answer
from tests.engines.sglang.server import ask_after_flush, complaints, flags, prompt
from tests.support.distributions import add_distribution
from tests.support.server import Setup, StartServer, ask
from tests.support.waiting import CHILD_S, wait_until

pytestmark = pytest.mark.server

LENGTH = 100
CHAIN = """\
version: 1
block_tokens: 64
staging: 16MiB
tiers:
  - name: moody
    driver: moody
    breaker_failures: 0
    load_deadline_s: 2
    store_deadline_s: 1
    options: {{control: "{control}"}}
engine: {{load_deadline_s: 4, log_counters_s: 0.5}}
"""
DRIVER = '''
"""A tier in memory that does what a file tells it to, while it serves."""

import json
import time
from pathlib import Path

from pydantic import BaseModel

from flexkv_core import DriverSpec, hookimpl


class Options(BaseModel):
    control: str


@hookimpl
def flexkv_driver():
    return DriverSpec(name="moody", api=(1, 0), config=Options, open="flexkv_test_moody:open_tier")


def open_tier(options, context):
    from flexkv_core.testing import Fault, FaultKind, FaultTier, MemoryTier
    from flexkv_sglang.connector import FlexKVConnector

    def mood():
        return json.loads(Path(options.control).read_text())

    def schedule(operation, keys):
        kind = mood().get(operation)
        error = ZeroDivisionError("a bug of the driver") if kind == "bug" else None
        return kind and Fault(FaultKind.RAISE if kind == "bug" else FaultKind(kind), error=error)

    class MoodyTier(FaultTier):
        is_closed = False

        def _hang(self, entered):
            Path(options.control).with_suffix(".hangs").touch()
            while "hang" in mood().values() and not self.is_closed:
                time.sleep(0.02)

        def close(self):
            self.is_closed = True
            super().close()

    plain = FlexKVConnector.lookup_kv

    def lookup_kv(self, *args, **kwargs):
        if mood().get("adapter"):
            raise ZeroDivisionError("a bug of the adapter")
        return plain(self, *args, **kwargs)

    FlexKVConnector.lookup_kv = lookup_kv
    return MoodyTier(MemoryTier(context), schedule)
'''


@dataclass
class Moody:
    """A server over the tier, and the file that tells it what to do."""

    server: ServerProcess
    control: Path

    def feels(self, **moods: str) -> None:
        fresh = self.control.with_suffix(".new")
        fresh.write_text(json.dumps(moods))
        fresh.replace(self.control)

    @property
    def hangs(self) -> Path:
        """Is there once a call hangs."""
        return self.control.with_suffix(".hangs")

    def serves(self, tokens: list[int]) -> bool:
        """Whether all of a prompt comes from the tier."""
        return ask_after_flush(self.server, tokens).tier_tokens == len(tokens) - 1


@pytest.fixture(scope="module")
def moody(
    start_server: StartServer, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Moody]:
    folder = tmp_path_factory.mktemp("moody")
    control, chain = folder / "control.json", folder / "chain.yaml"
    control.write_text("{}")
    chain.write_text(CHAIN.format(control=control))
    with pytest.MonkeyPatch.context() as patch:
        entry_points = {"flexkv.drivers": {"moody": "flexkv_test_moody"}}
        add_distribution(
            patch,
            folder / "packages",
            "flexkv-test-moody",
            entry_points=entry_points,
            modules={"flexkv_test_moody": DRIVER},
        )
        patch.setenv("PYTHONPATH", str(folder / "packages"), prepend=":")
        with start_server(Setup(tiny_llama, flags(chain))) as server:
            yield Moody(server, control)
            assert complaints(server) == []


@pytest.fixture(autouse=True)
def _in_a_good_mood(moody: Moody) -> Iterator[None]:
    yield
    moody.feels()


LOADS = ["raise", "bug", "return_none", "return_short", "return_junk", "flip", "truncate", "lie", "hang"]


@pytest.mark.parametrize(("number", "kind"), list(enumerate(LOADS)))
def test_a_load_that_goes_wrong_is_computed(moody: Moody, number: int, kind: str) -> None:
    tokens = prompt(LENGTH, seed=900 + number)
    fresh = ask(moody.server, tokens)
    wait_until(lambda: moody.serves(tokens), "the prompt is stored")
    moody.feels(load=kind)
    spoilt = ask_after_flush(moody.server, tokens)
    assert spoilt.cached_tokens == 0
    assert spoilt.output_ids == fresh.output_ids
    moody.feels()
    wait_until(lambda: moody.serves(tokens), "it is served again")
    assert ask_after_flush(moody.server, tokens).output_ids == fresh.output_ids


@pytest.mark.parametrize(("number", "kind"), list(enumerate(["raise", "bug", "return_none", "hang"])))
def test_a_store_that_goes_wrong_is_dropped(moody: Moody, number: int, kind: str) -> None:
    tokens = prompt(LENGTH, seed=950 + number)
    moody.feels(store=kind)
    fresh = ask(moody.server, tokens)
    again = ask_after_flush(moody.server, tokens)
    assert again.cached_tokens == 0
    assert again.output_ids == fresh.output_ids
    moody.feels()
    wait_until(lambda: moody.serves(tokens), "stores work again")


def test_others_go_on_while_a_load_hangs(moody: Moody) -> None:
    """HS-48: the one that waits is computed at its deadline."""
    tokens = prompt(LENGTH, seed=970)
    ask(moody.server, tokens)
    wait_until(lambda: moody.serves(tokens), "the prompt is stored")
    moody.server.client.flush()
    with ThreadPoolExecutor(2) as pool:
        decoding = pool.submit(ask, moody.server, prompt(20, seed=971), 300)
        moody.feels(load="hang")
        waiting = pool.submit(ask, moody.server, tokens)
        assert waiting.result(CHILD_S).cached_tokens == 0
        assert len(decoding.result(CHILD_S).output_ids) == 300


def test_who_needs_nothing_overtakes_a_load_that_hangs(moody: Moody) -> None:
    """It came later and is answered sooner; the one that waits is computed at its deadline."""
    slow = prompt(LENGTH, seed=975)
    fresh = ask(moody.server, slow)
    quick = (prompt(LENGTH, seed) for seed in count(9760))
    # A machine that stands still for the deadline has both answered; it does not do so again and again.
    wait_until(lambda: _is_overtaken(moody, slow, next(quick), fresh), "the other one is answered first")


def _is_overtaken(moody: Moody, slow: list[int], quick: list[int], fresh: Answer) -> bool:
    wait_until(lambda: moody.serves(slow), "the prompt is stored")
    moody.server.client.flush()
    moody.hangs.unlink(missing_ok=True)
    moody.feels(load="hang")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, moody.server, slow)
        wait_until(moody.hangs.exists, "the load hangs")
        assert ask(moody.server, quick, 1).cached_tokens == 0
        is_first = not waiting.done()
        late = waiting.result(CHILD_S)
    moody.feels()
    assert late.cached_tokens == 0
    assert late.output_ids == fresh.output_ids
    return is_first


def test_each_failure_is_counted(moody: Moody) -> None:
    causes = ("unavailable", "invalid", "corrupt", "timeout")
    lines = [f'load_failures{{cause="{cause}",tier="moody"}}' for cause in causes]
    lines.append('driver_bugs{operation="load",tier="moody"}')
    wait_until(
        lambda: all(line in moody.server.log_text() for line in lines), "all are in a line of counters"
    )


def test_a_bug_of_the_adapter_ends_the_cache_and_not_the_server(moody: Moody) -> None:
    """The last test of this server: its cache stays off, and a flush and an orderly end are still to come."""
    tokens = prompt(LENGTH, seed=980)
    fresh = ask(moody.server, tokens)
    wait_until(lambda: moody.serves(tokens), "the prompt is stored")
    moody.feels(adapter="bug")
    for _ in range(2):
        again = ask_after_flush(moody.server, tokens)
        assert again.cached_tokens == 0
        assert again.output_ids == fresh.output_ids
        moody.feels()
    log = moody.server.log_text()
    assert log.count("the cache is off, serving goes on") == 1
    assert "ZeroDivisionError: a bug of the adapter" in log
    assert ask(moody.server, tokens).by_tier == {"device": LENGTH - 1, "host": 0}
    moody.server.stop(CHILD_S)
    assert 'adapter_faults{method="on_match"}=1' in moody.server.log_text()
