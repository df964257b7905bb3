import subprocess
import sys
import time

import psutil
import pytest

from distributed.hosts import keep_awake as awake


def test_the_commands_as_their_manuals_have_them():
    mac = awake.keeper(42, "Darwin", systemd=False)
    assert mac == ["/usr/bin/caffeinate", "-i", "-m", "-s", "-w", "42"]
    assert awake.keeper(42, "Linux", systemd=True)[-4:] == ["tail", "--pid=42", "-f", "/dev/null"]
    assert awake.keeper(42, "Linux", systemd=False) == []


@pytest.mark.skipif(sys.platform != "linux", reason="tail --pid is GNU's")
def test_a_keeper_lives_as_long_as_its_process(monkeypatch):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    line = ["tail", f"--pid={worker.pid}", "-f", "/dev/null"]
    monkeypatch.setattr(awake, "keeper", lambda pid, system, systemd: line)
    assert awake.keep_awake(worker.pid) == "tail"
    [held] = [child for child in psutil.Process().children() if child.cmdline() == line]
    worker.kill()
    worker.wait()
    held.wait(5)


@pytest.mark.skipif(sys.platform != "linux", reason="tail --pid is GNU's")
def test_nothing_is_held_after_a_killed_process(tmp_path, monkeypatch):
    """A stand-in for systemd-inhibit, which needs systemd: it runs what it is given, as that does."""
    stand_in = tmp_path / "systemd-inhibit"
    stand_in.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    stand_in.chmod(0o755)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    line = awake.keeper(worker.pid, "Linux", systemd=True)
    held = subprocess.Popen([stand_in, *line[1:]])
    time.sleep(0.5)
    assert held.poll() is None
    worker.kill()
    worker.wait()
    assert held.wait(5) == 0
