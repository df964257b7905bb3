"""run.json: what was asked, written and read again; also as an earlier version wrote it."""

import dataclasses
import json
from pathlib import Path

import pytest
from small_run import PROJECT

from distributed.plan.launch import Launch
from distributed.plan.prepare import rehost
from distributed.run_dir.summary import read_run
from distributed.ssh.host import Hosts
from exogym.config import DiLoCoConfig
from whisper_tuner.errors import RunError

OLD = Path(__file__).with_name("run-of-version-0.1.json").read_text()


@pytest.fixture
def old_run(folder, run_dir, prepared) -> Path:
    """run.json of version 0.1, with the lists of clips that this version has written: they are alike."""
    text = OLD
    for name, path in {"run_dir": run_dir, "folder": folder, "project": PROJECT}.items():
        text = text.replace(f"{{{name}}}", str(path))
    (run_dir / "run.json").write_text(text)
    return run_dir


def test_what_is_saved_is_read_again(run_dir, prepared):
    assert Launch.load(run_dir) == prepared.launch


def test_a_run_of_version_0_1_can_be_read(old_run):
    master, mini = (rank.spec for rank in Launch.load(old_run).ranks)
    assert master.strategy_settings == DiLoCoConfig(
        lr=1e-5, weight_decay=0.01, max_norm=1.0, schedule="cosine", warmup_steps=8, H=10
    )
    assert (master.profile.checkpoint_interval, master.profile.keep_checkpoints) == (1, 2)
    assert (master.profile.train, mini.wanted_device, mini.interface) == (old_run / "train.csv", "cpu", "en7")


def test_a_run_of_version_0_1_goes_on(old_run):
    launch = Launch.load(old_run)
    hosts = Hosts(master=launch.master, workers=(launch.ranks[1].host,))
    again, items = rehost(launch, hosts, old_run, (1, 1))
    master, mini = (rank.spec for rank in again.ranks)
    assert master == launch.ranks[0].spec
    assert mini.profile.train.parts[-1] == "train.csv" and mini.wanted_device == "cpu" and items["mini.local"]
    assert again.ranks[1].host == launch.ranks[1].host
    again.save(old_run)
    assert Launch.load(old_run) == again


def test_a_run_of_version_0_1_is_shown(old_run):
    settings = read_run(old_run).settings
    assert (settings["strategy"], settings["diloco: H"]) == ("diloco", 10)


def test_settings_that_were_not_made_are_not_shown(run_dir, prepared):
    settings = read_run(run_dir).settings
    assert settings["diloco: H"] == 2 and "diloco: outer_lr" not in settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": []}, "'ranks' is empty"),
        ({"min_hosts": "1"}, "min_hosts: expected int, found str"),
        ({"gpu": 1}, "unknown key 'gpu'"),
        ({"timeout_s": 10**400}, "timeout_s: a number of 401 digits"),
    ],
)
def test_a_damaged_run_is_refused_by_file_and_key(run_dir, prepared, change, words):
    data = json.loads((run_dir / "run.json").read_text()) | change
    (run_dir / "run.json").write_text(json.dumps(data))
    with pytest.raises(RunError, match=words) as caught:
        Launch.load(run_dir)
    assert str(run_dir / "run.json") in str(caught.value) and "start a new one" in str(caught.value)


def test_the_command_that_goes_on(run_dir, prepared):
    assert prepared.launch.resume_command(run_dir).endswith(f"distributed-train --resume {run_dir}")
    alone = dataclasses.replace(prepared.launch, ranks=prepared.launch.ranks[:1])
    assert alone.resume_command(PROJECT / "runs" / "a-run").endswith("finetune --resume a-run")
