"""That the dependencies have wheels for a Mac is asked of the package index, which may be out of reach."""

import subprocess
import sys
from pathlib import Path

import pytest

from distributed.hosts.paths import PROJECT

sys.path.insert(0, str(PROJECT / "tools"))
import check_resolution

UNREACHABLE = "error: Failed to fetch: `https://example.org/simple/torch/`\n  dns error: failed to lookup address"
NO_WHEELS = "torch==2.13.0 has no wheels with a matching platform tag (e.g., `macosx_13_0_arm64`)"


def fake_uv(tmp_path: Path, monkeypatch, script: str) -> None:
    (tmp_path / "uv").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setattr(check_resolution, "find_uv", lambda: str(tmp_path / "uv"))


def test_each_minor_version_of_the_project_is_asked_for(tmp_path, monkeypatch, capsys):
    fake_uv(tmp_path, monkeypatch, f'echo "$@" "$MACOSX_DEPLOYMENT_TARGET" >> {tmp_path}/asked; echo torch==2.13.0')
    assert check_resolution.main() == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    for line, minor in zip(asked, (11, 12, 13, 14), strict=True):
        assert f"--only-binary :all: --python-platform aarch64-apple-darwin --python-version 3.{minor} " in line
        assert line.endswith("pyproject.toml 14.0")
    assert "Python 3.14, macOS 14.0, arm64: 1 packages, all as wheels; torch 2.13.0" in capsys.readouterr().out


@pytest.mark.parametrize(("said", "status"), [(NO_WHEELS, 1), (UNREACHABLE, check_resolution.NOT_REACHED)])
def test_what_does_not_resolve_is_told_apart_from_an_index_out_of_reach(tmp_path, monkeypatch, capsys, said, status):
    (tmp_path / "said").write_text(said)
    fake_uv(tmp_path, monkeypatch, f"cat {tmp_path}/said >&2; exit 2")
    assert check_resolution.main() == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


@pytest.mark.slow
def test_the_dependencies_have_wheels_for_a_mac_and_for_no_later_python():
    done = subprocess.run([sys.executable, check_resolution.__file__], capture_output=True, text=True)
    if done.returncode == check_resolution.NOT_REACHED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout
    later = check_resolution.resolve(check_resolution.find_uv(), max(check_resolution.minors()) + 1)
    assert later.returncode and "torch" in later.stderr
