"""Each process of a run is killed or frozen, while it trains and while it stops: what is left on the hosts.

The run ends well, or says that it did not. 25 s after its end no host has a process of it.
"""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
from lab import faults
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.slow]
TEXT = """
[distributed:d]
base_profile = tiny
shares = fixed
communication_interval = 4
wire = float32
overlap_steps = 0
checkpoint_interval = 1
epochs = 8
"""
HOST_OF = {
    "cli_typer.py": "h1",
    "distributed.launcher.main": "h1",
    "distributed.control.relay": "h2",
    "distributed.control.supervisor": "h2",
    "distributed.worker.main": "h2",
}
WITHOUT_LAUNCHER_S = 23 + 10  # a worker bears its silence for so long; then it is killed, if it hangs
FROZEN_S = 15.0  # longer than the launcher bears silence


def left(runner) -> list[str]:
    """Processes of the run, on any host; zombies are nobody."""
    names = [*HOST_OF][1:]
    return [
        f"{host}: {process}"
        for host in runner.lab.hosts
        for name in names
        for process in runner.lab.processes(host, name)
    ]


def workers_on_h2(runner) -> int:
    return len(runner.lab.processes("h2", "distributed.worker.main"))


@contextlib.contextmanager
def fault(runner, kind: str, process: str):
    host = runner.lab[HOST_OF[process]]
    if kind == "kill":
        faults.kill(host, process)
        yield
    else:
        with faults.frozen(host, process):
            yield


@pytest.mark.parametrize("kind", ["kill", "freeze"])
@pytest.mark.parametrize("process", [name for name in HOST_OF if name != "cli_typer.py"])
def test_while_it_trains(runner, process, kind):
    front = runner.start("d", "h2", text=TEXT)
    with fault(runner, kind, process):
        if kind == "freeze":
            time.sleep(FROZEN_S)
    if process == "distributed.launcher.main" and kind == "kill":
        front.communicate(timeout=15)
        assert front.returncode == 6
        wait_until(lambda: not left(runner), WITHOUT_LAUNCHER_S, tell=lambda: left(runner))
        return
    out, err = front.communicate(timeout=180)
    assert front.returncode == 0, out + err
    wait_until(lambda: not left(runner), 25, tell=lambda: left(runner))
    assert len(runner.events("done")) == 2  # the host that was lost has come back


@pytest.mark.parametrize("kind", ["kill", "freeze"])
@pytest.mark.parametrize("process", HOST_OF)
def test_while_it_stops(runner, process, kind):
    front = runner.start("d", "h2", text=TEXT)
    runner.lab["h1"].signal(signal.SIGINT, "cli_typer.py")
    if process == "cli_typer.py":
        time.sleep(1.0)  # it passes Ctrl-C on within 0.2 s; killed before, it would leave the run to go on
    with fault(runner, kind, process):
        if kind == "freeze":
            time.sleep(FROZEN_S)
    front.communicate(timeout=60)
    assert front.returncode in ({-signal.SIGKILL} if (process, kind) == ("cli_typer.py", "kill") else {130, 6, 5, 1})
    wait_until(lambda: not left(runner), WITHOUT_LAUNCHER_S + 5, tell=lambda: left(runner))
    assert (runner.run_dir / "events.jsonl").is_file()


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_the_terminal_while_it_trains(runner, kind):
    """The run goes on without its terminal, and ends by itself."""
    front = runner.start("d", "h2", text=TEXT)
    with fault(runner, kind, "cli_typer.py"):
        wait_until(lambda: len(runner.events("done")) == 2, 120)
        wait_until(lambda: not left(runner), 60, tell=lambda: left(runner))
    front.communicate(timeout=30)
    assert front.returncode == (-signal.SIGKILL if kind == "kill" else 0)


def test_a_supervisor_alone_while_its_worker_is_frozen(runner):
    """The next supervisor kills the worker that it finds: never are there two that could write one folder."""
    front = runner.start("d", "h2", text=TEXT)
    with faults.frozen(runner.lab["h2"], "distributed.worker.main") as [frozen]:
        faults.kill(runner.lab["h2"], "distributed.control.supervisor")
        wait_until(lambda: len(runner.events("hello")) == 3, 60)
        assert frozen.pid not in [process.pid for process in runner.lab.processes("h2", "distributed.worker.main")]
        assert workers_on_h2(runner) == 1
    out, err = front.communicate(timeout=180)
    assert front.returncode == 0, out + err
    wait_until(lambda: not left(runner), 25, tell=lambda: left(runner))
