"""Who may import whom: every folder has a layer, imports run down, and there is no cycle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
ROOTS = {"cli_typer": ".", "wizard": ".", "multimac": ".", "distributed": ".", "whisper_tuner": ".", "exogym": "gym"}

# From the top. A module may import from its own layer and from lower ones. Nothing imports in a circle, neither modules
# nor folders, not even for type checkers only. A flat module of a package in ROOTS counts as a folder of its own: some
# stand below the others (`exogym.config`), some on top of all (`exogym.trainer`).
LAYERS = {
    "what is typed": ["cli_typer", "wizard"],
    "what a person sees": [
        "multimac",
        "multimac.commands",
        "multimac.report",
        "multimac.view",
        "multimac.watch",
        "multimac.wizard",
    ],
    "all together": [
        "distributed",
        "distributed.checkup.doctor",
        "distributed.checkup.probes",
        "distributed.checkup.selftest",
    ],
    "a run": ["distributed.checkup", "distributed.launcher", "distributed.worker"],
    "its plan": ["distributed.plan"],
    "its hosts": ["distributed.hosts", "distributed.hosts.agent"],
    "its connections and its folder": ["distributed.control", "distributed.run_dir", "distributed.ssh"],
    "Whisper's texts": ["whisper_tuner.eval", "whisper_tuner.export"],
    "Whisper and its data": [
        "whisper_tuner",
        "whisper_tuner.data",
        "whisper_tuner.data.checks",
        "whisper_tuner.data.formats",
        "whisper_tuner.model",
    ],
    "the loop": ["exogym", "exogym.rounds"],
    "its methods": ["exogym.samplers", "exogym.state", "exogym.strategy"],
    "its group": [
        "exogym.comm",
        "exogym.config",
        "exogym.device",
        "exogym.errors",
        "exogym.flat",
        "exogym.logger",
        "exogym.membership",
    ],
}
LAYER = {package: -number for number, packages in enumerate(LAYERS.values()) for package in packages}


def modules(root: Path) -> dict[str, Path]:
    """Name and file of every module of the product below `root`."""
    found = {}
    for name, folder in ROOTS.items():
        base = root / folder
        paths = [base / f"{name}.py"] if (base / f"{name}.py").is_file() else sorted((base / name).rglob("*.py"))
        for path in paths:
            found[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the names of the product's modules that one imports, anywhere in its file, also for type checkers only."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                if whole in known or module in known:
                    yield whole if whole in known else module


def folder_of(name: str, path: Path) -> str:
    """Return the folder of a module; a flat module of one of ROOTS is one of its own."""
    return name if path.name == "__init__.py" or name.count(".") < 2 else name.rpartition(".")[0]


def layer_of(name: str, path: Path) -> int | None:
    """Return the layer of a module: its own where LAYERS names it, else its folder's; a flat one's is its package's."""
    folder = folder_of(name, path)
    return LAYER.get(name, LAYER.get(folder, LAYER.get(name.split(".")[0]) if folder == name else None))


def wrong(root: Path) -> list[str]:
    """Return what breaks the rules of the layers, in words."""
    known = modules(root)
    layers = {name: layer_of(name, path) for name, path in known.items()}
    found = [f"{name}: its folder is in no layer" for name, layer in layers.items() if layer is None]
    graph = {name: set(imports(name, path, known)) - {name} for name, path in known.items()}
    folders = defaultdict(set)
    for name, targets in graph.items():
        here = folder_of(name, known[name])
        for target in sorted(targets):
            folders[here] |= {folder_of(target, known[target])} - {here}
            if None not in (layers[name], layers[target]) and layers[target] > layers[name]:
                found.append(f"{name} imports {target}, which is on a higher layer")
    for edges in (graph, folders):
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            found.append("a cycle: " + " -> ".join(error.args[1]))
    return found


def test_imports_run_down():
    assert wrong(PROJECT) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        (
            "whisper_tuner/text.py",
            "from distributed.plan import job\n",
            "whisper_tuner.text imports distributed.plan.job",
        ),
        (
            "distributed/ssh/host.py",
            "def f():\n    from ..hosts import sync\n",
            "ssh.host imports distributed.hosts.sync",
        ),
        (
            "distributed/run_dir/log.py",
            "from distributed.hosts import sync\n",
            "log imports distributed.hosts.sync",
        ),
        ("distributed/plan/a.py", "from .b import x\n", "a cycle: distributed.plan.a"),
        ("distributed/attic/a.py", "", "distributed.attic.a: its folder is in no layer"),
    ],
)
def test_what_breaks_the_rules_is_found(tmp_path, file, text, complaint):
    extra = {"distributed/plan/b.py": "from . import a\n"} if "cycle" in complaint else {}
    for name in ("plan/job", "hosts/sync", "ssh/host"):
        extra.setdefault(f"distributed/{name}.py", "")
    for path, content in {**extra, file: text}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert any(complaint in each for each in wrong(tmp_path))


def test_whisper_tuner_takes_only_settings_from_exogym():
    known = modules(PROJECT)
    imported = {each for name, path in known.items() for each in imports(name, path, known) if "whisper_tuner" in name}
    assert {name for name in imported if name.startswith("exogym")} == {"exogym.config"}


def test_every_folder_is_installed():
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(settings["packages"]) == {n for n, path in modules(PROJECT).items() if path.name == "__init__.py"}


def importers(package: str) -> set[str]:
    pattern = re.compile(rf"^\s*(import|from) ({package})\b", re.MULTILINE)
    return {name for name, path in modules(PROJECT).items() if pattern.search(path.read_text(encoding="utf-8"))}


def test_paramiko_stays_in_its_room():
    assert {name.rpartition(".")[0] for name in importers("paramiko")} == {"distributed.ssh"}


def test_the_lab_stays_in_tests():
    assert not importers("lab|tests|benchmarks|tools")


def test_only_the_users_own_model_is_unpickled():
    """Its hash is checked first; nodes.py reads what its own parent process wrote into a private folder."""
    pickling = re.compile("weights_only=False|_object_list|gather_object")
    found = importers("pickle|cloudpickle|marshal|shelve|dill")
    found |= {name for name, path in modules(PROJECT).items() if pickling.search(path.read_text(encoding="utf-8"))}
    assert found == {"distributed.fit", "distributed.worker.load", "exogym.nodes"}


def test_gym_is_a_folder_and_no_package():
    assert not (PROJECT / "gym" / "__init__.py").exists()


def test_old_names_of_public_classes():
    from distributed import fit, network_trainer, whisper_wrapper
    from distributed.worker import whisper_wrapper as new

    assert network_trainer.NetworkTrainer is fit.NetworkTrainer
    assert whisper_wrapper.WhisperModelWrapper is new.WhisperModelWrapper


@pytest.mark.parametrize("command", [["--help"], ["distributed-train", "--help"], ["config", "show", "demo-diloco"]])
def test_quick_commands_do_not_load_torch(command):
    watch = (
        "import sys, cli_typer; cli_typer.main(sys.argv[1:]); print({'torch', 'paramiko', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", watch, *command], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stdout + done.stderr
