"""A machine is the same for its callers, be it this one or one reached over SSH."""

import contextlib
import os

import psutil
import pytest
from loopback_sshd import SshServer
from waiting import wait_until

from distributed.ssh.connection import Remote
from distributed.ssh.machine import LocalMachine
from whisper_tuner.errors import HostError

NASTY = ["a b", "$HOME", "`id`", "'\"", "\\n", "new\nline", "-x", "~", "*", "é ü", "!!", "", "a;b&c|d"]
KILLPG = os.killpg


@pytest.fixture
def remote(ssh_server: SshServer):
    with Remote.connect(ssh_server.host) as remote:
        yield remote


@pytest.fixture(params=["ssh", "local"])
def machine(request):
    """Both kinds of machine must behave alike."""
    if request.param == "local":
        return LocalMachine("here")
    return request.getfixturevalue("remote")


def test_run_returns_status_and_both_streams(machine):
    done = machine.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    with pytest.raises(HostError, match=r"status 3: err"):
        machine.run(["/bin/sh", "-c", "echo err >&2; exit 3"], check=True)


def test_arguments_folder_input_and_environment_arrive(machine, tmp_path):
    assert machine.run(["printf", "[%s]", *NASTY]).stdout == "".join(f"[{word}]" for word in NASTY)
    done = machine.run(["/bin/sh", "-c", "pwd; cat"], cwd=str(tmp_path), input=[b"i", b"n"])
    assert done.stdout == f"{tmp_path}\nin"
    process = machine.start(["/bin/sh", "-c", 'echo "$A"; pwd'], env={"A": "x 'y' $z"}, cwd=str(tmp_path))
    assert list(process.lines()) == ["x 'y' $z", str(tmp_path)]


def test_run_carries_megabytes_both_ways(machine):
    data = os.urandom(1 << 20).hex().encode()
    assert machine.run(["cat"], input=[data], timeout=60).stdout == data.decode()


def test_run_times_out(machine):
    with pytest.raises(HostError, match="did not end within"):
        machine.run(["sleep", "30"], timeout=0.3)


def test_home_is_expanded_there(machine):
    home = machine.run(["/bin/sh", "-c", 'printf %s "$HOME"']).stdout
    assert machine.expand("~/x") == f"{home}/x"
    assert machine.expand("/x") == "/x"


def test_start_streams_lines_and_takes_input(machine):
    process = machine.start(["/bin/sh", "-c", 'read a; echo "got $a"; echo oops >&2; cat; exit 4'])
    assert process.poll() is None
    lines = process.lines()
    process.write(b"hello\n")
    assert [next(lines), next(lines)] == ["got hello", "oops"]
    process.write("half é".encode())
    process.close_stdin()
    assert list(lines) == ["half é"]
    assert process.wait(10) == 4
    assert process.poll() == 4


def test_kill_ends_the_children_as_well(machine, tmp_path):
    script = f"sleep 300 & echo $! > {tmp_path}/child; echo ready; wait"
    process = machine.start(["/bin/sh", "-c", script])
    assert next(process.lines()) == "ready"
    child = int((tmp_path / "child").read_text())
    process.kill()
    assert process.wait(10) not in {None, 0}
    wait_until(lambda: not running(child) and not running(process.pid))
    process.kill()


def killpg_of_macos(group: int, number: int) -> None:
    """There a process group of which only zombies are left may not be sent a signal (killpg1 in xnu's kern_sig.c)."""
    members = [process for process in psutil.process_iter() if group_of(process) == group]
    if members and not any(running(member.pid) for member in members):
        raise PermissionError(1, "Operation not permitted")
    KILLPG(group, number)


def test_killing_what_has_just_ended_is_no_error_on_a_mac(monkeypatch):
    monkeypatch.setattr("os.killpg", killpg_of_macos)
    process = LocalMachine().start(["true"])
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    process.kill()
    assert not psutil.pid_exists(process.pid)  # reaped, not only forgiven
    process.kill()
    assert process.poll() == 0


def test_killing_twice_is_no_error_on_a_mac(monkeypatch):
    """As the wizard's probe is by its watchdog, and then by whoever started it."""
    monkeypatch.setattr("os.killpg", killpg_of_macos)
    process = LocalMachine().start(["sleep", "60"])
    process.kill()
    wait_until(lambda: not running(process.pid))
    process.kill()
    assert process.poll() == -9


def test_what_was_killed_is_not_killed_again(monkeypatch):
    """Its number may be another group's by then."""
    groups = []
    monkeypatch.setattr("os.killpg", lambda group, number: (groups.append(group), KILLPG(group, number)))
    process = LocalMachine().start(["sleep", "60"])
    process.kill()
    assert process.wait(10) == -9
    process.kill()
    assert groups == [process.pid]


def test_what_an_ended_process_has_left_behind_is_killed_as_well():
    process = LocalMachine().start(["/bin/sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"])
    (child,) = map(int, process.lines())
    assert process.wait(10) == 0 and running(child)
    process.kill()
    wait_until(lambda: not running(child))


def test_what_may_not_be_killed_is_said(monkeypatch):
    def killpg(group: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    process = LocalMachine("here").start(["sleep", "60"])
    with monkeypatch.context() as refused:
        refused.setattr("os.killpg", killpg)
        with pytest.raises(HostError, match=rf"here: process {process.pid} may not be killed: Operation not permitted"):
            process.kill()
    process.kill()
    assert process.wait(5) == -9


def test_start_of_a_missing_program_fails(machine):
    with pytest.raises(HostError):
        process = machine.start(["/no/such/program"])
        if process.wait(10) == 127:
            raise HostError(machine.name, "status 127")


def test_get(machine, tmp_path):
    (tmp_path / "b -\n").write_bytes(b"\0data")
    machine.get(str(tmp_path / "b -\n"), tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"\0data"
    with pytest.raises((HostError, OSError)):
        machine.get(str(tmp_path / "none"), tmp_path / "d")


def group_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
