"""Two servers over one shared store: what must hold whatever the store is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from flexkv_core.cli._process import ServerProcess
from tests.engines.sglang.server import ask_after_flush, complaints, flags, prompt
from tests.support.server import Setup, StartServer, ask
from tests.support.waiting import wait_until

BLOCK = 64
CHAIN = """\
version: 1
block_tokens: {block}
tiers:
  - {{name: host, driver: cpu, options: {{capacity: 64MiB}}}}
  - name: far
    driver: {driver}
    options: {options}
    breaker_failures: 2
    breaker_reset_s: 0.5
    load_deadline_s: 120
    lookup_deadline_s: 120
    store_deadline_s: 120
engine: {{lookup_wait_s: 120, load_deadline_s: 120}}
"""


@dataclass(frozen=True)
class SharedStore:
    """A store that two chains name.

    Attributes:
        driver: The tier's driver.
        options: The driver's options, in YAML's short form.
        num_blocks: How many blocks lie in it now.
    """

    driver: str
    options: str
    num_blocks: Callable[[], int]


@dataclass(frozen=True)
class Pair:
    """Two servers with a chain each, and what they share."""

    first: ServerProcess
    second: ServerProcess
    store: SharedStore

    def wait_for_blocks(self, count: int) -> None:
        """Wait until so many blocks lie in the store."""
        wait_until(lambda: self.store.num_blocks() >= count, f"{count} blocks in the store")


@contextmanager
def two_servers(store: SharedStore, start_server: StartServer, model: Path, folder: Path) -> Iterator[Pair]:
    """Start both at once; at the end neither may have complained."""
    file = folder / "chain.yaml"
    file.write_text(CHAIN.format(block=BLOCK, driver=store.driver, options=store.options))
    setup = Setup(model, [*flags(file), "--sleep-on-idle"])
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(stack.enter_context, [start_server(setup), start_server(setup)])
        yield Pair(first, second, store)
        assert complaints(first) == []
        assert complaints(second) == []


class SharingTests:
    """What must hold; a file gives the fixture ``store``."""

    def test_what_one_stored_the_other_serves(self, pair: Pair) -> None:
        tokens = prompt(5 * BLOCK + 9, seed=31)
        before = pair.store.num_blocks()
        fresh = ask(pair.first, tokens)
        pair.wait_for_blocks(before + 5)
        shared = ask(pair.second, tokens)
        assert shared.by_tier == {"device": 0, "host": 0, "storage": 5 * BLOCK}
        assert shared.output_ids == fresh.output_ids
        promoted = ask_after_flush(pair.second, tokens)
        assert promoted.by_tier["host"] >= 5 * BLOCK, "from its own memory the next time"
        assert promoted.output_ids == fresh.output_ids
        assert pair.store.num_blocks() == before + 5, "nothing is written a second time under another name"

    def test_tenants_do_not_share(self, pair: Pair) -> None:
        tokens = prompt(3 * BLOCK, seed=32)
        before = pair.store.num_blocks()
        fresh = ask(pair.first, tokens, cache_salt="tenant-a")
        pair.wait_for_blocks(before + 3)
        for other in ({"cache_salt": "tenant-b"}, {}, {"extra_key": "tenant-a"}):
            stranger = ask(pair.second, tokens, **other)
            assert stranger.cached_tokens == 0, other
            assert stranger.output_ids == fresh.output_ids
        own = ask(pair.second, tokens, cache_salt="tenant-a")
        assert own.by_tier["storage"] >= 2 * BLOCK
        assert own.output_ids == fresh.output_ids
        pair.wait_for_blocks(before + 4 * 3)  # or the next test would count the strangers' as its own

    def test_writers_of_one_block_do_no_harm(self, pair: Pair) -> None:
        """Both compute the same prompt at once, and both store it: one value a block, and it is good."""
        tokens = prompt(6 * BLOCK + 1, seed=36)
        before = pair.store.num_blocks()
        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(lambda server: ask(server, tokens), (pair.first, pair.second))
        assert one.output_ids == two.output_ids
        pair.wait_for_blocks(before + 6)
        for server in (pair.first, pair.second):
            again = ask_after_flush(server, tokens)
            assert again.tier_tokens >= 6 * BLOCK
            assert again.output_ids == one.output_ids
        assert pair.store.num_blocks() == before + 6
