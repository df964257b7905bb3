import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from loopback_sshd import SshServer, keygen
from waiting import wait_until

from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from distributed.ssh.machine import LocalMachine, quote
from whisper_tuner.errors import HostError, HostKeyError

NASTY = [
    "a b",
    "$HOME",
    "`id`",
    "'\"",
    "\\n",
    "new\nline",
    "-x",
    "=ls",
    "~",
    "*",
    "é ü",
    "!!",
    "{a,b}",
    "",
    "a;b&c|d",
    "#",
    "%s",
]
SHELLS = [shell for shell in ("sh", "dash", "bash", "zsh", "fish", "tcsh") if shutil.which(shell)]


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


@pytest.mark.parametrize("shell", SHELLS)
def test_quote_survives_every_login_shell(shell):
    line = quote(["printf", "[%s]", *NASTY])
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "".join(f"[{word}]" for word in NASTY)


def test_run_returns_status_and_both_streams(machine):
    done = machine.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    with pytest.raises(HostError, match=r"status 3: err"):
        machine.run(["/bin/sh", "-c", "echo err >&2; exit 3"], check=True)


def test_run_passes_arguments_environment_folder_and_input(machine, tmp_path):
    assert machine.run(["printf", "[%s]", *NASTY]).stdout == "".join(f"[{word}]" for word in NASTY)
    done = machine.run(
        ["/bin/sh", "-c", 'printf "%s|" "$A"; pwd; cat'], env={"A": "x 'y' $z"}, cwd=str(tmp_path), input=b"in"
    )
    assert done.stdout == f"x 'y' $z|{tmp_path}\nin"


def test_run_carries_megabytes_both_ways(machine):
    data = os.urandom(1 << 20).hex().encode()
    assert machine.run(["cat"], input=data, timeout=60).stdout == data.decode()


def test_run_times_out(machine):
    with pytest.raises(HostError, match="did not end within"):
        machine.run(["sleep", "30"], timeout=0.3)


def test_home_is_expanded_there(machine):
    assert machine.expand("~/x") == f"{machine.home}/x"
    assert machine.expand("/x") == "/x"


def test_start_streams_lines_and_takes_input(machine):
    process = machine.start(["/bin/sh", "-c", 'read a; echo "got $a"; echo oops >&2; cat; exit 4'], env={"B": "1"})
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


def test_start_of_a_missing_program_fails(machine):
    with pytest.raises(HostError):
        process = machine.start(["/no/such/program"])
        if process.wait(10) == 127:
            raise HostError(machine.name, "status 127")


def test_put_and_get(machine, tmp_path):
    (tmp_path / "a").write_bytes(b"\0data")
    machine.put(tmp_path / "a", str(tmp_path / "b -\n"))
    machine.get(str(tmp_path / "b -\n"), tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"\0data"
    with pytest.raises((HostError, OSError)):
        machine.get(str(tmp_path / "none"), tmp_path / "d")


def test_local_address_is_this_side_of_the_connection(remote):
    assert remote.local_address == "127.0.0.1"


def test_unknown_key_is_refused_with_its_fingerprint_and_the_remedy(ssh_server):
    ssh_server.known_hosts.write_text("")
    with pytest.raises(HostKeyError) as caught:
        Remote.connect(ssh_server.host)
    shown = subprocess.run(["ssh-keygen", "-lf", ssh_server.folder / "host_key"], capture_output=True, text=True).stdout
    assert shown.split()[1] in str(caught.value)
    assert f"ssh -p {ssh_server.port} {ssh_server.host.user}@127.0.0.1" in str(caught.value)
    assert ssh_server.known_hosts.read_text() == ""


def test_changed_key_is_refused(ssh_server):
    blob = keygen(ssh_server.folder / "other").with_suffix(".pub").read_text()
    ssh_server.known_hosts.write_text(f"[127.0.0.1]:{ssh_server.port} {blob}")
    with pytest.raises(HostKeyError, match="CHANGED") as caught:
        Remote.connect(ssh_server.host)
    assert "ssh-keygen -R" in str(caught.value)
    assert f"{ssh_server.known_hosts}:1" in str(caught.value)


def test_revoked_key_is_refused(ssh_server):
    kind, blob = ssh_server.host_key
    with ssh_server.known_hosts.open("a") as file:
        file.write(f"@revoked * {kind} {blob}\n")
    with pytest.raises(HostKeyError, match="@revoked"):
        Remote.connect(ssh_server.host)


def test_certificate_authority_lines_are_named(ssh_server):
    kind, blob = ssh_server.host_key
    ssh_server.known_hosts.write_text(f"@cert-authority * {kind} {blob}\n")
    with pytest.raises(HostKeyError, match="@cert-authority lines are not supported"):
        Remote.connect(ssh_server.host)


def test_refused_key_names_what_was_tried(ssh_server):
    stranger = keygen(ssh_server.home / "stranger")
    with pytest.raises(HostError, match="no key was accepted") as caught:
        Remote.connect(replace(ssh_server.host, key_path=stranger))
    assert str(stranger) in str(caught.value)
    assert f"ssh-copy-id -i {stranger} -p {ssh_server.port}" in str(caught.value)


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """A real ssh-agent; yields a function that gives it a key."""
    sock = f"/tmp/mmw-agent-{os.getpid()}"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL)
    wait_until(Path(sock).exists)

    def add(key: Path, passphrase: str = "") -> Path:
        ask = tmp_path / "askpass"
        ask.write_text(f"#!/bin/sh\necho '{passphrase}'\n")
        ask.chmod(0o700)
        env = {**os.environ, "SSH_AUTH_SOCK": sock, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", key], env=env, check=True, stdin=subprocess.DEVNULL)
        return Path(sock)

    yield add
    process.kill()
    process.wait()
    Path(sock).unlink(missing_ok=True)


def protect(server: SshServer) -> Path:
    """Put a passphrase on the key that the server accepts."""
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret-words", "-f", server.key], check=True)
    return server.key


def says_here(host: Host) -> bool:
    with Remote.connect(host) as remote:
        return remote.run(["echo", "here"]).stdout == "here\n"


def test_key_with_a_passphrase_points_to_the_agent(ssh_server):
    protect(ssh_server)
    with pytest.raises(HostError, match="has a passphrase") as caught:
        Remote.connect(ssh_server.host)
    assert f"ssh-add {ssh_server.key}" in str(caught.value)
    assert "secret-words" not in str(caught.value)


def test_agent_holds_the_key(ssh_server, agent, monkeypatch):
    sock = agent(protect(ssh_server), "secret-words")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
    assert says_here(ssh_server.host)


def test_identity_agent_of_the_configuration_is_used(ssh_server, agent):
    sock = agent(protect(ssh_server), "secret-words")
    ssh_server.configure(f"Host *\n  IdentityAgent {sock}\n")
    assert says_here(ssh_server.host)


def test_ssh_config_counts_and_the_hosts_file_wins(ssh_server):
    ssh_server.configure(
        f"Host studio\n  HostName 127.0.0.1\n  Port {ssh_server.port}\n  User {ssh_server.host.user}\n"
        f"  IdentityFile {ssh_server.key}\nHost wrong\n  HostName 127.0.0.1\n  Port 9\n  User nobody\n"
    )
    plain = replace(ssh_server.host, address="studio", user=None, port=None, key_path=None)
    assert says_here(plain)
    assert says_here(replace(ssh_server.host, address="wrong"))


def test_odd_files_in_ssh_s_folder_are_passed_over(ssh_server):
    ssh_server.key.with_name(ssh_server.key.name + ".pub").write_bytes("ssh-ed25519 AAAA Jürgen".encode("latin-1"))
    known = ssh_server.known_hosts
    known.write_text("studio ssh-ed25519 ÄÖÜ\n" + known.read_text())
    assert says_here(ssh_server.host)


def test_proxy_jump(ssh_server):
    ssh_server.configure(
        f"Host jump\n  HostName 127.0.0.1\n  Port {ssh_server.port}\n  IdentityFile {ssh_server.key}\n"
        f"Host behind\n  HostName 127.0.0.1\n  ProxyJump jump\n"
    )
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


def test_closed_port_points_to_remote_login(ssh_server):
    ssh_server.stop()
    with pytest.raises(HostError, match="Connection refused") as caught:
        Remote.connect(ssh_server.host)
    assert "Remote Login" in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_unknown_name_and_silent_port(ssh_server):
    with pytest.raises(HostError, match="is not known"):
        Remote.connect(replace(ssh_server.host, address="no-such-host.invalid"))
    for address in ("10.0.0..2", "x" * 300):
        with pytest.raises(HostError, match="is not known"):
            Remote.connect(replace(ssh_server.host, address=address))
    with ssh_socket() as port, pytest.raises(HostError, match="SSH failed"):
        Remote.connect(replace(ssh_server.host, port=port), timeout=1)


def test_a_host_that_is_not_there_is_given_up_after_its_time_to_connect(ssh_server):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as waiting:
        for _ in range(2):  # as many as find a place; the next one gets no answer
            caller = waiting.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(deaf.getsockname())
        begun = time.monotonic()
        with pytest.raises(HostError, match="no answer"):
            Remote.connect(replace(ssh_server.host, port=deaf.getsockname()[1]), timeout=60, connect_timeout=0.5)
        assert time.monotonic() - begun < 30


def ssh_socket():
    """A port that accepts and then says nothing."""

    @contextlib.contextmanager
    def opened():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener.getsockname()[1]

    return opened()


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
    import psutil

    for child in psutil.Process(server.process.pid).children(recursive=True):
        if "sshd" in child.name():
            child.send_signal(signal.SIGKILL)


def running(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
