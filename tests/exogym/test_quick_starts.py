"""gym/README.md: its Python runs as written, its tables are complete, and it has every quick start that was promised.

What is trained is real: handwritten digits, in processes of their own.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exogym_toys import run_threads, train_node

from exogym import AllReduceStrategy, ElasticSampler, FitSettings, LocalTrainer, Strategy
from exogym.samplers.batches import DatasetSamples

PROJECT = Path(__file__).parents[2]
README = (PROJECT / "gym" / "README.md").read_text(encoding="utf-8")
SETUP, *BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
FIRST = next(block for block in BLOCKS if "final_model" in block)
LOGGED = next(block for block in BLOCKS if "WandbLogger(" in block)
SCRIPTS = [block for block in BLOCKS if block.startswith("# train.py")]
OTHERS = [block for block in BLOCKS if block not in (FIRST, LOGGED, *SCRIPTS)]

QUICK_STARTS = """
from exogym import LocalTrainer
from exogym.strategy import (Strategy, AllReduceStrategy, SimpleReduceStrategy, DiLoCoStrategy, FedAvgStrategy, SPARTAStrategy,
                             SPARTADiLoCoStrategy, DeMoStrategy, CommunicateOptimizeStrategy, OptimSpec)
from exogym.strategy.sparta import SparseCommunicator
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.logger import WandbLogger, CSVLogger

trainer = LocalTrainer(model, train_dataset, val_dataset)
final_model = trainer.fit(strategy=DiLoCoStrategy(inner_optim='adamw', outer_optim='sgd', H=100, lr=3e-4), num_nodes=4, num_epochs=10, batch_size=32, device='cpu')
trainer.fit(strategy=DiLoCoStrategy(inner_optim='adam', H=100), num_nodes=4, device='cpu')
DiLoCoStrategy(H=50)
DiLoCoStrategy(inner_optim='adamw', outer_optim='sgd', H=200, inner_lr=1e-4, outer_lr=0.5, max_norm=1.0, lr_scheduler='cosine', warmup_steps=1000)
FedAvgStrategy(inner_optim='sgd', island_size=4, H=5, lr=0.01)            # num_nodes=16
FedAvgStrategy(inner_optim=OptimSpec(torch.optim.SGD, lr=0.05), H=5)
SPARTAStrategy(p_sparta=0.001, inner_optim='adamw', lr=1e-4)
SPARTAStrategy(p_sparta=0.005, compression_method='topk', quantization_bits=8)
DeMoStrategy(compression_decay=0.999, compression_topk=32, compression_chunk=64, weight_decay=1e-4)
CommunicateOptimizeStrategy(communication_modules=[SparseCommunicator(sparsification_rate=0.01), AveragingCommunicator(island_size=4)], inner_optim='adamw')
trainer.fit(strategy=strategy, logger=WandbLogger(project='p', experiment_name='e'), log_interval=50)
trainer.fit(strategy=strategy, batch_size=32, gradient_accumulation=4, max_memory_usage=0.8)
LocalTrainer(model=model, train_dataset=dataset_factory, val_dataset=val_dataset)   # factory(rank, num_nodes, train_dataset)
"""  # noqa: E501


def lines_of(text: str) -> list[str]:
    return [ast.unparse(node) for node in ast.parse(text).body]


BUILT = [line for line in lines_of(QUICK_STARTS) if re.match(r"\w+Strategy\(", line)]
ISLANDS = next(line for line in BUILT if "island_size=4, H=5" in line)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What somebody has who has typed in the first block: a namespace, in an empty folder, without W&B's server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    names = {"__name__": "__main__"}
    torch.manual_seed(0)
    exec(SETUP, names)
    yield names
    if dist.is_initialized():
        dist.destroy_process_group()


def strategy_of(line: str, names: dict[str, Any]) -> Strategy:
    imports = [node for node in ast.parse(QUICK_STARTS).body if isinstance(node, ast.ImportFrom)]
    exec(ast.unparse(ast.Module(imports, [])), names)
    return eval(line, names)


@pytest.mark.parametrize(
    "block",
    [*OTHERS[:1], *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS[1:])],
    ids=lambda block: ast.unparse(ast.parse(block).body[-1])[:40],
)
def test_a_block_of_the_readme_runs(block, reader):
    exec(block, reader)


def test_the_first_training(reader):
    exec(FIRST, reader)
    trainer, model = reader["trainer"], reader["final_model"]
    assert model is reader["model"] and trainer.result.steps == 120 and trainer.result.rounds == 2
    assert len({result.digest for result in trainer.results}) == 1
    assert trainer.result.val_loss < 2.2


def test_the_logger_leaves_an_offline_run(reader, tmp_path):
    exec(LOGGED, reader)
    assert list(tmp_path.glob("wandb/offline-run-*"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_the_readme_runs_in_two_processes(script, tmp_path):
    # One write, which the other process's cannot come into.
    line = "{group.rank} {group.world_size} {weights[0, 0].item()} {len(everybody)}\\n"
    show = f'import os\nos.write(1, f"{line}".encode())'
    (tmp_path / "train.py").write_text(f"{script}\n{show}\n", encoding="utf-8")
    command = [sys.executable, "-m", "exogym.launch", "train.py", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "gym")}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert sorted(shown.splitlines()) == ["0 2 0.5 2", "1 2 0.5 2"]


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in BUILT if line != ISLANDS])
def test_each_strategy_of_the_quick_starts_trains(line, reader):
    strategy = strategy_of(line, reader)
    trainer = LocalTrainer(reader["model"], reader["train_dataset"], reader["val_dataset"])
    trainer.fit(strategy=strategy, num_nodes=2, max_steps=12, batch_size=32, device="cpu")
    assert len({result.digest for result in trainer.results}) == 1
    assert trainer.result.bytes_sent > 0 and trainer.result.val_loss < 2.4


def test_islands_of_sixteen_nodes_train_in_threads(reader):
    """As threads of this process, since 16 processes take minutes on a small machine."""

    strategies = [strategy_of(ISLANDS, dict(reader)) for _ in range(16)]

    def rank(comm):
        samples = DatasetSamples(reader["train_dataset"], batch_size=8, minibatch_size=8)
        train = ElasticSampler(samples, comm.members, comm.members[comm.rank])
        model = reader["Digits"]()
        return train_node(model, comm, strategies[comm.rank], train, max_steps=10).run()

    results = run_threads(16, rank)
    assert len({result.digest for result in results}) == 1 and {result.rounds for result in results} == {2}


def test_the_readme_has_every_quick_start():
    shown = {line for block in BLOCKS for line in lines_of(block)}
    # In the README some stand with the name that they are given, or beside the names that they need.
    whole = "\n".join(shown)
    assert not [line for line in lines_of(QUICK_STARTS) if line not in shown and line not in whole]


def test_the_readme_has_all_that_fit_takes():
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", README[README.index("## What fit takes") :], re.MULTILINE))
    defaults = {f.name: "" if f.default is MISSING else f.default for f in fields(FitSettings)}
    del defaults["precision"]
    defaults |= {"autocast": False, "logger": None, "log_interval": None, "should_stop": ""}
    defaults["num_epochs"] = FitSettings(strategy=AllReduceStrategy()).num_epochs
    expected = {name: f"{value:g}" if type(value) is float else str(value) for name, value in defaults.items()}
    assert {name: table.get(name) for name in expected} == expected


def test_the_readme_has_all_files():
    cells = re.findall(r"^\| (`[\w/.`, ]+) \|", README, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+(?:\.py|/))`", cell)}
    found = set()
    for folder in ("exogym", "example"):
        items = [item for item in (PROJECT / "gym" / folder).iterdir() if not item.name.startswith("__")]
        found |= {item.name + "/" * item.is_dir() for item in items if item.is_dir() or item.suffix == ".py"}
    shared = {"comparison.py"}  # what the examples share, no script
    assert named == found - shared
