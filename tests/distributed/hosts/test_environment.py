import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback_sshd import SshServer
from packaging.specifiers import SpecifierSet
from test_find_python import REASONS, fake_python

from distributed.hosts import agent_call, environment, sync, wheelhouse
from distributed.hosts.agent.facts import facts
from distributed.hosts.environment import Pins, needs, own_pins, setup, unlike
from distributed.hosts.wheelhouse import target_of
from distributed.ssh.connection import Remote
from whisper_tuner.errors import ConfigError, HostError

PYPROJECT = '[project]\nrequires-python = ">=3.11"\ndependencies = [{}]\n'


def test_pins_cover_what_the_dependencies_need():
    pins = own_pins()
    assert "torch" in pins.direct
    assert {"torch", "sympy", "mpmath", "tokenizers"} <= set(pins.all)
    assert not [version for version in pins.all.values() if "+" in version]
    assert "pytest" not in pins.all


def test_pins_of_something_not_installed(tmp_path):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format('"no-such-package"'))
    with pytest.raises(ConfigError, match="no-such-package is not installed here"):
        own_pins(tmp_path)


def test_what_is_for_another_system_is_not_pinned(tmp_path):
    here = sys.platform
    lines = (
        f"\"idna>=2; sys_platform == '{here}'\", \"idna>=99; sys_platform != '{here}'\", \"no-such; os_name == 'x'\""
    )
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format(lines))
    assert own_pins(tmp_path).direct == ("idna",)


def test_unlike_ignores_local_version_tags():
    pins = Pins(direct=("torch",), all={"torch": "2.13.0", "idna": "3.1"}, python=SpecifierSet(">=3.11"))
    assert unlike(pins, {"torch": "2.13.0+cpu", "idna": "3.1"}) == []
    assert unlike(pins, {"torch": "2.12.0"}) == ["idna is missing (here 3.1)", "torch 2.12.0 (here 2.13.0)"]


def test_what_a_package_asks_of_python_is_known_before_it_is_fetched():
    """numpy 2.5 and librosa 1.0, which a master with 3.12 has, cannot be installed for 3.11."""
    of = {"numpy": SpecifierSet(">=3.12"), "torch": SpecifierSet(">=3.10"), "odd": SpecifierSet("")}
    known = {"numpy": "2.5.5", "torch": "2.13.0", "odd": "1"}
    pins = Pins(direct=("torch",), all=known, python=SpecifierSet(">=3.11,<3.15"), python_of=of)
    assert pins.unfit([3, 12, 0]) == ""
    assert pins.unfit([3, 11, 9]) == "of the packages as they are on the master, numpy 2.5.5 needs >=3.12"
    assert pins.unfit([3, 15, 0]) == "needs <3.15,>=3.11"
    own = own_pins()
    assert own.unfit(sys.version_info[:3]) == "" and own.python_of["torch"].contains("3.10") and own.unfit([3, 9, 6])


def test_what_only_some_pythons_need_is_not_asked_of_every_host():
    """A master with 3.13 has librosa's standard-aifc and with it audioop-lts, which cannot be installed for 3.12."""
    minor = sys.version_info.minor
    own = f'python_version == "3.{minor}"'
    texts = [
        "idna",
        f"packaging; {own}",
        f"rich; {own} and extra == 'x'",
        "psutil; extra == 'x'",
        "numpy>=2; python_version > '3'",
    ]
    distribution = SimpleNamespace(requires=texts)
    of = SpecifierSet(f">=3.{minor - 1},<3.{minor + 2}")
    assert [found.name for found in needs(distribution, {"x"}, of)] == ["idna", "psutil", "numpy"]
    assert [found.name for found in needs(distribution, set(), SpecifierSet(f"==3.{minor}.*"))] == [
        "idna",
        "packaging",
        "numpy",
    ]


def test_targets():
    mac = target_of({"python": [3, 12, 1], "system": "Darwin", "machine": "arm64", "release": "14.5", "libc": ""})
    assert mac.tag == "cp312-darwin_14_5_arm64"
    assert "macosx_11_0_arm64" in mac.platforms()
    linux = target_of({"python": [3, 11, 7], "system": "Linux", "machine": "x86_64", "release": "6.1", "libc": "2.31"})
    assert linux.tag == "cp311-linux_2_31_x86_64"
    assert linux.platforms()[0] == "manylinux_2_31_x86_64"


@pytest.fixture
def small_project(tmp_path, monkeypatch) -> Path:
    """A project that needs one small package, and a registry on this machine that has just that."""
    project = tmp_path / "small"
    project.mkdir()
    (project / "pyproject.toml").write_text(PYPROJECT.format('"idna>=3"'))
    registry = tmp_path / "registry"
    registry.mkdir()
    rebuild_wheel("idna", registry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(environment, "LISTS", tmp_path / "lists")
    monkeypatch.setattr(wheelhouse, "CACHE", tmp_path / "wheelhouse")
    monkeypatch.setattr(sync, "INDEX", tmp_path / "index.json")
    monkeypatch.setattr(environment, "own_pins", lambda: own_pins(project))
    return project


def rebuild_wheel(name: str, folder: Path) -> Path:
    """A wheel of an installed pure Python package."""
    distribution = metadata.distribution(name)
    path = folder / f"{name}-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in distribution.files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                wheel.write(file.locate(), str(file))
    return path


def test_setup_from_nothing_over_a_wheelhouse_and_then_again(ssh_server: SshServer, small_project):
    said: list[str] = []
    with Remote.connect(ssh_server.host) as remote:
        told: list[tuple] = []
        [done] = setup([remote], lambda host, text: said.append(f"{host}: {text}"), lambda *about: told.append(about))
        assert done.source == "wheelhouse"
        totals = {name: total for name, _, total, _ in told if total}
        assert [*totals] == ["127.0.0.1", "127.0.0.1: installing"] and totals["127.0.0.1: installing"] > 100_000
        assert {name for name, _, total, _ in told if total is None} == {
            "127.0.0.1: fetching wheels",
            "127.0.0.1: loading the packages",
        }
        venv = Path(ssh_server.host.project_path, ".venv")
        assert done.python == str(venv / "bin/python")
        version = subprocess.run(
            [done.python, "-c", "import idna; print(idna.__version__, idna.__file__)"], capture_output=True, text=True
        ).stdout.split()
        assert version[0] == metadata.version("idna")
        assert version[1].startswith(str(venv))
        assert any("cannot reach the package registry" in line for line in said)
        assert all(line.startswith("127.0.0.1: ") for line in said)
        assert not any("Mac" in line for line in said)
        assert [line for line in said if "ready" in line] == [
            f"127.0.0.1: ready (wheelhouse, {done.python}, {done.seconds:.0f} s)"
        ]
        [again] = setup([remote], lambda host, text: said.append(text))
        assert (again.source, again.seconds < 3) == ("unchanged", True)
        ssh_server.pip_settings.write_text(f"[global]\nno-index = true\nfind-links = {small_project.parent}/registry\n")
        subprocess.run([done.python, "-m", "pip", "uninstall", "-qy", "idna"], check=True)
        [fetched] = setup([remote], lambda host, text: None)
        assert fetched.source == "registry"


@pytest.mark.slow
def test_a_link_is_taken_away_and_a_wheel_that_the_master_did_not_send_is_not_installed(
    ssh_server: SshServer, small_project, tmp_path
):
    """What the link leads to is the user's. pip would take the wheel for the newest, and run what is in it."""
    theirs, venv = tmp_path / "theirs", Path(ssh_server.host.project_path, ".venv")
    there = Path(ssh_server.host.project_path, ".wheelhouse")
    for folder in (theirs, there):
        folder.mkdir(parents=True)
    (theirs / "work.txt").write_text("mine")
    venv.symlink_to(theirs)
    own, version = rebuild_wheel("idna", there), metadata.version("idna")
    planted = own.rename(there / f"idna-{version}+planted-py3-none-any.whl")
    parts = f"idna-{version}"
    with zipfile.ZipFile(planted) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    with zipfile.ZipFile(planted, "w") as wheel:
        for name, data in files.items():
            data = data.replace(f"Version: {version}".encode(), f"Version: {version}+planted".encode())
            wheel.writestr(name.replace(f"{parts}.dist-info", f"{parts}+planted.dist-info"), data)
        wheel.writestr("planted.pth", "import os")
    with Remote.connect(ssh_server.host) as remote:
        [done] = setup([remote], lambda host, text: None)
    assert done.source == "wheelhouse" and not [*venv.rglob("planted.pth")]
    assert (theirs / "work.txt").read_text() == "mine" and not venv.is_symlink()
    # By which `hosts remove` knows it.
    assert f"prompt = {environment.MADE_BY!r}\n" in (venv / "pyvenv.cfg").read_text()


@pytest.mark.slow
def test_an_environment_whose_python_does_not_fit_any_more_is_made_anew(ssh_server: SshServer, small_project):
    """`brew upgrade` puts another version in its place."""
    venv = Path(ssh_server.host.project_path, ".venv")
    python, old = venv / "bin" / "python", venv / "lib" / "python3.77" / "site-packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    next((venv / "lib").iterdir()).rename(old.parent)
    said: list[str] = []
    with Remote.connect(ssh_server.host) as remote:
        [done] = setup([remote], lambda host, text: said.append(text))
    assert done.source == "wheelhouse" and not old.exists()
    assert any(line.startswith(f"making {venv} with /") for line in said)
    [first] = [line for line in said if line.startswith("loading the packages once")]
    assert said.index(first) == len(said) - 2
    assert subprocess.run([python, "-c", "import idna, pip"]).returncode == 0


def test_a_python_that_the_packages_do_not_fit_is_told_before_anything_is_fetched(
    ssh_server: SshServer, small_project, monkeypatch
):
    venv = Path(ssh_server.host.project_path, ".venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pins = replace(own_pins(small_project), python_of={"idna": SpecifierSet(">=3.99")})
    monkeypatch.setattr(environment, "own_pins", lambda: pins)
    said: list[str] = []
    with (
        Remote.connect(ssh_server.host) as remote,
        pytest.raises(HostError, match=r"no Python that can train was found: /.*, of the packages .*, idna 3.* needs"),
    ):
        setup([remote], lambda host, text: said.append(text))
    assert not said and (venv / "bin" / "python").exists()
    named = replace(ssh_server.host, python_env=str(venv))
    with (
        Remote.connect(named) as remote,
        pytest.raises(HostError, match=f"{venv}/bin/python cannot be used: of the packages"),
    ):
        setup([remote], lambda host, text: said.append(text))
    assert not said and (venv / "bin" / "python").exists()


@pytest.mark.slow
def test_a_half_made_environment_is_completed_and_a_package_that_does_not_load_is_told(
    ssh_server: SshServer, small_project, tmp_path, monkeypatch
):
    """A file of the user's with a library's name, in the folder where sessions begin, is not loaded instead."""
    venv, said = Path(ssh_server.host.project_path, ".venv"), []
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)  # then its connection ended
    (tmp_path / "first.py").write_text("import calendar\nraise ImportError('incompatible architecture')")
    monkeypatch.setattr(environment, "FIRST_IMPORT", tmp_path / "first.py")
    with Remote.connect(ssh_server.host) as remote:
        (Path(remote.home) / "calendar.py").write_text("raise SyntaxError")
        with pytest.raises(HostError, match="incompatible architecture") as caught:
            setup([remote], lambda host, text: said.append(text))
    assert not [line for line in said if line.startswith("making ")]
    assert subprocess.run([venv / "bin" / "python", "-c", "import idna, pip"]).returncode == 0
    assert "Remove its environment" in str(caught.value)  # another setup would find all versions as they should be


@pytest.mark.slow
def test_where_wheels_were_fetched_by_another_python_what_is_missing_is_explained(
    ssh_server: SshServer, small_project, monkeypatch
):
    """As librosa's standard-aifc is, which only 3.13 needs, where the master has 3.11 and the host no internet."""
    other = (3, sys.version_info.minor + 1)
    monkeypatch.setattr(environment, "target_of", lambda facts: replace(target_of(facts), python=other))
    monkeypatch.setattr(wheelhouse, "fill", lambda *about: [])
    with Remote.connect(ssh_server.host) as remote, pytest.raises(HostError, match="pip failed: ") as caught:
        setup([remote], lambda host, text: None)
    assert "idna" in str(caught.value) and environment.OTHER_MINOR in str(caught.value)
    assert f"brew install python@3.{sys.version_info.minor}" in str(caught.value)


def test_a_python_that_the_user_named_is_never_made_or_changed(ssh_server: SshServer, small_project, tmp_path):
    host = replace(ssh_server.host, python_env=str(tmp_path / "none" / "bin" / "python"))
    with Remote.connect(host) as remote, pytest.raises(HostError, match="does not run") as caught:
        setup([remote], lambda host, text: None)
    assert "python_env" in str(caught.value)
    assert not (tmp_path / "none").exists()
    system = replace(host, python_env=str(Path(sys.base_prefix, "bin", "python3")))
    with Remote.connect(system) as remote, pytest.raises(HostError, match="not in a virtual environment"):
        setup([remote], lambda host, text: None)


@pytest.mark.parametrize("python", ["#!/bin/sh\nexit 1\n", None], ids=["too old or broken", "none"])
def test_a_folder_of_the_user_is_never_cleared(ssh_server: SshServer, small_project, tmp_path, python):
    mine = tmp_path / "mine"
    (mine / "bin").mkdir(parents=True)
    (mine / "work.txt").write_text("mine")
    if python:
        (mine / "bin" / "python").write_text(python)
        (mine / "bin" / "python").chmod(0o755)
    with (
        Remote.connect(replace(ssh_server.host, python_env=str(mine))) as remote,
        pytest.raises(HostError, match="does not run"),
    ):
        setup([remote], lambda host, text: None)
    assert (mine / "work.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["bare", "intel"])
def test_a_host_with_no_python_that_can_train_says_what_is_wrong_with_each(
    ssh_server: SshServer, small_project, tmp_path, monkeypatch, kind
):
    python = fake_python(tmp_path / "python3.12", kind)
    there_is_only(python, monkeypatch)
    with Remote.connect(ssh_server.host) as remote, pytest.raises(HostError) as caught:
        setup([remote], lambda host, text: None)
    assert f"no Python that can train was found: {python}: {REASONS[kind]}" in str(caught.value)
    assert f"brew install python@3.{sys.version_info.minor}" in str(caught.value)
    assert not Path(ssh_server.host.project_path, ".venv").exists()


def there_is_only(python: Path, monkeypatch) -> None:
    """No other Python is looked for on the hosts."""
    monkeypatch.setattr(agent_call, "START", re.sub("find_python .*", f"find_python {python}", agent_call.START))


def test_a_host_whose_pythons_are_all_too_old_says_which_it_has(ssh_server: SshServer, small_project):
    (small_project / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.99"\ndependencies = []\n')
    with (
        Remote.connect(ssh_server.host) as remote,
        pytest.raises(HostError, match=r"no Python that can train was found: /.*: 3\.\d+\.\d+, needs >=3.99"),
    ):
        setup([remote], lambda host, text: None)
    assert not Path(ssh_server.host.project_path, ".venv").exists()


def test_a_master_without_a_registry_says_so(small_project, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(HostError, match="cannot fetch the wheels") as caught:
        wheelhouse.fill(
            "mini", target_of(facts([], str(small_project))), *environment.write_lists(own_pins(small_project))
        )
    assert "idna" in str(caught.value)
