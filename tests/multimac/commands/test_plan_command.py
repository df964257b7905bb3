"""`multimac plan`, the run that it has planned, and the plan after it; and what it says of several hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_run import PAIR, folder, job, run_dir

import cli_typer
from distributed.checkup.links import Pair
from distributed.plan import forecast
from distributed.plan.forecast import Speed
from distributed.plan.job import Job
from multimac.commands import plan
from multimac.view.terminal import Console
from whisper_tuner.fact_store import FactStore

__all__ = ["folder", "job", "run_dir"]


@pytest.fixture(autouse=True)
def _facts(monkeypatch, tmp_path):
    monkeypatch.setattr(forecast, "FACTS", FactStore(tmp_path / "facts"))


@pytest.mark.slow
def test_a_plan_is_compared_with_the_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    def said(*words: str) -> str:
        assert cli_typer.main([*words]) == 0
        return " ".join(capsys.readouterr().out.split())

    planned = said("plan", "tiny")
    assert "measuring" in planned and planned.endswith("multimac finetune tiny")
    again = json.loads(said("plan", "tiny", "--json"))  # what is measured is remembered
    parts = again["ways"][0]["forecast"]["parts"]
    assert min(parts.values()) > 0 and sum(parts.values()) == pytest.approx(again["ways"][0]["seconds"])
    assert not list(folder.glob("runs/*"))
    assert "by steps that were measured, it will take about" in said("finetune", "tiny")
    [run] = folder.glob("runs/*")
    assert re.search(
        r"start to end +\d+:\d\d; predicted \d+:\d\d, \d+% too (long|short)", said("runs", "show", run.name)
    )
    assert "from its start to its end" in (run / "report.html").read_text()


def known(mbit: float) -> plan.Known:
    return plan.Known(
        speeds=[Speed(host=h.address, sizes=[[1, 1.0], [2, 1.6]], trainable=10**6, start_s=1.0) for h in PAIR.all],
        pairs=[Pair(source="127.0.0.1", target="twin", mbit=mbit, latency_s=0.001, failed=None)],
        copying_s={"twin": 0.5},
        before_s=3.0,
        checking_s=2.0,
        spare_bytes=None,
        memory=["", ""],
    )


@pytest.mark.parametrize(
    ("mbit", "clips", "best", "held"),
    [
        (1.0, 400, "multimac finetune pair", "the link 127.0.0.1-twin"),
        (10_000.0, 400, "multimac distributed-train pair --hosts h.json", "'s 1.00 s a step"),
        (10_000.0, 4, "multimac finetune pair", "starting"),
    ],
)
def test_it_says_what_to_type_and_what_holds_two_hosts_back(job: Job, mbit, clips, best, held, capsys):
    job = job.with_profile(epochs=1, test=None)
    ways = list(plan._ways(job, PAIR, known(mbit), {"train": clips}, Path("h.json"), ""))
    assert [way.forecast.strategy for way in ways] == ["", "diloco", "allreduce"]
    assert ways[0].speed_up == 1.0 and ways[2].command.endswith(" --set strategy=allreduce")
    found = plan._best(ways)
    assert found.command == best
    assert held in ways[2 if "link" in held else 1].held_back_by
    plan._show(Console(width=80), job, known(mbit), ways, found)
    lines = capsys.readouterr().out.splitlines()
    assert [f"exchange: {name}" in " ".join(lines) for name in ("diloco", "allreduce")] == [True, True]
    plan._show(Console(width=80), job, known(mbit), ways[:2], ways[0])  # a profile with settings of its own strategy
    assert capsys.readouterr().out.count("exchange: ") == 1
    assert max(len(line) for line in lines) <= 80 and lines[-1].strip() == best
