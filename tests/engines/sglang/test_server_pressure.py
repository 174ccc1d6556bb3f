"""A device pool of 1,024 tokens under many overlapping requests: the output is that of an idle server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from flexkv_core.cli._serving import Answer
from tests.engines.sglang.server import READY, complaints, flags
from tests.support.models import VOCABULARY
from tests.support.server import Setup, StartServer, ask
from tests.support.waiting import CHILD_S

pytestmark = pytest.mark.server

BUSY = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "20",
}
Job = tuple[list[int], int]


@pytest.fixture(scope="module")
def server(
    start_server: StartServer, tiny_llama: Path, write_chain: Callable[..., Path]
) -> Iterator[ServerProcess]:
    """Both ways of switching it on at once, a small host tier, retraction every few steps."""
    chain = write_chain(host="1MiB")
    setup = Setup(tiny_llama, flags(chain, "--enable-flexkv"), BUSY, pool_tokens=1024)
    with start_server(setup) as running:
        yield running
        assert running.is_alive()
        assert complaints(running) == []


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Prompts that share six stems, and how much each asks for."""
    seed = 1
    print(f"seed {seed}")
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    stems = [tokens(200) for _ in range(6)]
    return [
        (rng.choice(stems)[: rng.randrange(50, 200)] + tokens(rng.randrange(1, 60)), rng.randrange(4, 40))
        for _ in range(60)
    ]


def test_both_flags_are_one_state_and_one_warning(server: ServerProcess) -> None:
    log = server.log_text()
    assert log.count(READY) == 1
    assert log.count("mean the same; one is enough") == 1


def test_concurrent_is_serial(server: ServerProcess, jobs: list[Job]) -> None:
    with ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(lambda job: ask(server, *job), jobs))
    in_turn = [ask(server, tokens, new, extra_key="in turn") for tokens, new in jobs]
    assert [answer.output_ids for answer in at_once] == [answer.output_ids for answer in in_turn]
    assert sum(answer.tier_tokens for answer in [*at_once, *in_turn]) > 0
    server.client.flush()


def test_aborts_in_every_phase(server: ServerProcess, jobs: list[Job]) -> None:
    """More requests than run at once, so that some are waiting, some prefilling and some decoding."""

    def long(number: int) -> Answer:
        return ask(server, jobs[number][0], 600, rid=f"long-{number}")

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(long, number) for number in range(8)]
        until, num_aborted = time.monotonic() + CHILD_S, 0
        while not all(future.done() for future in running):
            assert time.monotonic() < until, "an aborted request did not end"
            num_aborted = min(num_aborted + 1, 8)
            for number in range(num_aborted):  # again and again: it may not have arrived the first time
                server.client.abort(f"long-{number}")
            time.sleep(0.05)
    assert {future.result().finish for future in running} == {"abort"}
    server.client.flush()
    tokens, new = jobs[0]
    assert ask(server, tokens, new).output_ids == ask(server, tokens, new, extra_key="after").output_ids
