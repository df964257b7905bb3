"""Each strategy from a config.ini on two ranks of this machine, as `demo` starts them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from saved_model import saved_digest
from small_run import end_runs
from waiting import wait_until

import cli_typer
from distributed.run_dir.folder import launcher_pid
from distributed.run_dir.log import read_events
from distributed.ssh.machine import LocalMachine
from exogym.flat import digest
from exogym.state.checkpoint import Checkpoints
from exogym.strategy import STRATEGIES
from multimac.commands.recover import recover
from multimac.commands.train import train_here
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.errors import ExitStatus
from whisper_tuner.eval.evaluation import GREEDY, evaluate
from whisper_tuner.export.final import load_model

SECTION = """
[distributed:mine]
base_profile = tiny
strategy = {strategy}
communication_interval = 2
{keys}
"""
KEYS = {
    "allreduce": "overlap = false\nbucket_mb = 0.1\ncheck_interval = 2",
    "diloco": "outer_momentum = 0.9\nnesterov = false\nouter_lr = 0.5",
    "parameter_server": "outer_optim = adam\nouter_lr = 1e-4",
    "fedavg": "island_size = 1\nmin_lr_ratio = 0.1",
    "sparta": "p_sparta = 0.1\ncompression_method = topk\nquantization_bits = 8",
    "demo": "compression_decay = 0.99\ncompression_topk = 8\ncompression_chunk = 32\ncheck_interval = 3",
    "pipeline": "wire = float32",
    "sparta_diloco": "sparta_interval = 3\ncompression_method = partitioned\nquantization_bits = 4",
}


@pytest.fixture
def config_of(folder):
    def write(strategy: str, more: str = "") -> Path:
        path = folder / "config.ini"
        keys = KEYS.get(strategy, "")
        path.write_text(path.read_text() + SECTION.format(strategy=strategy, keys=f"{keys}\n{more}"))
        return path

    yield write
    end_runs(folder)


def events_of(run: Path, kind: str) -> list[dict]:
    return [event for event in read_events(run / "events.jsonl")[0] if event["type"] == kind]


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "pipeline"]
)
def test_two_local_ranks_end_with_one_model(config_of, folder, strategy, capsys):
    assert train_here(config_of(strategy), "mine", ranks=2) == ExitStatus.OK
    [run] = folder.glob("runs/*")
    assert [event["digest"] for event in events_of(run, "done")] == [saved_digest(run)] * 2
    assert {event["when"] for event in events_of(run, "evaluation")} == {"before", "after"}
    assert not events_of(run, "warning") and not (run / "checkpoints").exists()
    assert "WER after" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("by", ["true", "wer"])
def test_a_run_ends_early_and_leaves_the_best_model(config_of, folder, capsys, by):
    """So large a learning rate that the loss soon rises."""
    more = f"epochs = 30\nlearning_rate = 0.05\nearly_stopping = 2\nkeep_best = {by}"
    assert train_here(config_of("allreduce", more), "mine", ranks=2) == ExitStatus.OK
    [run] = folder.glob("runs/*")
    told = {event["step"]: event for event in events_of(run, "validation")}
    order = {step: (event.get("score", 0.0), event["loss"]) for step, event in told.items()}
    best, steps = min(order, key=order.get), list(order)
    assert steps.index(best) == len(steps) - 3 and len(steps) < 30
    assert [event["digest"] for event in events_of(run, "done")] == [saved_digest(run)] * 2
    assert [event["best_step"] for event in events_of(run, "best")] == [best] * 2
    said = capsys.readouterr().out
    assert said.count("(early_stopping)") == said.count("(keep_best)") == 1
    heard = f", WER {100 * told[best]['score']:.1f}" if by == "wer" else ""
    assert f"the model is that of step {best}, validation loss {told[best]['loss']:.3f}{heard} (keep_best)" in said
    if by == "wer":  # as `evaluate` finds
        model, processor = load_model(run / "final")
        clips = load_manifest(run / "validation.csv").samples
        found = evaluate(model, processor, clips, temperatures=GREEDY).normalized
        assert told[best]["score"] == pytest.approx(found.wer)


@pytest.mark.slow
def test_what_one_rank_kept_of_a_strategy_whose_ranks_differ_becomes_a_model(config_of, folder):
    """Islands of one: nobody ever averages."""
    config = config_of("fedavg", "epochs = 500\ncheckpoint_interval = 1")
    assert train_here(config, "mine", ranks=2, detach=True) == ExitStatus.OK
    [run] = folder.glob("runs/*")
    wait_until(lambda: len(events_of(run, "checkpoint")) >= 4, 120)
    os.kill(launcher_pid(run), signal.SIGKILL)
    wait_until(lambda: launcher_pid(run) is None, 30)
    wait_until(lambda: not any(run.name in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])), 60)
    final = recover(run.name, [(LocalMachine(), str(folder))], folder, print)
    kept = [Checkpoints(run / "checkpoints", path.stem) for path in (run / "checkpoints").glob("*/*.json")]
    weights = [one.load(number)["agreed"]["strategy"]["weights"] for one in kept for number in one.numbers()]
    digests = {digest(flat) for flat in weights}
    assert len(digests) > 1 and saved_digest(final.parent) in digests
    assert all(torch.isfinite(flat).all() for flat in weights)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_key_is_explained_and_a_misspelt_one_is_refused_with_its_place(config_of, strategy, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config = config_of(strategy)
    assert cli_typer.main(["config", "show", "mine", "--config", str(config)]) == ExitStatus.OK
    rows = capsys.readouterr().out.splitlines()
    for line in KEYS.get(strategy, "").splitlines():
        key, _ = line.split(" = ")
        assert any(key in row and "config.ini:" in row for row in rows), key
    lines = config.read_text().splitlines()
    config.write_text("\n".join([*lines, "min_lr_ration = 0.1"]))
    assert cli_typer.main(["config", "show", "mine", "--config", str(config)]) == ExitStatus.CONFIG
    told = capsys.readouterr().err
    assert f"config.ini:{len(lines) + 1}" in told and "did you mean 'min_lr_ratio'" in told and strategy in told
