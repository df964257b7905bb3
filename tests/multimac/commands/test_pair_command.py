"""`hosts find` and `hosts pair`, in a terminal, with a real sshd. What ssh-copy-id does stands in for its password."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loopback_sshd import SshServer

from distributed.ssh import pairing
from distributed.ssh.host import Host, resolve
from whisper_tuner.errors import HostError, HostKeyError

PROJECT = Path(__file__).parents[3]


class Terminal:
    """A command of the program in a pseudo-terminal."""

    def __init__(self, folder: Path, *words: str):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "100"}
            os.execv(sys.executable, [sys.executable, str(PROJECT / "cli_typer.py"), *words])
        self.seen = ""

    def expect(self, words: str, timeout: float = 60) -> str:
        deadline = time.monotonic() + timeout
        while words.replace(" ", "") not in re.sub(r"\s", "", self.seen):
            assert time.monotonic() < deadline and self._read(), self.seen
        return self.seen

    def _read(self) -> bool:
        if not select.select([self.fd], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.seen += re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", data).decode(errors="replace")
        return bool(data)

    def type(self, keys: str) -> None:
        time.sleep(0.2)
        os.write(self.fd, keys.encode())

    def end(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._read():
            pass
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return status


@pytest.fixture
def copying(ssh_server: SshServer) -> Path:
    """A program in the place of ssh-copy-id, as a test has no password: it puts the key there, and notes the call."""
    ssh_server.configure(f"Host 127.0.0.1 localhost\n  IdentityFile {ssh_server.key}\n  IdentitiesOnly yes\n")
    script, called = ssh_server.folder / "bin" / "ssh-copy-id", ssh_server.folder / "called"
    script.write_text(f'#!/bin/sh\necho "$@" > {called}\ncat "$2" >> {ssh_server.folder}/authorized_keys\n')
    script.chmod(0o755)
    return called


def test_from_an_unknown_machine_to_the_hosts_file(ssh_server, copying, tmp_path):
    """A key that the user does not trust changes nothing; a second time what is done is passed over."""
    (ssh_server.folder / "authorized_keys").write_text("")
    ssh_server.known_hosts.write_text("")
    words = ("hosts", "pair", "localhost", "--port", str(ssh_server.port), "--no-setup")
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", str(ssh_server.folder / "host_key.pub")], capture_output=True, text=True
    ).stdout.split()[1]
    refusing = Terminal(tmp_path, *words)
    assert fingerprint in re.sub(r"\s", "", refusing.expect("Are the two alike?"))
    refusing.type("n\r")
    assert refusing.end() == 0 and "Nothing was changed." in refusing.seen
    assert ssh_server.known_hosts.read_text() == "" and not (tmp_path / "distributed_hosts.json").exists()

    terminal = Terminal(tmp_path, *words)
    terminal.expect("On that machine, this prints it: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
    terminal.expect("Are the two alike?")
    terminal.type("y\r")
    assert terminal.end() == 0, terminal.seen
    assert "It asks for the password of" in terminal.seen
    assert f"-p {ssh_server.port} " in copying.read_text()
    assert ssh_server.known_hosts.read_text().split()[:3] == [f"[localhost]:{ssh_server.port}", *ssh_server.host_key]
    worker = {"host": "localhost", "ssh_port": ssh_server.port}
    hosts = json.loads((tmp_path / "distributed_hosts.json").read_text())
    assert hosts == {"master": "127.0.0.1", "workers": [worker]}

    copying.unlink()
    again = Terminal(tmp_path, *words)
    assert again.end() == 0 and "Are the two alike" not in again.seen and not copying.exists()
    assert json.loads((tmp_path / "distributed_hosts.json").read_text()) == hosts
    assert "localhost stands there already" in again.seen


def test_a_key_that_has_changed_is_refused(ssh_server, copying, tmp_path):
    host = ssh_server.host
    settings = resolve(host)
    key = pairing.host_key(host, settings)
    assert pairing.is_known(host, settings, key)
    ssh_server.known_hosts.write_text(ssh_server.known_hosts.read_text().replace("AAAAC3", "AAAAC4"))
    with pytest.raises(HostKeyError, match=r"known_hosts:1 has another\. Somebody may be"):
        pairing.is_known(host, settings, key)


def test_a_copy_of_a_machine_is_told_by_its_key(ssh_server, copying):
    settings = resolve(ssh_server.host)
    kind, blob = ssh_server.host_key
    ssh_server.known_hosts.write_text(f"mini.local,10.0.0.7 {kind} {blob} old\n")
    key = pairing.host_key(ssh_server.host, settings)
    assert pairing.others_with(key, settings) == ["mini.local,10.0.0.7"]
    pairing.accept(settings, key)
    assert ssh_server.known_hosts.read_text().splitlines()[0].startswith("mini.local")
    assert pairing.is_known(ssh_server.host, settings, key)


def test_a_machine_that_is_gone_says_so(ssh_server, copying):
    ssh_server.stop()
    with pytest.raises(HostError, match=r"(?s)Connection refused.*Linux: install openssh-server"):
        pairing.host_key(ssh_server.host, resolve(ssh_server.host))
    nobody = Host(address="no-such-host.invalid")
    with pytest.raises(HostError, match=r"(?s)the name no-such-host\.invalid is not known.*ping"):
        pairing.host_key(nobody, resolve(nobody))


def test_a_user_without_a_key_gets_one(ssh_server, copying, tmp_path, monkeypatch):
    host = Host(address="127.0.0.1", port=ssh_server.port)
    ssh_server.configure(f"Host *\n  IdentityFile {tmp_path / 'none'}\n")
    assert pairing.own_key(resolve(host)) is None
    monkeypatch.setattr(pairing, "OWN_KEY", tmp_path / "new" / "id_ed25519")
    monkeypatch.setattr(pairing, "_status", lambda command: subprocess.run([*command, "-N", ""]).returncode)
    assert pairing.make_key() == tmp_path / "new" / "id_ed25519.pub"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    ssh_server.configure(f"Host *\n  IdentityFile {ssh_server.key}\n")
    assert pairing.own_key(resolve(host)) == Path(f"{ssh_server.key}.pub")


@pytest.mark.parametrize(
    ("answer", "kept"), [("y", ["127.0.0.1", "other.local"]), ("n", ["localhost", "other.local", "127.0.0.1"])]
)
def test_a_machine_with_a_new_address_takes_its_old_place_and_a_copy_does_not(
    ssh_server, copying, tmp_path, answer, kept
):
    old = {"host": "localhost", "ssh_port": ssh_server.port, "project_path": "~/mine"}
    hosts = tmp_path / "distributed_hosts.json"
    hosts.write_text(json.dumps({"master": "10.0.0.1", "workers": [old, "other.local"]}))
    kind, blob = ssh_server.host_key
    ssh_server.known_hosts.write_text(
        f"[localhost]:{ssh_server.port} {kind} {blob}\n[127.0.0.1]:{ssh_server.port} {kind} {blob}\n"
    )
    pairing_again = Terminal(tmp_path, "hosts", "pair", "127.0.0.1", "--port", str(ssh_server.port), "--no-setup")
    pairing_again.expect("has localhost, with the same key. Is that this machine, under another name or address?")
    pairing_again.type(answer + "\r")
    assert pairing_again.end() == 0, pairing_again.seen
    workers = json.loads(hosts.read_text())["workers"]
    named = [worker if isinstance(worker, str) else worker["host"] for worker in workers]
    assert named == kept and workers[0]["project_path"] == "~/mine"
