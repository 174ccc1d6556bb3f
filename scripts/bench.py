"""Run the benchmarks and write what they printed, with the machine, into docs/benchmarks.md.

    python scripts/bench.py [NAME ...]        # names of scripts in benchmarks/; default: all

Figures of scripts that are not run stay as they were.  A script that fails is reported at the end, and the
others run all the same.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"


def machine() -> str:
    """Processor, its number, memory and system, in one line."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def run(name: str) -> tuple[int, str]:
    """One script's status and output, shown while it runs."""
    lines = []
    with subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.replace(str(ROOT) + "/", "").rstrip())
    return process.returncode, "\n".join(lines).strip()


def write(name: str, output: str) -> None:
    """Put a script's output between its marks in the page."""
    today = datetime.date.today().isoformat()
    head = f"`benchmarks/{name}.py`, {today}, on {machine()}:"
    body = f"<!-- {name} -->\n\n{head}\n\n```text\n{output}\n```\n\n<!-- /{name} -->"
    page = PAGE.read_text()
    marks = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    page = marks.sub(lambda _: body, page) if marks.search(page) else f"{page.rstrip()}\n\n{body}\n"
    PAGE.write_text(page)


def main() -> int:
    """Run what was asked for; 1 if a script failed."""
    names = sys.argv[1:] or sorted(
        path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py") if path.stem != "__init__"
    )
    failed = []
    for name in names:
        print(f"== benchmarks/{name}.py", flush=True)
        status, output = run(name)
        if status:
            failed.append(name)
        else:
            write(name, output)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
