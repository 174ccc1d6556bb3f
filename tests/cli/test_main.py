import os
import subprocess
import sys

import pytest

from flexkv_core import __version__, cli
from flexkv_core.cli import main, verbs
from flexkv_core.errors import EngineError
from tests.support.waiting import CHILD_S

HEAVY = ("torch", "redis", "boto3", "sglang", "numpy", "yaml")


def run(*words, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "flexkv_core", *words],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
        **options,
    )


def test_every_module_is_a_verb_with_both_functions():
    assert {"check", "doctor", "drivers", "new-driver", "reference"} <= set(verbs())
    parser = cli.build_parser()
    for verb in verbs():
        assert verb in parser.format_help()


def test_help_and_version(capsys):
    assert main([]) == 0
    assert "Exit status" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_help_of_every_verb_is_text_for_people(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for verb in verbs():
        with pytest.raises(SystemExit) as caught:
            main([verb, "--help"])
        assert caught.value.code == 0
        usage, description, *rest = capsys.readouterr().out.split("\n\n")
        assert usage.startswith(f"usage: flexkv {verb}")
        assert description[0].isupper()
        assert not description.startswith("Flexkv"), "it need not name itself"
        assert "``" not in description + "".join(rest)
        assert max(map(len, description.splitlines())) <= 80


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_every_option_is_explained(verb):
    (subparsers,) = cli.build_parser(verb)._subparsers._group_actions
    for action in subparsers.choices[verb]._actions:
        assert action.help, action.option_strings or action.dest


@pytest.mark.parametrize("words", [["nonsense"], ["--nonsense"]])
def test_wrong_usage_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "verb", ["check", "doctor", "drivers", "new-driver", "receipts", "reference", "verify"]
)
def test_help_of_a_verb_imports_nothing_heavy(verb):
    code = (
        "import sys; from flexkv_core.cli import main\n"
        f"try: main([{verb!r}, '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "drivers = [name for name in sys.modules if name.startswith('flexkv_driver')]\n"
        "assert not heavy + drivers, heavy + drivers"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=CHILD_S, stdout=subprocess.DEVNULL)


def test_the_module_is_the_command():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"flexkv-core {__version__}\n")


def test_an_error_of_ours_is_a_message_and_status_1(monkeypatch, capsys):
    def fail(_args):
        raise EngineError("no engine\nanywhere")

    monkeypatch.setattr("flexkv_core.cli.check.run", fail)
    assert main(["check"]) == 1
    assert capsys.readouterr().err == "flexkv check: no engine\n  anywhere\n"


def test_an_interrupt_is_status_130(monkeypatch):
    def interrupt(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("flexkv_core.cli.check.run", interrupt)
    assert main(["check"]) == 130


def test_a_reader_that_goes_away_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "flexkv_core", "reference"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=CHILD_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["check"], ["--version"], ["reference"], ["drivers"]])
def test_output_that_cannot_be_written_is_a_message(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flexkv_core", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=CHILD_S,
            check=False,
        )
    assert done.returncode == 1
    name = "flexkv" if words[0].startswith("-") else f"flexkv {words[0]}"
    assert done.stderr == f"{name}: No space left on device\n"


@pytest.mark.parametrize("closed", [0, 1])
@pytest.mark.parametrize("words", [["check"], ["--version"], ["receipts", "-"]])
def test_without_standard_input_or_output(words, closed):
    command = [sys.executable, "-m", "flexkv_core", *words]
    with open(os.devnull, "r+") as nowhere:
        done = subprocess.run(
            command,
            stdin=nowhere,
            stdout=nowhere,
            stderr=subprocess.PIPE,
            text=True,
            timeout=CHILD_S,
            check=False,
            preexec_fn=lambda: os.close(closed),
        )
    assert done.returncode == (1 if words[0] == "receipts" else 0)
    assert "Traceback" not in done.stderr


PATHS = {
    "below a file": lambda folder: str(folder / "file" / "below.yaml"),
    "too long": lambda _: "x" * 300 + ".yaml",
    "a folder": str,
}


@pytest.mark.parametrize("place", PATHS)
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["reference", "--output", "PLACE"], 1),
        (["new-driver", "acme", "--into", "PLACE"], 1),
        (["check", "PLACE"], 1),
        (["receipts", "PLACE"], 1),
        (["verify", "--phase", "test", "--baseline-file", "PLACE"], 2),
    ],
)
def test_a_path_that_is_none_is_a_message(tmp_path, capsys, words, status, place):
    (tmp_path / "file").write_text("")
    name = PATHS[place](tmp_path)
    assert main([word.replace("PLACE", name) for word in words]) == status
    said = capsys.readouterr()
    assert not said.out
    assert os.path.basename(name) in said.err


def test_a_demonstration_without_what_it_needs_ends_at_once(tmp_path):
    done = run("demo", "--work", str(tmp_path / "work"), "--model-path", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flexkv demo: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "work").exists()
