"""How a host is reached, and how it is noticed that it is not."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from loopback_sshd import SshServer
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_DATA, MSG_CHANNEL_EOF
from waiting import wait_until

from distributed.ssh import connection
from distributed.ssh import process as process_module
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from whisper_tuner.errors import HostError

JUMP = """
Host jump
  HostName 127.0.0.1
  Port {port}
  IdentityFile {key}
Host behind
  HostName 127.0.0.1
  ProxyJump jump
"""


@pytest.fixture
def remote(ssh_server: SshServer):
    with Remote.connect(ssh_server.host) as remote:
        yield remote


@pytest.mark.parametrize("late", [MSG_CHANNEL_EOF, MSG_CHANNEL_DATA])
def test_what_is_sent_to_a_command_after_its_end_leaves_the_connection_up(remote, monkeypatch, late):
    """As where the thread that sends is held up until another has answered the command's end."""
    send, answered, held_up = remote._transport._send_user_message, threading.Event(), []

    def send_late(message):
        kind = message.asbytes()[0]
        if kind == late and not held_up:
            held_up.append(message)
            assert answered.wait(10)
        send(message)
        if kind == MSG_CHANNEL_CLOSE:
            answered.set()

    monkeypatch.setattr(remote._transport, "_send_user_message", send_late)
    remote.run(["sleep", "1"], input=[b"more than it reads"] if late == MSG_CHANNEL_DATA else [])
    assert held_up
    for _ in range(3):  # sshd gives each the same number
        assert remote.run(["cat"], input=[b"here"]).stdout == "here"


def test_what_is_sent_late_does_not_reach_the_next_command(remote, monkeypatch):
    """sshd gives it the number of the one that has ended."""
    send, late = remote._transport._send_user_message, []

    def send_later(message):
        if message.asbytes()[0] == MSG_CHANNEL_EOF and not late:
            late.append(message)
        else:
            send(message)

    monkeypatch.setattr(remote._transport, "_send_user_message", send_later)
    first = remote.start(["sleep", "1"])
    first.close_stdin()
    assert late and first.wait(10) == 0
    wait_until(lambda: first._channel.closed)
    second = remote.start(["cat"])
    send(late[0])
    second.write(b"here\n")
    second.close_stdin()
    assert list(second.lines()) == ["here"]


def test_local_address_is_this_side_of_the_connection(remote):
    assert remote.local_address == "127.0.0.1"


def test_a_server_that_hangs_up_at_once_is_told_without_a_traceback():
    """In a process of its own: a test's logging is caught by pytest."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close()).start()
        script = "import sys; from distributed.ssh.connection import Remote; from distributed.ssh.host import Host\n"
        script += f"Remote.connect(Host(address='127.0.0.1', port={server.getsockname()[1]}))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "HostError: 127.0.0.1" in done.stderr and "Exception (client)" not in done.stderr


def says_here(host: Host) -> bool:
    with Remote.connect(host) as remote:
        return remote.run(["echo", "here"]).stdout == "here\n"


def test_ssh_config_counts_and_the_hosts_file_wins(ssh_server):
    ssh_server.configure(
        f"Host studio\n  HostName 127.0.0.1\n  Port {ssh_server.port}\n  User {ssh_server.host.user}\n"
        f"  IdentityFile {ssh_server.key}\nHost wrong\n  HostName 127.0.0.1\n  Port 9\n  User nobody\n"
    )
    plain = replace(ssh_server.host, address="studio", user=None, port=None, key_path=None)
    assert says_here(plain)
    assert says_here(replace(ssh_server.host, address="wrong"))


def test_what_ssh_does_not_tell_is_named(ssh_server):
    (ssh_server.folder / "bin" / "ssh").write_text("#!/bin/sh\necho user me\n")
    with pytest.raises(HostError, match="is not understood: it names no hostname"):
        Remote.connect(ssh_server.host)


def test_proxy_jump(ssh_server):
    ssh_server.configure(JUMP.format(port=ssh_server.port, key=ssh_server.key))
    with Remote.connect(replace(ssh_server.host, address="behind")) as remote:
        assert remote.run(["echo", "through"]).stdout == "through\n"
        assert remote.local_address is None


def test_every_host_of_a_proxy_jump_chain_is_passed_in_order(ssh_server):
    common = f"  HostName 127.0.0.1\n  Port {ssh_server.port}\n  IdentityFile {ssh_server.key}\n"
    ssh_server.configure(
        f"Host one\n{common}Host two\n{common}Host behind\n  HostName 127.0.0.1\n  ProxyJump one,two\n"
    )
    with Remote.connect(replace(ssh_server.host, address="behind")) as remote:
        names = []
        while remote:
            names.append(remote.name)
            remote = remote._below
    assert names == ["behind", "two", "one"]


def test_a_proxy_command(ssh_server):
    relay = "import os,socket,sys,threading;s=socket.create_connection(('127.0.0.1',%p));" + (
        "threading.Thread(target=lambda:[os.write(1,b) for b in iter(lambda:s.recv(9999),b'')],daemon=True).start();"
        "[s.sendall(b) for b in iter(lambda:os.read(0,9999),b'')]"
    )
    ssh_server.configure(f'Host *\n  ProxyCommand {sys.executable} -c "{relay}"\n')
    assert says_here(ssh_server.host)


def test_unknown_name_and_silent_port(ssh_server):
    with pytest.raises(HostError, match="is not known"):
        Remote.connect(replace(ssh_server.host, address="no-such-host.invalid"))
    for address in ("10.0.0..2", "x" * 300):
        with pytest.raises(HostError, match="is not known"):
            Remote.connect(replace(ssh_server.host, address=address))
    answers = pytest.raises(HostError, match="answers, but not as an SSH server")
    with socket.create_server(("127.0.0.1", 0)) as silent, answers:
        Remote.connect(replace(ssh_server.host, port=silent.getsockname()[1]), timeout=1)


def test_a_host_that_is_not_there_is_given_up_after_the_connect_timeout(ssh_server):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(2):  # as many as find a place; the next one gets no answer
            caller = waiting.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        begun = time.monotonic()
        with pytest.raises(HostError, match="no answer") as caught:
            Remote.connect(replace(ssh_server.host, port=full.getsockname()[1]), timeout=60, connect_timeout=0.5)
        assert time.monotonic() - begun < 30
    assert "Is it awake" in str(caught.value)


def test_lost_connection_ends_everything_with_an_error(ssh_server):
    remote = Remote.connect(ssh_server.host)
    process = remote.start(["sleep", "60"])
    threading.Timer(0.3, kill_sessions, [ssh_server]).start()
    begin = time.monotonic()
    assert list(process.lines()) == []
    assert process.wait(10) == 255
    assert time.monotonic() - begin < 5
    with pytest.raises(HostError, match="connection is lost"):
        remote.run(["true"])
    remote.close()


def kill_sessions(server: SshServer) -> None:
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if "sshd" in child.name():
            child.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "use",
    [lambda remote: remote.run(["true"], timeout=1), lambda remote: remote.get("file", Path("/dev/null"))],
    ids=["command", "sftp"],
)
def test_a_host_that_falls_asleep_as_a_session_is_opened_is_not_waited_for(remote, ssh_server, monkeypatch, use):
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 1.0)
    asleep, open_session = [], remote._transport.open_session

    def open_and_fall_asleep(**settings):
        channel = open_session(**settings)
        for process in psutil.Process(ssh_server.process.pid).children(recursive=True):
            process.suspend()
            asleep.append(process)
        return channel

    monkeypatch.setattr(remote._transport, "open_session", open_and_fall_asleep)
    ended = threading.Event()

    def try_it() -> None:
        with contextlib.suppress(HostError):
            use(remote)
        ended.set()

    threading.Thread(target=try_it, daemon=True).start()
    ended.wait(5)
    for process in asleep:
        process.resume()
    assert ended.is_set()


@pytest.mark.parametrize("address", ["127.0.0.1", "behind"])
def test_a_host_that_falls_asleep_as_it_is_written_to_does_not_hold_up_the_end(ssh_server, monkeypatch, address):
    """The write that fills its socket blocks every other; the end of stdin closes the connection, and frees it."""
    monkeypatch.setattr(process_module, "END_OF_INPUT_S", 0.5)
    ssh_server.configure(JUMP.format(port=ssh_server.port, key=ssh_server.key))
    remote = Remote.connect(replace(ssh_server.host, address=address))
    first = (remote._below or remote)._transport.sock
    first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    process = remote.start(["cat"])
    sleepers = psutil.Process(ssh_server.process.pid).children(recursive=True)
    for sleeper in sleepers:
        sleeper.suspend()
    ended = threading.Event()

    def write() -> None:
        with pytest.raises(HostError, match="the process is gone"):
            process.write(b"." * (1 << 23))
        ended.set()

    threading.Thread(target=write, daemon=True).start()
    try:
        assert not ended.wait(0.5)
        begin = time.monotonic()
        process.close_stdin()
        remote.close()
        assert time.monotonic() - begin < 5 and ended.wait(5)
    finally:
        for sleeper in sleepers:
            sleeper.resume()
