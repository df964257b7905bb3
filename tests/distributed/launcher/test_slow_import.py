"""Real workers, whose first import of torch holds the interpreter's lock for 40 s."""

from pathlib import Path

import pytest
from small_run import folder, job, run_dir

from distributed.hosts import host_process
from distributed.hosts.host_process import environment
from distributed.launcher import spawner
from distributed.launcher.main import Launcher
from distributed.plan.prepare import prepare_run
from distributed.run_dir.log import read_events
from whisper_tuner.errors import ExitStatus

__all__ = ["folder", "job", "run_dir"]  # fixtures
HELD_S = 40


@pytest.mark.slow
def test_workers_that_hold_the_lock_for_40_s_are_not_lost(job, run_dir, monkeypatch):
    def here(project) -> dict[str, str]:
        known = environment(project)
        return known | {"PYTHONPATH": f"{known['PYTHONPATH']}:{Path(__file__).parent}", "HELD_S": str(HELD_S)}

    monkeypatch.setattr(spawner, "WORKER", "slow_import")
    monkeypatch.setattr(host_process, "environment", here)
    prepare_run(job, run_dir, local_ranks=2).launch.save(run_dir)
    launcher = Launcher(run_dir)
    assert launcher.run() == ExitStatus.OK
    events, _ = read_events(run_dir / "events.jsonl", 0)
    begin = next(event["time"] for event in events if event["type"] == "phase")
    hellos = [event["time"] - begin for event in events if event["type"] == "hello"]
    assert len(hellos) == 2 and min(hellos) > HELD_S
    assert not [event for event in events if event["type"] == "lost"]
