"""The test set of a run is transcribed by all of its hosts: the same texts as by one, whatever becomes of others."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from distributed.hosts.host_process import environment
from whisper_tuner.data.dataset import load_manifest, write_manifest

pytestmark = [pytest.mark.lab, pytest.mark.slow]
PROJECT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "evaluate_slowly.py"
DECODER = "distributed.worker.decode"
CHECK = Path(__file__).parent / "check_slowly.py"
CLIPS = 20
TEXT = """
[distributed:lora]
base_profile = tiny
test = {test}
language = en
shares = fixed
method = lora
lora_r = 4
batch_size = 2
max_steps = 2
"""


class Evaluation:
    """One of evaluate_slowly.py on h1."""

    def __init__(self, runner, cache: Path, seconds: float, *alone: str):
        self._runner, self._lines = runner, []
        command = [sys.executable, str(SCRIPT), str(runner.run_dir), str(cache), str(seconds), *alone]
        variables = [f"{name}={value}" for name, value in environment(PROJECT).items()]
        self.process = runner.lab.popen("h1", ["env", *variables, *command], cwd=str(PROJECT))

    def wait(self) -> list[dict]:
        out, err = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, out + err
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def decoders(self, *hosts: str) -> int:
        return sum(len(self._runner.lab.processes(host, DECODER)) for host in hosts)


@pytest.fixture(scope="module")
def trained(runner_in, tmp_path_factory):
    runner = runner_in(tmp_path_factory.mktemp("trained"))
    bundled = load_manifest(PROJECT / "bundled" / "data" / "test.csv").samples
    write_manifest(runner.folder / "test.csv", bundled[:CLIPS])
    runner.run("lora", "h2", "h3", text=TEXT.format(test=runner.folder / "test.csv"))
    return runner


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory):
    """What one machine hears, and its figures."""
    events = Evaluation(trained, tmp_path_factory.mktemp("alone"), 0, "alone").wait()
    return heard(trained), figures(events)


def heard(runner) -> dict[str, list]:
    found = {}
    for path in sorted(runner.run_dir.glob("evaluation/test/*/predictions.csv")):
        with path.open(newline="") as file:
            found[path.parent.name] = list(csv.DictReader(file))
    return found


def figures(events: list[dict]) -> list[tuple]:
    return [(e["when"], e["wer"], e["cer"], e["clips"]) for e in events if e["type"] == "evaluation"]


def clips_of(events: list[dict]) -> list[dict]:
    return [event.get("clips_of", {}) for event in events if event["type"] == "evaluation"]


def test_all_hosts_transcribe_and_the_texts_are_those_of_one(trained, alone, tmp_path):
    evaluation = Evaluation(trained, tmp_path, 1.5)
    events = evaluation.wait()
    assert (heard(trained), figures(events)) == alone
    before, after = clips_of(events)
    everyone = {trained.lab[name].address for name in ("h1", "h2", "h3")}
    assert set(before) | set(after) == everyone and sum(before.values()) == sum(after.values()) == CLIPS
    assert not [event for event in events if event["type"] == "warning"]
    assert evaluation.decoders("h1", "h2", "h3") == 0
    for name in ("h2", "h3"):
        home = Path(trained.lab[name].home)
        assert not list((home / f"project-{name}" / ".multimac").glob("evaluated/*"))


@pytest.mark.parametrize("fault", ["killed", "frozen", "cut off"])
def test_a_host_that_is_lost_meanwhile_costs_no_clip(trained, alone, tmp_path, fault):
    lab = trained.lab
    evaluation = Evaluation(trained, tmp_path, 1.5)
    wait_until(lambda: evaluation.decoders("h2") == 1, 60)
    try:
        if fault == "cut off":
            lab.link("h2", up=False)
        else:
            (lab.kill if fault == "killed" else lab.freeze)("h2", DECODER)
        events = evaluation.wait()
        assert (heard(trained), figures(events)) == alone
        if fault == "killed":
            assert any(e["type"] == "warning" and "transcribes no more clips" in e["what"] for e in events)
    finally:
        lab.link("h2", up=True)
    wait_until(lambda: evaluation.decoders("h2", "h3") == 0, 40)


def test_a_stop_ends_all_decoders(trained, tmp_path):
    evaluation = Evaluation(trained, tmp_path, 3)
    wait_until(lambda: evaluation.decoders("h2", "h3") == 2, 60)
    evaluation.process.kill()
    wait_until(lambda: evaluation.decoders("h2", "h3") == 0, 40)


class Check:
    """`data check` of the test clips on h1, with the base model or the trained adapter."""

    def __init__(self, trained, folder: Path):
        self._trained, self._folder = trained, folder

    def run(self, model: Path, seconds: float, *hosts: str) -> tuple[str, str]:
        """Its report without the time, and what it printed."""
        name = f"{model.name}-{'-'.join(hosts) or 'alone'}"
        store, out = self._folder / f"{name}-store", self._folder / name
        asked = [str(store), str(seconds), str(self._trained.folder / "test.csv"), str(model), str(out)]
        asked += [str(self._trained.hosts(*hosts))] if hosts else []
        variables = [f"{key}={value}" for key, value in environment(PROJECT).items()]
        command = ["env", *variables, sys.executable, str(CHECK), *asked]
        done = self._trained.lab.exec("h1", command, cwd=str(PROJECT), timeout=240)
        assert done.returncode in (0, 4), done.stdout + done.stderr
        page = re.sub(r"Written at .*? by", "", (out / "report.html").read_text())
        return page, done.stdout


@pytest.mark.parametrize("model", ["base", "adapter"])
def test_data_check_hears_on_all_hosts_what_one_hears(trained, tmp_path, model):
    path = PROJECT / "bundled" / "model" if model == "base" else trained.run_dir / "final"
    check = Check(trained, tmp_path)
    page, _ = check.run(path, 0)
    with_hosts, said = check.run(path, 6, "h2", "h3")
    assert with_hosts == page
    addresses = [trained.lab[name].address for name in ("h2", "h3")]
    assert "Tokens were not counted" not in said
    assert "clips by: this machine" in said and any(address in said for address in addresses)
    for name in ("h2", "h3"):
        assert not trained.lab.processes(name, DECODER)
        assert not list((Path(trained.lab[name].home) / f"project-{name}" / ".multimac").glob("evaluated/*"))


def test_data_check_goes_on_without_a_host_that_cannot_help(trained, tmp_path):
    trained.names["h3"] = "10.77.0.99"  # nobody
    try:
        page, said = Check(trained, tmp_path).run(PROJECT / "bundled" / "model", 6, "h2", "h3")
    finally:
        del trained.names["h3"]
    assert "10.77.0.99: transcribes no more clips" in said and page
