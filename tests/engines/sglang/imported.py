"""Runs scripts in forks of a process that has imported SGLang: an import takes 5 to 15 s of a processor.

    python imported.py

reads one request a line, ``{"args": [...], "env": {...}, "cwd": ...}``, runs ``python ARGS`` as a child
that begins where the import has ended, and answers ``{"rc": ..., "out": ..., "err": ...}``.  Nothing but the
import is shared: no plug-in is loaded here, and every script runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from transformers.models.auto import configuration_auto

# Versions before 0.5.19 register a model type that newer transformers bring themselves.
_register = configuration_auto.CONFIG_MAPPING.register
configuration_auto.CONFIG_MAPPING.register = lambda key, value, exist_ok=False: _register(
    key, value, exist_ok=True
)

import sglang.srt.managers.scheduler  # noqa: E402, F401 - after the patch above; what all scripts need
import sglang.srt.plugins  # noqa: E402, F401 - also


def act(args: list[str]) -> int:
    """Do what ``python ARGS`` does; its exit status."""
    is_module = args[0] == "-m"
    sys.argv = args[1:] if is_module else args
    sys.path[0] = os.getcwd() if is_module else str(Path(args[0]).resolve().parent)
    try:
        if is_module:
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as exc:
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run(request: dict[str, object], out: int, err: int) -> int:
    """In a child of its own, with its output in two files; its exit status."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        status = act(request["args"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            status = run(json.loads(line), out.fileno(), err.fileno())
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        print(json.dumps({"rc": status, "out": texts[0], "err": texts[1]}), flush=True)


if __name__ == "__main__":
    main()
