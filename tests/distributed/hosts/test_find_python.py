"""Which Python is chosen, and what is said of the others, in every shell that may be /bin/sh.

The judgement really runs, in this interpreter, which takes the place of another by a few lines that come before it.
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from distributed.hosts.paths import PROJECT

FIND = PROJECT / "distributed" / "hosts" / "find_python.sh"
IMPORTS = "import sys, platform, sysconfig; sysconfig.get_config_vars(); "
MAC = IMPORTS + "sys.platform = 'darwin'; sys.version_info = (3, 13, 1); "
INTEL = MAC + "platform.machine = lambda: 'x86_64'; sysconfig.get_platform = lambda: 'macosx-{}'"
BASE = sys._base_executable  # in no environment
KINDS = {
    "good": "import sys; sys.version_info = (3, 13, 1)",
    "noisy": "import sys; sys.version_info = (3, 13, 1); print('from a .pth file')",
    "arm64": MAC + "platform.machine = lambda: 'arm64'",
    "old": "import sys; sys.version_info = (3, 9, 6)",
    "ancient": "import sys; sys.version_info = (3, 8, 18)",
    "new": "import sys; sys.version_info = (3, 15, 0)",
    "intel": INTEL.format("12.0-x86_64"),
    "rosetta": INTEL.format("10.13-universal2"),
    "threaded": "import sys, sysconfig; sys.version_info = (3, 13, 1); sysconfig.get_config_var = lambda name: 1",
    "pypy": "import sys, platform; sys.version_info = (3, 11, 1); platform.python_implementation = lambda: 'PyPy'",
    "bare": "import sys; sys.version_info = (3, 13, 1); sys.modules['ensurepip'] = None",
    "broken": "raise SystemExit(127)",
}
REASONS = {
    "old": "3.9, needs 3.11 to 3.14",
    "ancient": "3.8, needs 3.11 to 3.14",
    "new": "3.15, needs 3.11 to 3.14",
    "intel": "built for Intel",
    "rosetta": "runs as Intel code, because its terminal runs under Rosetta",
    "threaded": "free-threaded, for which packages have no builds",
    "pypy": "PyPy, for which torch has no builds",
    "bare": "cannot make an environment, since its ensurepip is missing (Debian: python3-venv)",
    "broken": "does not run",
}


def fake_python(path: Path, kind: str) -> Path:
    """It says that it is `path`; otherwise it is this interpreter, or what `kind` makes of it."""
    before = f"import sys; sys.executable = {str(path)!r}; {KINDS[kind]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1 $2" = "-I -c" ] || exec {BASE} "$@"\ncode=$3\nshift 3\n')
    with path.open("a") as script:
        script.write(f'exec {BASE} -I -c "{before}\n$code" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(params=["sh", "dash", "bash", "busybox", "zsh"])
def shell(request, tmp_path) -> list[str]:
    """Each takes part as /bin/sh."""
    program = shutil.which(request.param)
    if program is None:
        pytest.skip(f"{request.param} is not installed")
    (tmp_path / "shell").mkdir()
    (tmp_path / "shell" / "sh").symlink_to(program)
    return [str(tmp_path / "shell" / "sh")]


def find(shell: list[str], tmp_path: Path, *names: str) -> tuple[str, str, list[str]]:
    """found, other, passed. PATH has the folders a and b of tmp_path before the system's."""
    script = f'set -eu; . {FIND}; find_python "$@"; echo "$found"; echo "$other"; printf %s "$passed"'
    env = {"PATH": f"{tmp_path}/a:{tmp_path}/b:/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    done = subprocess.run([*shell, "-c", script, "sh", *names], capture_output=True, text=True, env=env, check=True)
    found, other, *passed = done.stdout.removesuffix("\n").split("\n")
    return found, other, [line for line in passed if line]


def test_the_range_is_that_of_the_project():
    asked = SpecifierSet(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["requires-python"])
    fitting = [minor for minor in range(30) if asked.contains(f"3.{minor}.1")]
    assert f"oldest, newest, version = (3, {min(fitting)}), (3, {max(fitting)})," in FIND.read_text()


def test_one_that_cannot_train_is_passed_over_and_it_is_said_why(shell, tmp_path):
    bad = [fake_python(tmp_path / "a" / f"python-{kind}", kind) for kind in REASONS]
    good = fake_python(tmp_path / "b" / "python-good", "noisy")
    found, other, passed = find(shell, tmp_path, *(python.name for python in bad), "python-good")
    assert passed == [f"{python}: {reason}" for python, reason in zip(bad, REASONS.values(), strict=True)]
    assert (found, other) == (str(good), str(bad[0]))


@pytest.mark.parametrize("kind", ["old", "ancient", "bare", "broken"])
def test_what_cannot_train_may_still_answer_questions(tmp_path, kind):
    python = fake_python(tmp_path / "a" / "python3.77", kind)
    found, other, _ = find(["/bin/sh"], tmp_path, "python3.77")
    assert (found, other) == ("", "" if kind in ("broken", "ancient") else str(python))


def test_the_first_name_wins_wherever_it_is_and_what_comes_twice_is_asked_once(shell, tmp_path):
    """A path may be named, as PYTHON=... make setup does; /usr/local/bin is on PATH, and looked at anyway."""
    fake_python(tmp_path / "a" / "python3.78", "good")
    wanted = fake_python(tmp_path / "b" / "python3.77", "arm64")
    assert find(shell, tmp_path, "python3.77", "python3.78") == (str(wanted), "", [])
    named = fake_python(tmp_path / "c d" / "my python", "old")
    assert find(shell, tmp_path, str(named), str(named)) == ("", str(named), [f"{named}: {REASONS['old']}"])


def test_those_of_pyenv_uv_and_of_the_users_own_folder_are_found(shell, tmp_path):
    for folder in (".local/bin", ".pyenv/versions/3.9.1/bin", ".local/share/uv/python/cpython-3.13/bin"):
        fake_python(tmp_path / "home" / folder / "python3.77", "old" if "uv" not in folder else "good")
    found, _, passed = find(shell, tmp_path, "python3.77")
    assert "uv/python" in found and len(passed) == 2


def test_the_stub_of_macos_is_not_started(shell, tmp_path):
    """It would open a dialogue. Here `uname` says Darwin, and there are no command line tools."""
    for name, text in {"uname": "echo Darwin", "xcode-select": "exit 2"}.items():
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "a" / name).chmod(0o755)
    passed = find(shell, tmp_path, "/usr/bin/python3")[2]
    assert passed == ["/usr/bin/python3: only offers to install the command line tools"]


def test_an_environment_whose_packages_are_those_of_another_version(shell, tmp_path):
    """python3 is now 3.14, where it was 3.13 as the environment was made."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    assert find(shell, tmp_path, str(python))[0] == str(python)
    (own,) = (tmp_path / "env" / "lib").glob("python3.*")
    own.rename(own.with_name("python3.99"))
    [passed] = find(shell, tmp_path, str(python))[2]
    assert passed.endswith("and its packages are those of another version")
    python.unlink()
    python.symlink_to("/opt/homebrew/opt/python@3.12/bin/python3.12")
    assert find(shell, tmp_path, str(python)) == ("", "", [])
