"""A real sshd on loopback, run by the current user on a free port; needs no root."""

from __future__ import annotations

import atexit
import contextlib
import functools
import getpass
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.ssh.host import Host

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
CONFIG = """\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
MaxStartups 100
SetEnv HOME={folder}/home
Subsystem sftp internal-sftp
"""


def keygen(path: Path, *, passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True)
    return path


@functools.cache
def common_keys() -> Path:
    """Make the keys of all servers and of their user once: each server gets a copy."""
    folder = Path(tempfile.mkdtemp(prefix="multimac-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("id", "host_key"):
        keygen(folder / name)
    return folder


def free_port() -> int:
    """Below those that the system gives to whoever asks for any: none takes it before sshd has it, or has it again."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
            return probe.getsockname()[1]


class SshServer:
    """`home` stands in for the user's ~/.ssh: config, known_hosts, and the key that the server accepts.

    Sessions see the folder `home` beside it as their home; `pip_settings` there say that there is no registry.
    """

    def __init__(self, folder: Path):
        self.folder, self.home = folder, folder / "client"
        self.home.mkdir()
        self.pip_settings = folder / "home" / ".config" / "pip" / "pip.conf"
        self.pip_settings.parent.mkdir(parents=True)
        self.pip_settings.write_text("[global]\nno-index = true\n")
        self.key = self.home / "id"
        for name, place in {"id": self.home, "host_key": folder}.items():
            for suffix in ("", ".pub"):
                shutil.copy(common_keys() / f"{name}{suffix}", place)
        shutil.copy(self.home / "id.pub", folder / "authorized_keys")
        self.port = free_port()
        self.process: subprocess.Popen | None = None
        self.login = ""  # a line of sshd's configuration
        self.known_hosts = self.home / "known_hosts"
        self.config = self.home / "config"
        self.configure()
        self.trust()

    @property
    def worker(self) -> dict[str, object]:
        """Its entry in a hosts file, with this interpreter for its environment."""
        return {
            "host": "127.0.0.1",
            "ssh_port": self.port,
            "ssh_key_path": str(self.key),
            "project_path": str(self.folder / "project"),
            "python_env": sys.executable,
        }

    def configure(self, text: str = "") -> None:
        """Write the user's ssh configuration: `text`, then what every test needs."""
        self.config.write_text(
            f"{text}\nHost *\n  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n"
        )
        self.config.chmod(0o600)

    def trust(self) -> None:
        kind, blob = self.host_key
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {blob}\n")

    @property
    def host_key(self) -> tuple[str, str]:
        kind, blob, *_ = (self.folder / "host_key.pub").read_text().split()
        return kind, blob

    @property
    def host(self) -> Host:
        return Host(
            address="127.0.0.1",
            user=getpass.getuser(),
            port=self.port,
            key_path=self.key,
            project_path=str(self.folder / "project"),
        )

    def log_in_with(self, shell: Path, path: Path) -> None:
        """From now on, as if this were its user's login shell, with this PATH: sshd runs `SHELL -c LINE`."""
        script = self.folder / "login"
        script.write_text(f'#!/bin/sh\nPATH={path} exec {shell} -c "$SSH_ORIGINAL_COMMAND"\n')
        script.chmod(0o755)
        self.login = f"ForceCommand {script}\n"
        self.stop()
        self.start()

    def start(self) -> None:
        config = self.folder / "sshd_config"
        config.write_text(CONFIG.format(port=self.port, folder=self.folder) + self.login)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=log, start_new_session=True)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self.process.poll() is None:
            if self._answers():
                return
            time.sleep(0.02)
        raise RuntimeError((self.folder / "log").read_text())

    def stop(self) -> None:
        """Those who are logged in stay."""
        if self.process:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 5
        while self._answers() and time.monotonic() < deadline:  # a child that it has just forked still has its socket
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        except OSError:
            return False


@pytest.fixture
def ssh_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    if not (SSHD and SSH):
        if os.environ.get("CI") == "true":
            pytest.fail("sshd is not installed")
        pytest.skip("sshd is not installed: apt-get install openssh-server")
    folder = tmp_path / "ssh"
    folder.mkdir()
    server = SshServer(folder)
    # ssh finds ~/.ssh by the password file, not by $HOME: a wrapper on PATH gives it the test's own configuration.
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {SSH} -F {server.config} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    server.start()
    yield server
    server.stop()
    print("sshd:", (folder / "log").read_text())  # pytest shows it if the test has failed
