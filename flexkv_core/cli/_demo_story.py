"""The demonstration's course: three servers, one after the other, over one chain.

The first computes, and serves again from its CPU tier.  The second is the first one restarted: only
the SSD tier is warm.  The third stands for another machine: its CPU and SSD tiers are empty, and
Redis has what the first one stored.  Redis is killed under it, and started again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flexkv_core.errors import EngineError

from ._demo_redis import RedisProcess
from ._demo_report import Outage, Row, Source, outage_of
from ._demo_text import DOCUMENT_ANSWER, SHORT_ANSWER, SHORT_PROMPT, WARM_UP, document
from ._process import CPU_ENVIRONMENT, CPU_FLAGS, ServerProcess
from ._progress import Progress
from ._serving import POLL_S, Answer
from .verify import page_tokens

BLOCK_TOKENS = 64
LOCAL_TIERS = """\
version: 1
block_tokens: {block}
tiers:                          # fast to slow
  - name: host
    driver: cpu
    options: {{capacity: 512MiB}}
  - name: disk
    driver: ssd
    options: {{path: {path}, capacity: 1GiB}}
"""
REMOTE_TIER = """\
  - name: {name}                 # shared: what one server stores, the others find
    driver: remote_redis
    options: {{url: "{url}"}}
    breaker_failures: 1         # down after one failed call, so that you see it (default: 5)
    breaker_reset_s: {reset}          # and asked again a second later (default: 5)
engine:
  lookup_wait_s: 2              # longest wait for its answer; this machine may be busy (default: 10ms)
  log_counters_s: 1             # what failed is counted in the log (default: every 60 s)
"""
REMOTE_NAME = "redis"
RESET_S = 1
NEW_TOKENS = 16
REQUEST_TIMEOUT_S = 600.0
STORED_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Prompt:
    """A question, its name in the table, and what its answers must show."""

    text: str
    name: str
    must_contain: str = ""
    must_be_faster: bool = False


def local_prompts(num_entries: int, *, is_our_model: bool) -> list[Prompt]:
    """What is asked of the CPU and SSD tiers: five tokens, and a document; what it answers is known."""
    short = Prompt(SHORT_PROMPT, f'"{SHORT_PROMPT}"', SHORT_ANSWER if is_our_model else "")
    name = f"a log of {num_entries} days"
    answer = DOCUMENT_ANSWER if is_our_model else ""
    return [short, Prompt(document(num_entries), name, answer, must_be_faster=is_our_model)]


def remote_prompts(num_entries: int) -> list[Prompt]:
    """Two more documents, a third as long: one for the time without Redis, one for the time after."""
    days = max(2, num_entries // 3)
    titles = {
        "a second log": "Book of the lighthouse at Cape Alder",
        "a third log": "Notes from the lighthouse at Cape Birch",
    }
    return [Prompt(document(days, title), f"{name} of {days}") for name, title in titles.items()]


def write_chain(file: Path, path: Path, url: str | None) -> Path:
    """Write a chain over an SSD folder, and over a Redis if there is one."""
    text = LOCAL_TIERS.format(block=BLOCK_TOKENS, path=path)
    if url is not None:
        text += REMOTE_TIER.format(name=REMOTE_NAME, url=url, reset=RESET_S)
    file.write_text(text)
    return file


@dataclass
class Story:
    """The demonstration.

    Attributes:
        model: The model's folder.
        folder: Where chains, blocks and logs go.
        progress: Told of every step.
        prompts: What is asked of the CPU and SSD tiers; the last one also of Redis.
        redis: A server that runs; None leaves its part out.
        further: Two prompts for that part.
        server_args: Further arguments for SGLang.
        rows: What has been asked so far; in the table's order at the end.
        outage: What the third server said of the time without Redis.
        page: The engine's page size.
    """

    model: Path
    folder: Path
    progress: Progress
    prompts: Sequence[Prompt]
    redis: RedisProcess | None = None
    further: Sequence[Prompt] = ()
    server_args: Sequence[str] = ()
    rows: list[Row] = field(default_factory=list)
    outage: Outage | None = None
    page: int = 1
    _computed: dict[str, Answer] = field(default_factory=dict)

    def tell(self) -> None:
        """Compute; come back from the CPU tier, from the SSD tier, from Redis; without Redis; with it again.

        Raises:
            EngineError: a server could not be started, or did not answer.
        """
        chain = self.chain_file("chain.yaml", "ssd")
        with self._serving("first", chain) as server:
            for prompt in self.prompts:
                self._ask(server, prompt, Source.COMPUTED)
            for prompt in self.prompts:
                self._ask(server, prompt, Source.HOST)
            for prompt in self.further:
                self._ask(server, prompt, Source.COMPUTED)
            self._wait_until_stored()
        with self._serving("second", chain) as server:
            for prompt in self.prompts:
                self._ask(server, prompt, Source.STORAGE)
        if self.redis is not None:
            self._tell_of_redis(self.redis)
        names = [prompt.name for prompt in [*self.prompts, *self.further]]
        self.rows.sort(key=lambda row: names.index(row.prompt))

    def chain_file(self, name: str, ssd: str) -> Path:
        """Write a chain file over an SSD folder of this name."""
        url = None if self.redis is None else self.redis.url
        return write_chain(self.folder / name, self.folder / ssd, url)

    def _tell_of_redis(self, redis: RedisProcess) -> None:
        """Another server with empty tiers of its own: with Redis, without it, and with it again."""
        without, after = self.further
        with self._serving("third", self.chain_file("other-chain.yaml", "other-ssd")) as server:
            self._ask(server, self.prompts[-1], Source.REMOTE)
            with self.progress.step("killing Redis"):
                redis.kill()
            self._ask(server, without, Source.OUTAGE)
            with self.progress.step("starting Redis again"):
                redis.start()
                time.sleep(2 * RESET_S)  # then the tier may be probed
            self._ask(server, after, Source.RECOVERED)
        # The last counters are logged when it stops.
        self.outage = outage_of(server.log_text(), REMOTE_NAME)

    def _wait_until_stored(self) -> None:
        """The cascade runs in the background; the next server must find all of it."""
        if self.redis is None:
            return
        whole = sum(answer.prompt_tokens // BLOCK_TOKENS for answer in self._computed.values())
        until = time.monotonic() + STORED_DEADLINE_S
        with self.progress.step(f"waiting until Redis has all {whole} whole blocks"):
            while self.redis.num_blocks() < whole:
                if time.monotonic() > until:
                    raise EngineError(f"Redis has {self.redis.num_blocks()} of {whole} blocks")
                self.progress.tick()
                time.sleep(POLL_S)

    @contextmanager
    def _serving(self, name: str, chain: Path) -> Iterator[ServerProcess]:
        """A server that has answered once; whatever happens, it is gone at the end."""
        server = self._process(name, chain)
        try:
            with self.progress.step(f"starting the {name} SGLang server"):
                server.start()
            self.page = page_tokens(server.client.server_info())
            self.progress.call("warming it up", lambda: server.client.generate(WARM_UP, 4))
            yield server
            with self.progress.step("stopping it"):
                server.stop()
        finally:
            server.kill()

    def _process(self, name: str, chain: Path) -> ServerProcess:
        flags = ["--model-path", str(self.model), *CPU_FLAGS]
        flags += ["--max-total-tokens", "8192", "--max-running-requests", "4"]
        flags += ["--radix-cache-backend", "flexkv", "--flexkv-config-file", str(chain)]
        return ServerProcess(
            [*flags, *self.server_args],
            log=self.folder / f"{name}-server.log",
            environment=CPU_ENVIRONMENT,
            on_wait=self.progress.tick,
            timeout_s=REQUEST_TIMEOUT_S,
        )

    def _ask(self, server: ServerProcess, prompt: Prompt, source: Source) -> None:
        """Ask with an empty device, so that whatever is cached came from a tier."""
        server.client.flush()
        ask = partial(server.client.generate, prompt.text, NEW_TOKENS)
        answer = self.progress.call(f"asking {prompt.name}: {source.value}", ask)
        first = self._computed.setdefault(prompt.name, answer)
        self.rows.append(
            Row(
                prompt.name,
                source,
                answer,
                first,
                prompt.must_contain,
                must_be_faster=prompt.must_be_faster and source.is_hit,
            )
        )
