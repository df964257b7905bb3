"""Who may import whom, and what must not be loaded for a quick answer."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
FORBIDDEN = {
    "whisper_tuner": {"exogym", "distributed", "cli_typer", "wizard", "lab"},
    "gym/exogym": {"whisper_tuner", "distributed", "cli_typer", "wizard", "lab"},
    "distributed": {"cli_typer", "wizard", "lab"},
    "lab": {"whisper_tuner", "exogym", "distributed", "cli_typer", "wizard"},
}


def imported(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package):
    for path in (PROJECT / package).rglob("*.py"):
        assert not imported(path) & FORBIDDEN[package], path


def test_paramiko_is_imported_in_one_file():
    found = [path for path in PROJECT.glob("*/**/*.py") if ".venv" not in path.parts and "tests" not in path.parts]
    assert [path.name for path in found if "paramiko" in imported(path)] == ["remote.py"]


def test_only_the_users_own_model_is_unpickled():
    """bundle.py checks a hash first; local_nodes.py reads what its own parent process wrote into a private folder."""
    modules = r"^\s*(import|from) (pickle|cloudpickle|marshal|shelve|dill)\b"
    pickles = re.compile(modules + "|weights_only=False|_object_list|gather_object")
    folders = [PROJECT / folder for folder in ("distributed", "gym/exogym", "whisper_tuner")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = {path.name for path in files if any(map(pickles.search, path.read_text(encoding="utf-8").splitlines()))}
    assert found == {"bundle.py", "local_nodes.py"}


def test_gym_is_a_folder_and_no_package():
    assert not (PROJECT / "gym" / "__init__.py").exists()


@pytest.mark.parametrize("command", [["--help"], ["distributed-train", "--help"], ["config", "show", "demo-diloco"]])
def test_quick_commands_do_not_load_torch(command):
    watch = (
        "import sys, cli_typer; cli_typer.main(sys.argv[1:]); print({'torch', 'paramiko', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", watch, *command], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stdout + done.stderr
