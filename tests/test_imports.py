"""Who may import whom: every folder has a layer, imports run down, and there is no cycle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
ROOTS = {"cli_typer": ".", "wizard": ".", "multimac": ".", "distributed": ".", "whisper_tuner": ".", "exogym": "gym"}

# From the top. A module may import from its own package and from lower layers, not from another package of its layer.
# A package is a folder; modules of `exogym` itself that its folders need are named, and live further down.
LAYERS = [
    ["wizard"],
    ["cli_typer"],
    ["multimac.wizard"],
    ["multimac.commands"],
    ["multimac.report"],
    ["multimac.view"],
    ["multimac"],
    ["distributed", "distributed.checkup.doctor", "distributed.checkup.probes", "distributed.checkup.selftest"],
    ["distributed.worker", "distributed.launcher", "distributed.checkup"],
    ["distributed.plan", "distributed.hosts.agent"],
    ["distributed.hosts"],
    ["distributed.ssh", "distributed.run_dir", "distributed.control"],
    ["exogym", "whisper_tuner.eval"],
    ["exogym.local", "exogym.rounds", "whisper_tuner.export"],
    ["exogym.state", "exogym.settings", "exogym.micro_batches", "whisper_tuner.model"],
    ["exogym.strategy", "whisper_tuner.data.checks"],
    ["exogym.samplers", "whisper_tuner.data"],
    ["exogym.comm", "whisper_tuner.data.formats"],
    ["exogym.membership", "exogym.logger", "whisper_tuner.data.problems", "whisper_tuner.data.timed_text"],
    ["exogym.device", "exogym.flat", "whisper_tuner"],
    ["exogym.config"],
    ["exogym.errors"],
]
LAYER = {package: -number for number, packages in enumerate(LAYERS) for package in packages}


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
    """Names of the product's modules that one imports, anywhere in its file; not those for type checkers only."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unreal = {id(node) for test in ast.walk(tree) if is_for_types(test) for node in ast.walk(test)}
    for node in ast.walk(tree):
        if id(node) in unreal:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                if whole in known or module in known:
                    yield whole if whole in known else module


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def package_of(name: str, path: Path) -> str:
    return name if name in LAYER or path.name == "__init__.py" else name.rpartition(".")[0]


def wrong(root: Path) -> list[str]:
    """What breaks the rules of the layers, in words."""
    known = modules(root)
    found = [
        f"{name}: its folder is in no layer" for name, path in known.items() if package_of(name, path) not in LAYER
    ]
    graph = {name: set(imports(name, path, known)) - {name} for name, path in known.items()}
    for name, targets in graph.items():
        here = package_of(name, known[name])
        for target in sorted(targets):
            there = package_of(target, known[target])
            if here != there and {here, there} <= set(LAYER) and LAYER[there] >= LAYER[here]:
                found.append(f"{name} imports {target}, which is not on a lower layer")
    try:
        TopologicalSorter(graph).prepare()
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
            "from distributed.ssh import host\n",
            "log imports distributed.ssh.host",
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
    """Its hash is checked first; local_nodes.py reads what its own parent process wrote into a private folder."""
    pickling = re.compile("weights_only=False|_object_list|gather_object")
    found = importers("pickle|cloudpickle|marshal|shelve|dill")
    found |= {name for name, path in modules(PROJECT).items() if pickling.search(path.read_text(encoding="utf-8"))}
    assert found == {"distributed.fit", "distributed.worker.load", "exogym.local.nodes"}


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
