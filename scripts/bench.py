"""Run the benchmarks and write what they printed, with the machine, into docs/benchmarks.md.

    python scripts/bench.py [NAME ...] [-- OPTION ...]     # names of scripts in benchmarks/; default: all

Options after ``--`` go to every script that is run.  Figures of scripts that are not run stay as they were.
A script that fails is reported at the end, and the others run all the same; so is one that measured and
missed a goal (exit status 3), whose figures are written.

Other projects' stores that stand beside ours are installed below ``.cache/bench``, without what they
depend on, when they are first wanted; where that fails they are left out.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
CACHE = ROOT / ".cache" / "bench"
MISSED = 3
"""A script's exit status where everything was measured, and a goal was missed."""

OTHERS = {
    "redis_throughput": {
        "LMCACHE_FOLDER": "lmcache==0.5.6",
        "MOONCAKE_FOLDER": "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    }
}
"""By script: the variable that tells it a folder, and what is to be there."""


def machine() -> str:
    """Processor, its number, memory and system, in one line."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def others(name: str) -> dict[str, str]:
    """The folders of other projects' stores that a script compares with; those that can be had."""
    folders = {}
    for variable, package in OTHERS.get(name, {}).items():
        folder = Path(os.environ.get(variable) or CACHE / package.partition("==")[0])
        if not folder.exists():
            print(f"installing {package} below {CACHE.relative_to(ROOT)}", flush=True)
            command = ["pip", "install", "--quiet", "--no-deps", "--target", str(folder), package]
            if subprocess.run([sys.executable, "-m", *command], check=False).returncode:
                print(f"{package} cannot be had: left out", flush=True)
                continue
        folders[variable] = str(folder)
    return folders


def run(name: str, options: Sequence[str]) -> tuple[int, str]:
    """One script's status and output, shown while it runs."""
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **others(name), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.replace(str(ROOT) + "/", "").rstrip())
    return process.returncode, "\n".join(lines).strip()


def write(name: str, options: Sequence[str], output: str) -> None:
    """Put a script's output between its marks in the page."""
    today = datetime.date.today().isoformat()
    command = " ".join([name, "--", *options]) if options else name
    head = f'`make bench ARGS="{command}"`, {today}, on {machine()}:'
    body = f"<!-- {name} -->\n\n{head}\n\n```text\n{output}\n```\n\n<!-- /{name} -->"
    page = PAGE.read_text()
    marks = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    page = marks.sub(lambda _: body, page) if marks.search(page) else f"{page.rstrip()}\n\n{body}\n"
    PAGE.write_text(page)


def main() -> int:
    """Run what was asked for; 1 if a script failed."""
    asked, options = sys.argv[1:], []
    if "--" in asked:
        at = asked.index("--")
        asked, options = asked[:at], asked[at + 1 :]
    names = asked or sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))
    failed, missed = [], []
    for name in names:
        print(f"== benchmarks/{name}.py", flush=True)
        status, output = run(name, options)
        if status not in (0, MISSED):
            failed.append(name)
            continue
        if status:
            missed.append(name)
        write(name, options, output)
    if missed:
        print(f"below a goal: {', '.join(missed)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
