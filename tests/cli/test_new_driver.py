import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexkv_core.cli import main
from tests.support.distributions import add_distribution
from tests.support.waiting import CHILD_S

ROOT = Path(__file__).parents[2]


def run(*words, cwd, path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        cwd=cwd,
        env=environ,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["acme", "far_store2"])
def test_the_skeleton_passes_the_kit_as_it_is(tmp_path, name, capsys):
    folder = tmp_path / "new"
    assert main(["new-driver", name, "--into", str(folder)]) == 0
    assert f"cd {folder} && pip install" in capsys.readouterr().out
    done = run(
        "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "tests", cwd=folder, path=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    info = folder / f"flexkv_driver_{name}-0.1.0.dist-info"  # as pip would write it
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flexkv-driver-{name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[flexkv.drivers]\n{name} = flexkv_driver_{name}\n")
    done = run("-m", "flexkv_core", "check", "chain.yaml", cwd=folder, path=folder)
    assert done.returncode == 0, done.stderr
    assert f"far: {name} from flexkv-driver-{name} 0.1.0" in done.stdout


def test_the_skeleton_is_in_order(tmp_path):
    folder = tmp_path / "new"
    assert main(["new-driver", "far_store", "--into", str(folder)]) == 0
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert len(texts) == 7
    assert not any("@name@" in text or "@Name@" in text or "@api@" in text for text in texts)
    assert 'name = "flexkv-driver-far-store"' in (folder / "pyproject.toml").read_text()
    assert "class FarStoreTier(Tier)" in (folder / "flexkv_driver_far_store" / "tier.py").read_text()
    assert len((folder / "flexkv_driver_far_store" / "tier.py").read_text().splitlines()) < 110


@pytest.mark.parametrize("name", ["Acme", "1st", "a-b", "", "a/b", "..", "x" * 40])
def test_names_that_are_none(tmp_path, name, capsys):
    assert main(["new-driver", "--into", str(tmp_path / "new"), "--", name]) == 1
    assert "must be of a-z" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_what_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    assert main(["new-driver", "acme", "--into", str(tmp_path)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_name_that_is_offered_already_is_refused_with_who_offers_it(tmp_path, monkeypatch, capsys):
    site = tmp_path / "site"
    add_distribution(
        monkeypatch,
        site,
        "acme-kv",
        entry_points={"flexkv.drivers": {"acme": "acme_kv_driver"}},
        modules={"acme_kv_driver": "raise ImportError('looking at a name imports nothing')"},
        version="2.3",
    )
    folder = tmp_path / "new"
    assert main(["new-driver", "acme", "--into", str(folder)]) == 1
    assert "acme: is offered by acme-kv 2.3 already" in capsys.readouterr().err
    assert not folder.exists()
    assert main(["new-driver", "ssd", "--into", str(folder)]) == 1
    assert "ssd: is offered by flexkv-core " in capsys.readouterr().err
    assert main(["new-driver", "acme2", "--into", str(folder)]) == 0
