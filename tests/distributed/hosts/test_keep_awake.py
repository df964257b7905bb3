import contextlib
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from distributed.checkup import speed
from distributed.hosts import environment
from distributed.hosts import keep_awake as module
from distributed.ssh import connection
from distributed.ssh.connection import Remote
from multimac.commands import evaluate, hosts, recover, train, transcribe
from multimac.view import transfers
from multimac.wizard import data
from whisper_tuner.errors import TunerError

NOWHERE = Path("/nowhere")
# It shows how it was called, and runs its utility as a child, as the real one does (man caffeinate).
STAND_IN = '#!/bin/sh\necho "$@" > {called}\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\n"$@"\nrm {called}\n'


def test_the_commands_as_their_manuals_have_them():
    mac = module.keeper(42, "Darwin", systemd=False)
    assert mac == ["/usr/bin/caffeinate", "-i", "-m", "-s", "-w", "42"]
    assert module.keeper(42, "Linux", systemd=True)[-4:] == ["tail", "--pid=42", "-f", "/dev/null"]
    assert module.keeper(42, "Linux", systemd=False) == []


def test_the_display_may_sleep():
    """While one is on some Macs restart under a long load of the GPU (mlx 3267): caffeinate's -d and -u keep it on."""
    held = re.search(r'exec "\$0" (.*) cat', module.HOLD)[1].split()
    assert not {"-d", "-u"} & {*held, *module.keeper(42, "Darwin", systemd=False)} and held


@pytest.mark.skipif(sys.platform != "linux", reason="tail --pid is GNU's")
def test_a_keeper_lives_as_long_as_its_process(monkeypatch):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    line = ["tail", f"--pid={worker.pid}", "-f", "/dev/null"]
    monkeypatch.setattr(module, "keeper", lambda pid, system, systemd: line)
    assert module.keep_awake(worker.pid) == "tail"

    def held() -> list[psutil.Process]:
        alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        return [child for child in alive if child.as_dict(["cmdline"])["cmdline"] == line]

    wait_until(held)  # a child that has only just been started has no command line yet
    [tail] = held()
    worker.kill()
    worker.wait()
    tail.wait(5)


@pytest.mark.skipif(sys.platform != "linux", reason="tail --pid is GNU's")
def test_nothing_is_held_after_a_killed_process(tmp_path, monkeypatch):
    """A stand-in for systemd-inhibit, which needs systemd: it runs what it is given, as that does."""
    stand_in = tmp_path / "systemd-inhibit"
    stand_in.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    stand_in.chmod(0o755)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    line = module.keeper(worker.pid, "Linux", systemd=True)
    held = subprocess.Popen([stand_in, *line[1:]])
    time.sleep(0.5)
    assert held.poll() is None
    worker.kill()
    worker.wait()
    assert held.wait(5) == 0


LONG = {
    "finetune": partial(train.finetune, "x", config=NOWHERE),
    "distributed-train": partial(train.distributed_train, "x", NOWHERE, config=NOWHERE),
    "resume": partial(train.finetune, resume="x", config=NOWHERE),
    "recover": partial(recover.runs_recover, "x", NOWHERE),
    "hosts setup": partial(hosts.hosts_setup, NOWHERE),
    "hosts sync": partial(hosts.hosts_sync, "x", NOWHERE, NOWHERE),
    "evaluate": partial(evaluate.evaluate, [], config=NOWHERE),
    "transcribe": partial(transcribe.transcribe, [], "x"),
    "the wizard's look at data": partial(data._read, None, None, None),
    "the wizard's measurement": partial(speed.measure, None, None, None, None, None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("command", LONG.values(), ids=LONG.keys())
def test_a_long_command_keeps_this_machine_awake_until_it_ends(monkeypatch, command):
    """However it ends: each of these fails at once."""
    asked, held = [], subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(module, "_hold", lambda pid: asked.append(pid) or held)
    with contextlib.suppress(TunerError, OSError, TypeError, AttributeError):
        command()
    assert asked == [os.getpid()] and held.poll() is not None


@pytest.fixture
def called(tmp_path, monkeypatch) -> Path:
    """Exists while the stand-in for caffeinate runs, and says how it was called."""
    called, stand_in = tmp_path / "called", tmp_path / "caffeinate"
    stand_in.write_text(STAND_IN.format(called=called))
    stand_in.chmod(0o755)
    monkeypatch.setattr(module, "CAFFEINATE", str(stand_in))
    return called


def test_a_host_is_kept_awake_as_long_as_its_session_lasts(ssh_server, called):
    with Remote.connect(ssh_server.host) as remote, module.hosts_awake([remote]):
        wait_until(called.exists)
        assert called.read_text() == "-i -m -s cat\n"
    wait_until(lambda: not called.exists())


def test_nothing_is_held_on_a_host_whose_connection_is_lost(ssh_server, called):
    remote = Remote.connect(ssh_server.host)
    with module.hosts_awake([remote]):
        wait_until(called.exists)
        remote.close()
        wait_until(lambda: not called.exists())


def test_a_host_that_knows_nothing_of_the_kind_is_used_as_it_is(ssh_server, monkeypatch):
    monkeypatch.setattr(module, "CAFFEINATE", "/nowhere/caffeinate")
    with Remote.connect(ssh_server.host) as remote, module.hosts_awake([remote]):
        assert remote.run(["printf", "on"]).stdout == "on"


def test_hosts_that_do_not_answer_are_waited_for_together(ssh_server, monkeypatch):
    """They have fallen asleep since they were connected to."""
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 2.0)
    with contextlib.ExitStack() as stack:
        remotes = [stack.enter_context(Remote.connect(ssh_server.host)) for _ in range(4)]
        for process in psutil.Process(ssh_server.process.pid).children(recursive=True):
            process.suspend()
            stack.callback(process.resume)
        began = time.monotonic()
        with module.hosts_awake(remotes):
            assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("place", "work"),
    [
        (environment, lambda remotes: environment.setup(remotes, print)),
        (transfers, lambda remotes: transfers.send(None, {}, remotes)),
    ],
    ids=["setup", "sync"],
)
def test_hosts_are_kept_awake_while_they_are_prepared(monkeypatch, place, work):
    held = []

    @contextlib.contextmanager
    def hosts_awake(remotes):
        held.append(remotes)
        yield

    monkeypatch.setattr(place, "hosts_awake", hosts_awake)
    with contextlib.suppress(KeyError, ValueError, AttributeError):
        work(["a host that is none"])
    assert held == [["a host that is none"]]
