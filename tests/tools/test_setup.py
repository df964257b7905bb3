"""tools/setup.sh on a small project that needs no package index: which Python, and what becomes of a broken .venv."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from distributed.hosts.paths import PROJECT

sys.path.append(str(PROJECT / "tests" / "distributed" / "hosts"))
from test_find_python import REASONS, fake_python

FILES = ("tools/setup.sh", "tools/constraints.txt", "distributed/hosts/find_python.sh")
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "small"
version = "1"
"""
BACKEND = """
import zipfile
def build_editable(folder, *_, **__):
    with zipfile.ZipFile(f"{folder}/small-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1\\n")
        wheel.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.dist-info/RECORD", "")
    return "small-1-py3-none-any.whl"
"""


@pytest.fixture
def project(tmp_path) -> Path:
    folder = tmp_path / "my project"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, folder / name)
    (folder / "distributed/hosts/first_import.py").write_text('print("imported")\n')
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    fake_python(tmp_path / "bin" / "python3", "good")
    return folder


def setup(project: Path, shell: str = "/bin/sh", **env: str) -> subprocess.CompletedProcess:
    known = {"PATH": f"{project.parent}/bin:/usr/bin:/bin", "HOME": str(project.parent), "PIP_NO_INDEX": "1"}
    return subprocess.run([shell, project / "tools/setup.sh"], capture_output=True, text=True, env=known | env)


def made(project: Path) -> bool:
    python = project / ".venv" / "bin" / "python"
    return subprocess.run([python, "-m", "pip", "show", "-q", "small"]).returncode == 0


def test_an_environment_is_made_its_packages_are_loaded_once_and_then_nothing_is_done(project):
    done = setup(project)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"Making .venv with {project.parent}/bin/python3."
    assert "the first time a Mac scans them" in done.stdout and done.stdout.endswith("imported\n")
    again = setup(project)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "") and made(project)


@pytest.mark.slow
def test_an_environment_that_does_not_work_any_more_is_made_anew(project):
    """Also where the stamp says that all is installed: `brew upgrade` does not touch it."""
    venv = without_pip(project / ".venv")
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/opt/homebrew/opt/python@3.12/bin/python3.12")
    (venv / ".installed").touch()
    done = setup(project)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Making a new .venv") and "does not run" in done.stdout.splitlines()[0]
    assert made(project) and not (venv / "old").exists() and (venv / ".installed").exists()


@pytest.mark.slow
def test_one_without_pip_gets_it_and_keeps_what_it_has(project):
    """As uv makes them, or after Ctrl-C while it was made."""
    venv = without_pip(project / ".venv")
    done = setup(project)
    assert done.returncode == 0, done.stderr
    assert "Making" not in done.stdout and made(project) and (venv / "old").exists()


@pytest.mark.slow
def test_a_link_is_taken_away_and_not_what_it_leads_to(project, tmp_path):
    """As a second working tree may have one, to share the environment."""
    theirs = without_pip(tmp_path / "theirs")
    (theirs / "bin" / "python").unlink()
    (project / ".venv").symlink_to(theirs)
    done = setup(project)
    assert done.returncode == 0, done.stderr
    assert made(project) and not (project / ".venv").is_symlink() and (theirs / "old").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a Mac takes the newest")
def test_of_two_series_of_torch_a_new_environment_gets_the_small_one(project, tmp_path):
    for version in ("2.13.0", "2.14.1"):
        with zipfile.ZipFile(tmp_path / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            folder = f"torch-{version}.dist-info"
            wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{folder}/RECORD", "")
    asked = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    needs = "".join(f"Requires-Dist: {line}\\n" for line in asked if line.startswith("torch"))
    (project / "backend.py").write_text(BACKEND.replace("Version: 1\\n", f"Version: 1\\n{needs}"))
    done = setup(project, PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (project / ".venv").glob("lib/*/site-packages/torch-*")] == ["torch-2.13.0.dist-info"]


def without_pip(venv: Path) -> Path:
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / "old").touch()
    return venv


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_what_is_said_where_no_python_can_train(project, tmp_path, shell):
    """On a Mac with a Homebrew for Intel only; `PYTHON` names nothing else."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    shells = tmp_path / "shell"
    shells.mkdir()
    (shells / "sh").symlink_to(shutil.which(shell))
    fake_python(tmp_path / "bin" / "python3", "intel")
    find = project / "distributed/hosts/find_python.sh"
    only = f'for folder in "{tmp_path}/bin"; do'
    find.write_text(re.sub(r"for folder in .*?; do", only, find.read_text(), flags=re.DOTALL))
    for name, script in {"uname": "echo Darwin", "sysctl": '[ "$2" = hw.optional.arm64 ] && echo 1'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = setup(project, str(shells / "sh"))
    assert done.returncode == 1 and not (project / ".venv").exists()
    assert done.stdout == f"Skipped {tmp_path}/bin/python3: {REASONS['intel']}\n"
    assert "No Python that can train was found" in done.stderr and "Homebrew in /opt/homebrew" in done.stderr


@pytest.mark.slow
def test_a_failed_import_is_an_error_each_time(project):
    (project / "distributed/hosts/code.py").write_text("raise SyntaxError")
    first = "import code\nraise ImportError('incompatible architecture')\n"
    (project / "distributed/hosts/first_import.py").write_text(first)
    for _ in range(2):
        done = setup(project)
        assert done.returncode == 1 and "incompatible architecture" in done.stderr
