"""A run that changes hosts goes on from its checkpoints, also if the change breaks off at any line."""

from pathlib import Path

import pytest
from small_run import MASTER, PAIR

from distributed.plan import change_hosts as module
from distributed.plan.change_hosts import change_hosts
from distributed.plan.launch import Launch
from distributed.plan.prepare import rehost
from distributed.ssh.host import Host, Hosts
from exogym.state.checkpoint import Checkpoints

MOVED = Hosts(master=Host(address="localhost"), workers=PAIR.workers)


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
@pytest.mark.parametrize("nth", range(4))
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
