"""`runs recover` without SSH: the other host is a second project folder on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import WhisperForConditionalGeneration

from distributed.plan.run_spec import CHECKPOINTS, RunSpec
from distributed.run_dir.summary import read_run
from distributed.ssh.machine import LocalMachine
from distributed.worker.train import keep_spec
from distributed.worker.whisper_wrapper import WhisperModelWrapper
from exogym.flat import FlatParameters
from exogym.state.checkpoint import Checkpoints
from exogym.strategy import DiLoCoConfig
from multimac.commands.recover import recover
from multimac.report.page import contents, write_report
from multimac.view.run_tables import next_commands
from whisper_tuner.config import Profile
from whisper_tuner.errors import RunError
from whisper_tuner.export.final import load_model
from whisper_tuner.model.base_model import load_base, prepare

BUNDLED = Path(__file__).parents[3] / "bundled" / "model"
RUN = "20251121-101010-mine"
BASE = ".multimac/models/small-1234"  # where a host keeps the model that it was sent


class Hosts:
    """Two project folders; what ranks leave in them is written by the code that ranks run."""

    def __init__(self, folder: Path):
        self.here, self.there = folder / "here", folder / "there"
        for project in (self.here, self.there):
            (project / "runs").mkdir(parents=True)
        (self.there / BASE).parent.mkdir(parents=True)
        (self.there / BASE).symlink_to(BUNDLED)
        self.said: list[str] = []

    def keep(
        self, project: Path, number: int, shift: float, *, method: str = "full", keep_best: str = ""
    ) -> torch.Tensor:
        """A checkpoint of weights that are the base's moved by `shift`; returns the flat of them.

        keep_best: those are the best ones, the last ones are others.
        """
        base = BASE if project == self.there else str(BUNDLED)
        profile = Profile(base_model=base, train=Path("clips.csv"), method=method, keep_best=keep_best)
        name = "mini" if project == self.there else "localhost"
        spec = RunSpec(run_id=RUN, run_dir=f"runs/{RUN}", cache_dir="c", world_size=2, hosts=("localhost", "mini"))
        spec = replace(spec, rank=int(project == self.there), profile=profile, strategy_settings=DiLoCoConfig())
        keep_spec(replace(spec, run_dir=str(project / spec.run_dir)))
        model, processor = load_base(BUNDLED)
        parameters = FlatParameters(WhisperModelWrapper(prepare(model, profile), processor, "cpu"))
        flat = parameters.read() + shift
        last, best = (flat + 1, flat) if keep_best else (flat, None)
        agreed = {"strategy": {"weights": last}, "best_weights": best, "now": {"best_at": 30}}
        Checkpoints(project / "runs" / RUN / CHECKPOINTS, name).save(number, {"agreed": agreed})
        return flat

    def recover(self, run: str = RUN) -> Path:
        machines = [(LocalMachine("laptop"), str(self.here)), (LocalMachine("mini"), str(self.there))]
        return recover(run, machines, self.here, self.said.append)


@pytest.fixture
def hosts(tmp_path, monkeypatch) -> Hosts:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return Hosts(tmp_path)


def flat_of(folder: Path, method: str = "full") -> torch.Tensor:
    model, processor = load_base(folder)
    profile = Profile(base_model=str(folder), train=Path("clips.csv"), method=method)
    return FlatParameters(WhisperModelWrapper(prepare(model, profile), processor, "cpu")).read()


def test_the_newest_checkpoint_of_any_host_becomes_a_model_that_transformers_loads(hosts):
    hosts.keep(hosts.here, 4, 0.1)
    newest = hosts.keep(hosts.there, 8, 0.2)
    final = hosts.recover()
    assert final == hosts.here / "runs" / RUN / "final"
    assert hosts.said == [f"mini: {RUN}, agreed 4 times"]
    assert torch.equal(flat_of(final), newest)
    run = read_run(final.parent)
    assert (run.state, run.model) == ("recovered", final) and "runs recover" in run.message
    assert any(line.startswith("multimac transcribe") for line in next_commands(run))
    assert "What was asked and what happened" in write_report(contents(final.parent)).read_text()
    plain = WhisperForConditionalGeneration.from_pretrained(final)
    assert plain.generate(torch.zeros(1, plain.config.num_mel_bins, 3000), max_new_tokens=2).ndim == 2


def test_the_best_weights_so_far_are_taken_where_they_were_kept(hosts):
    best = hosts.keep(hosts.there, 8, 0.2, keep_best="wer")
    assert torch.equal(flat_of(hosts.recover()), best)
    assert hosts.said[1] == "  of step 30, the best so far (keep_best = wer)"


def test_a_damaged_checkpoint_gives_way_to_the_next(hosts):
    older = hosts.keep(hosts.here, 4, 0.1)
    hosts.keep(hosts.there, 8, 0.2)
    weights = hosts.there / "runs" / RUN / CHECKPOINTS / "0000008" / "mini.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert torch.equal(flat_of(hosts.recover()), older)
    assert [line.split(",")[0] for line in hosts.said] == [f"mini: {RUN}", said_damage(hosts), f"laptop: {RUN}"]
    (hosts.here / "runs" / RUN / CHECKPOINTS / "0000004" / "localhost.json").write_text("{}")
    with pytest.raises(RunError, match="no host has a checkpoint"):
        hosts.recover()


def test_the_model_of_a_run_that_has_ended_is_not_replaced(hosts):
    """A host that slept at its end has kept a checkpoint of an earlier step."""
    hosts.keep(hosts.there, 8, 0.2)
    run = hosts.here / "runs" / RUN
    (run / "final").mkdir(parents=True)
    (run / "final" / "model.safetensors").write_text("trained")
    (run / "run.json").write_text("{")  # whatever became of it
    with pytest.raises(RunError, match=r"has a model: .*final\n"):
        hosts.recover()
    assert (run / "final" / "model.safetensors").read_text() == "trained"


def said_damage(hosts: Hosts) -> str:
    [said] = [line for line in hosts.said if "damaged" in line]
    return said


def test_an_adapter_is_recovered_with_the_base_that_the_host_was_sent(hosts):
    lora = hosts.keep(hosts.there, 2, 0.1, method="lora")
    final = hosts.recover("2025")
    load_model(final)  # and its base, which it names
    trained = torch.cat([weight.flatten() for weight in load_file(final / "adapter_model.safetensors").values()])
    assert trained.numel() == lora.numel() and (hosts.here / BASE / "config.json").is_file()
    torch.testing.assert_close(trained.sort().values, lora.sort().values, rtol=0, atol=0)


def test_which_run_is_meant_must_be_clear(hosts):
    hosts.keep(hosts.here, 2, 0.1)
    (hosts.here / "runs" / RUN).rename(hosts.here / "runs" / "20251120-101010-older")
    hosts.keep(hosts.here, 2, 0.1)
    with pytest.raises(RunError, match=f"2 runs begin with '2025'(.|\n)*{RUN}\n *20251120-101010-older"):
        hosts.recover("2025")
    with pytest.raises(RunError, match="there is no run '2024'"):
        hosts.recover("2024")
    assert hosts.recover("last").parent.name == RUN


def test_all_runs_of_the_hosts_are_named_where_none_is_meant(hosts):
    names = [f"20251120-1010{number}-older" for number in range(10, 25)]
    for name in names:
        folder = hosts.there / "runs" / name / CHECKPOINTS / "0000002"
        folder.mkdir(parents=True)
        (folder / "mini.json").touch()
    with pytest.raises(RunError) as caught:
        hosts.recover("2024")
    assert all(name in caught.value.remedy for name in names) and "runs list" not in caught.value.remedy
