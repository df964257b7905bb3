"""Which program a Python really is, as a Mac's folders have it."""

from pathlib import Path

import pytest

from distributed.ssh.local_network import real_python


@pytest.fixture
def homebrew(tmp_path) -> Path:
    """A framework as Homebrew installs it: /opt/homebrew/opt/python@3.12 is a link into the Cellar."""
    version = tmp_path / "Cellar/python@3.12/3.12.9/Frameworks/Python.framework/Versions/3.12"
    for program in ("bin/python3.12", "Resources/Python.app/Contents/MacOS/Python"):
        (version / program).parent.mkdir(parents=True)
        (version / program).touch()
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/python@3.12").symlink_to(tmp_path / "Cellar/python@3.12/3.12.9")
    return tmp_path


def test_a_framework_s_python_is_its_app(homebrew, tmp_path):
    base = homebrew / "opt/python@3.12/Frameworks/Python.framework/Versions/3.12"
    (tmp_path / "venv").symlink_to(base / "bin/python3.12")
    real = real_python(str(base), str(tmp_path / "venv"))
    assert real.startswith(str(homebrew / "Cellar"))
    assert real.endswith("/Versions/3.12/Resources/Python.app/Contents/MacOS/Python")


def test_any_other_is_the_file_behind_its_links(tmp_path):
    (tmp_path / "python3.12").touch()
    (tmp_path / "python").symlink_to("python3.12")
    assert real_python(str(tmp_path), str(tmp_path / "python")) == str(tmp_path / "python3.12")
