"""``docs/write-a-driver.md``, executed literally, where only the built wheel is installed.

The environment is a virtual one.  It holds the wheel and sees, of this one, the packages that the
wheel depends on; the project's own modules are out of its reach.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks
from tests.support.waiting import CHILD_S

PAGE = DOCS / "write-a-driver.md"
MOST_LINES = 120
SERVES = Path(__file__).with_name("serves_through_shelf.py")

pytestmark = pytest.mark.slow


class Reader:
    """Somebody with an empty folder, an environment, and the page."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.folder = folder
        self.environment = environment
        self.told = ""

    def follow(self, block: Block) -> None:
        """Write a file, run commands, or compare what was printed."""
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "bash":
            self.told = self.run("bash", "-e", "-c", block.text)
        elif block.language == "text" and "launch_server" not in block.text:
            for line in block.text.splitlines():
                assert line in self.told, f"{block}: {line!r} is not in:\n{self.told}"

    def run(self, *command: str) -> str:
        """What a command prints; it must succeed."""
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "PIP_", "FLEXKV_"))
        }
        environ |= {
            "PATH": os.pathsep.join([str(self.environment / "bin"), os.environ["PATH"]]),
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # the variable says what it sets: isolation off
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CHILD_S,
            cwd=self.folder,
            env=environ,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def reader(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """An environment with the wheel in it, and an empty folder."""
    top = tmp_path_factory.mktemp("stranger")
    venv.create(top / "environment", with_pip=False, symlinks=True)
    (site,) = (top / "environment" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    reader = Reader(top / "shelf", top / "environment")
    reader.folder.mkdir()
    pip = ("python", "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed")
    reader.run(*pip, str(wheel))
    where = reader.run("python", "-c", "import flexkv_core; print(flexkv_core.__file__)")
    assert where.startswith(str(top)), where
    return reader


def test_the_page_as_it_stands(reader: Reader) -> None:
    for block in blocks(PAGE):
        reader.follow(block)
    assert "served" in reader.run("python", "-W", "error", str(SERVES))


def test_the_code_is_short() -> None:
    code = [block for block in blocks(PAGE) if block.file and block.language != "yaml"]
    assert len(code) == 5
    assert sum(len(block.text.splitlines()) for block in code) <= MOST_LINES
