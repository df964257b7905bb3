"""run.json: what was asked, written and read again; also as an earlier version wrote it.

A run that changes hosts goes on from its checkpoints, also if the change breaks off at any line.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from small_run import MASTER, PAIR, PROJECT

import cli_typer
from distributed.hosts.host_process import environment
from distributed.plan import launch as module
from distributed.plan.launch import Launch, change_hosts
from distributed.plan.prepare import rehost
from distributed.run_dir.summary import read_run
from distributed.ssh.host import Host, Hosts
from exogym.state.checkpoint import Checkpoints
from whisper_tuner.errors import RunError

MOVED = Hosts(master=Host(address="localhost"), workers=PAIR.workers)
GPU_PATIENCE = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
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


def test_a_run_of_version_0_1_is_refused_with_what_to_do(old_run):
    with pytest.raises(RunError, match=r"unknown key 'checkpoint_interval'\n.*start a new one"):
        Launch.load(old_run)


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


def test_the_watermarks_of_a_macs_gpu_are_ones_that_torch_takes():
    """It raises unless 0 <= low <= high <= 2; what is not set is 1.7 and 1.4 (MPSAllocator.mm)."""
    variables = {"HIGH": 1.7, "LOW": 1.4} | {
        name.split("_")[2]: float(value) for name, value in environment("/p").items() if "_WATERMARK_" in name
    }
    assert 0 < variables["LOW"] <= variables["HIGH"] <= 1


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_macs_wait_longer_for_what_computes_on_the_gpu(monkeypatch, given, expected):
    """Workers by their environment, `evaluate`, `transcribe` and the doctor by that of the command line."""
    monkeypatch.delenv(GPU_PATIENCE, raising=False)
    if given:
        monkeypatch.setenv(GPU_PATIENCE, given)
    assert environment("/p")[GPU_PATIENCE] == "1"
    assert cli_typer.main(["--help"]) == 0 and os.environ[GPU_PATIENCE] == expected


@pytest.fixture
def checkpoints(run_dir, prepared) -> Path:
    """Of rank 0 after rounds 4 and 6; and one of a rank whose name begins like it, which is none of ours."""
    folder = run_dir / "checkpoints"
    for name, numbers in ((MASTER.address, (4, 6)), (f"{MASTER.address}.lan", (6,))):
        for number in numbers:
            Checkpoints(folder, name).save(number, {"round": number})
    return folder


@pytest.fixture
def moved(run_dir, prepared) -> Launch:
    return rehost(prepared.launch, MOVED, run_dir, (1, 1))[0]


def newest(run_dir: Path) -> dict:
    """What rank 0 of the run as run.json has it goes on from."""
    found = Checkpoints(run_dir / "checkpoints", Launch.load(run_dir).ranks[0].label)
    return found.load(max(found.good()))


def names(checkpoints: Path) -> set[str]:
    return {path.name for path in checkpoints.glob("0000006/*")}


def test_the_masters_checkpoints_go_by_its_new_address(run_dir, prepared, moved, checkpoints):
    (checkpoints / f"{MASTER.address}.spec.json").write_text("by it `runs recover` reads them")
    change_hosts(run_dir, prepared.launch, moved)
    assert Launch.load(run_dir) == moved and newest(run_dir) == {"round": 6}
    assert {path.name for path in checkpoints.glob("*.json")} == {"localhost.spec.json"}
    assert names(checkpoints) == {
        *("localhost.json", "localhost.safetensors"),
        *("127.0.0.1.lan.json", "127.0.0.1.lan.safetensors"),
    }


def test_the_same_master_keeps_its_checkpoints(run_dir, prepared, checkpoints):
    launch, _ = rehost(prepared.launch, Hosts(master=MASTER, workers=(Host(address="other"),)), run_dir, (1, 1))
    before = names(checkpoints)
    change_hosts(run_dir, prepared.launch, launch)
    assert names(checkpoints) == before and newest(run_dir) == {"round": 6}


class Crash(BaseException):
    pass


STEPS = [(Path, "hardlink_to"), (module, "sync_folder"), (Launch, "save"), (Path, "unlink")]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
@pytest.mark.parametrize("nth", [0, 1, 3])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_crash_leaves_a_run_that_goes_on(run_dir, prepared, moved, checkpoints, monkeypatch, owner, step, nth, done):
    real, calls = getattr(owner, step), []

    def crashes(*arguments, **named):
        calls.append(step)
        if len(calls) > nth and not done:
            raise Crash
        real(*arguments, **named)
        if len(calls) > nth:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, crashes)
        try:
            change_hosts(run_dir, prepared.launch, moved)
        except Crash:
            assert newest(run_dir) == {"round": 6}
    assert calls, f"{step} is not called any more"
    change_hosts(run_dir, Launch.load(run_dir), moved)  # with the new hosts
    assert Launch.load(run_dir) == moved and newest(run_dir) == {"round": 6}


def test_a_crash_and_then_the_hosts_that_it_had(run_dir, prepared, moved, checkpoints, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Launch, "save", lambda *_: (_ for _ in ()).throw(Crash))
        change_hosts(run_dir, prepared.launch, moved)
    change_hosts(run_dir, Launch.load(run_dir), prepared.launch)
    Checkpoints(checkpoints, MASTER.address).save(8, {"round": 8})
    change_hosts(run_dir, prepared.launch, moved)
    assert newest(run_dir) == {"round": 8}


def test_a_disk_without_hard_links(run_dir, prepared, moved, checkpoints, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    change_hosts(run_dir, prepared.launch, moved)
    assert newest(run_dir) == {"round": 6}
