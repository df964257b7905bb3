"""Hosts, over a real sshd on loopback: exit status 5, nothing left on the host, no process left.

Firewalls, one-way links, wrong interfaces and pulled cables need a network: tests/integration/test_preflight.py; a
worker that is killed in training: tests/integration/test_distributed_runs.py.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from loopback_sshd import SshServer, keygen
from mistake_desk import Desk

from distributed.hosts.paths import code_items

PYTHON = sys.executable
CHECK = "hosts check --hosts hosts.json"
TRAIN = "distributed-train both --hosts hosts.json"
REMOVE = ("Remove ", "/venv there. Run: multimac hosts setup --hosts hosts.json")
NO_SSH = ("127.0.0.1: port ", "answers, but not as an SSH server does")
SETUP = "Run: multimac hosts setup --hosts hosts.json"


class Host:
    """The one worker of hosts.json; `entry` is what the hosts file says of it."""

    def __init__(self, desk: Desk, server: SshServer):
        self.desk, self.server = desk, server
        self.project = server.folder / "project"
        key = {"ssh_key_path": str(server.key), "ssh_port": server.port}
        self.entry = {"host": "127.0.0.1", **key, "python_env": PYTHON, "project_path": str(self.project)}
        desk.watched.append(server.folder / "home")

    def write(self, **changes) -> None:
        entry = {key: value for key, value in {**self.entry, **changes}.items() if value is not None}
        self.desk.write("hosts.json", json.dumps({"master": "localhost", "workers": [entry]}))


@pytest.fixture
def host(desk, ssh_server, no_torch) -> Host:
    host = Host(desk, ssh_server)
    host.write()
    return host


class WebPage(BaseHTTPRequestHandler):
    def log_message(self, *_about) -> None:
        """Its words on stderr would count as ours."""


def no_ssh_there(host: Host) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), WebPage)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host.write(ssh_port=server.server_port)


def silent_there(host: Host) -> None:
    host.desk.silent = socket.create_server(("127.0.0.1", 0))  # the system takes connections, nobody reads them
    host.write(ssh_port=host.desk.silent.getsockname()[1])


def changed_host_key(host: Host) -> None:
    kind, blob = keygen(host.desk.folder.parent / "other").with_suffix(".pub").read_text().split()[:2]
    host.server.known_hosts.write_text(f"[127.0.0.1]:{host.server.port} {kind} {blob}\n")


def venv(host: Host) -> Path:
    """An environment without any package."""
    folder = host.desk.folder.parent / "venv"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(folder)], check=True)
    host.write(python_env=str(folder))
    return next(folder.glob("lib/python*/site-packages"))


def another_version(host: Host) -> None:
    """The master's packages, but for one of another version that comes first."""
    site = venv(host)
    own = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    (site / "masters.pth").write_text(f"{own}\n")
    info = site / "peft-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.1\n")


def old_python(host: Host) -> None:
    """Says that it is 3.9, in all that is asked of it."""
    site = venv(host)
    (site / "old.pth").write_text("import sys; sys.version_info = (3, 9, 6, 'final', 0)\n")


def rival(host: Host) -> None:
    site = venv(host)
    (site / "distributed").mkdir()
    (site / "distributed" / "__init__.py").touch()
    (site / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(site)!r})\n")


def foreign_files(host: Host) -> None:
    (host.project / "distributed").mkdir(parents=True)
    (host.project / "distributed" / "fit.py").write_text("print('mine')\n")


def other_code(host: Host) -> None:
    for item in code_items():
        target = host.project / item.remote
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(item.local, target)
    (host.project / "distributed" / "fit.py").write_text("print('changed')\n")


def large(host: Host) -> None:
    """Known by its name: nothing is downloaded."""
    host.desk.change("config.ini", "base_model = model", "base_model = openai/whisper-large-v3")
    host.desk.change("config.ini", "batch_size = 2", "batch_size = 2048")


# name: (what is wrong; command; exit status; the message names; the remedy says)
MISTAKES = {
    "SSH is off": (
        lambda host: host.write(ssh_port=1),
        TRAIN,
        5,
        "127.0.0.1: port 1: Connection refused",
        ("Remote Login", "openssh-server"),
    ),
    "a web server answers at the port": (no_ssh_there, TRAIN, 5, NO_SSH, ("ssh_port", "Try: ssh -p ")),
    "a web server answers hosts sync": (no_ssh_there, "hosts sync both --hosts hosts.json", 5, NO_SSH, "ssh_port"),
    "nothing is said at the port": (silent_there, TRAIN, 5, NO_SSH, ("ssh_port", "Try: ssh -p ")),
    "the name is not known": (
        lambda host: host.write(host="no-such-host.invalid"),
        TRAIN,
        5,
        "no-such-host.invalid: the name no-such-host.invalid",
        "ping",
    ),
    "the key is not accepted": (
        lambda host: host.write(ssh_key_path=str(keygen(host.desk.folder.parent / "strange"))),
        TRAIN,
        5,
        ("127.0.0.1: no key was accepted", "strange"),
        ("run: ssh-copy-id -i ", "strange", " -p "),
    ),
    "the key file is not there": (
        lambda host: host.write(ssh_key_path=str(host.desk.folder / "id_none")),
        TRAIN,
        5,
        "127.0.0.1: there is no key {desk}/id_none",
        ("ssh_key_path", "ssh-keygen"),
    ),
    "the key has a passphrase, and there is no agent": (
        lambda host: host.write(ssh_key_path=str(keygen(host.desk.folder.parent / "locked", passphrase="secret"))),
        TRAIN,
        5,
        ("127.0.0.1: no key was accepted", "locked", "passphrase"),
        "Run: ssh-add ",
    ),
    "the host key is unknown": (
        lambda host: host.server.known_hosts.write_text(""),
        TRAIN,
        5,
        "127.0.0.1: its key is not known here: ssh-ed25519 SHA256:",
        ("Compare it", "accept it once with: ssh -p"),
    ),
    "the host key has changed": (
        changed_host_key,
        TRAIN,
        5,
        ("127.0.0.1: its key has CHANGED", "known_hosts:1"),
        "ssh-keygen -R",
    ),
    "the host key is revoked": (
        lambda host: host.server.known_hosts.write_text("@revoked " + host.server.known_hosts.read_text()),
        TRAIN,
        5,
        "marked @revoked",
        "Do not connect",
    ),
    "~/.ssh/config is broken": (
        lambda host: host.server.configure("NoSuchOption yes"),
        TRAIN,
        5,
        ("127.0.0.1", "nosuchoption"),
        "Correct ~/.ssh/config",
    ),
    "no environment": (
        lambda host: host.write(python_env="/no/such/environment"),
        TRAIN,
        5,
        "127.0.0.1: there is no usable Python at /no/such/environment",
        SETUP,
    ),
    "no packages": (lambda host: venv(host), TRAIN, 5, ("127.0.0.1: packages differ", "accelerate is missing"), SETUP),
    "a package of another version": (another_version, TRAIN, 5, ("127.0.0.1", "peft 0.1 (here "), SETUP),
    "Python is too old": (old_python, TRAIN, 5, ("127.0.0.1", "/venv/bin/python: 3.9, needs 3.11 to 3.14"), REMOVE),
    "another package of our name": (rival, TRAIN, 5, "127.0.0.1", "pip uninstall distributed"),
    "its shell prints a welcome": (
        lambda host: (host.server.folder / "home" / ".bashrc").write_text("echo Welcome to this host\n"),
        CHECK,
        5,
        "127.0.0.1: its shell prints text of its own: 'Welcome",
        "[ -t 1 ]",
    ),
    "the project folder cannot be made": (
        lambda host: host.write(project_path="/dev/null/multimac"),
        TRAIN,
        5,
        ("127.0.0.1", "/dev/null cannot be used for /dev/null/multimac"),
        "project_path",
    ),
    "the project folder is a file": (
        lambda host: host.project.write_text("mine"),
        TRAIN,
        5,
        ("127.0.0.1", "project"),
        "project_path",
    ),
    "files of somebody else in the project folder": (
        foreign_files,
        TRAIN,
        5,
        ("127.0.0.1", "1 file that no sync put there", "distributed/fit.py"),
        ("Move that folder away", "project_path"),
    ),
    "other code on the host, and --no-sync": (
        other_code,
        f"{TRAIN} --no-sync",
        5,
        ("127.0.0.1: files of the code", "distributed/fit.py"),
        "without --no-sync",
    ),
    "memory far too small": (large, TRAIN, 5, ("127.0.0.1", "training needs about"), "method = lora"),
    "shards of another host": (
        lambda host: host.desk.change("config.ini", "max_steps = 2\n", "max_steps = 2\nshards = a b\n"),
        TRAIN,
        3,
        "shards is for one machine",
        "Remove shards",
    ),
    "an interface that there is not": (
        lambda host: host.write(interface="nope0"),
        TRAIN,
        3,
        ("127.0.0.1", "nope0 is not an interface"),
        "Its interfaces: ",
    ),
    "hosts setup with an unknown host key": (
        lambda host: host.server.known_hosts.write_text(""),
        "hosts setup --hosts hosts.json",
        5,
        "127.0.0.1: its key is not known here",
        "accept it once",
    ),
}


QUICK = {"SSH is off", "the key is not accepted", "the host key is unknown", "the host key has changed"}
QUICK |= {"no packages", "Python is too old", "memory far too small", "another package of our name"}
QUICK |= {"a web server answers hosts sync", "hosts setup with an unknown host key"}


@pytest.mark.parametrize(
    ("make", "command", "status", "place", "remedy"),
    [
        pytest.param(*mistake, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, mistake in MISTAKES.items()
    ],
)
def test_hosts(desk, host, make, command, status, place, remedy):
    make(host)
    there = host.project.parent / "project"
    had = sorted(there.rglob("*")) if there.is_dir() else there.exists()
    desk.refuses(command, status, place, remedy)
    new = set(there.rglob("*")) - set(had) if isinstance(had, list) else ()
    assert (isinstance(had, list) or there.exists() == had) and not [path for path in new if ".sync" not in path.parts]


@pytest.mark.slow
def test_hosts_check_as_json_tells_the_same_problem(desk, host):
    host.write(ssh_port=1)
    said = desk.refuses(f"{CHECK} --json", 5, "127.0.0.1: port 1: Connection refused", "Remote Login")
    status, out, err = desk.run(f"{CHECK} --json")
    found = json.loads(out)
    assert (status, err) == (5, said)
    assert [facts["reached"] for facts in found["hosts"]] == [True, False]
    [problem] = [problem for problem in found["problems"] if problem["severity"] == "error"]
    assert (problem["hosts"], problem["check"]) == (["127.0.0.1"], "ssh")


@pytest.mark.slow
def test_a_gpu_that_is_not_there(desk, ssh_server, monkeypatch):
    """torch must be asked, however busy the machine is."""
    for name, seconds in {"look.TORCH_ALARM_S": 20, "preflight.TORCH_BY": 22.0, "preflight.LINKS_BY": 24.0}.items():
        monkeypatch.setattr(f"distributed.checkup.{name}", seconds)
    Host(desk, ssh_server).write(device="cuda:99")
    desk.refuses(TRAIN, 5, "127.0.0.1: device cuda:99 is set", ("Set device to auto or cpu", "nvidia-smi"))


def test_the_disk_of_a_host_is_full(desk, host):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk is mounted by root on Linux")
    host.project.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(host.project)], check=True)
    try:
        desk.refuses(TRAIN, 5, ("127.0.0.1: ", "free for"), ("Free some space", "project_path"))
        assert not list(host.project.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(host.project)], check=True)
