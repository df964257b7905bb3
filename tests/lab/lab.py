"""Build a lab of several hosts, find it again from another process, and take it down whatever happened."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lab import cpu, keys, memory, network
from lab.errors import LabError, LabLacks
from lab.hosts import LabHost, LabProcess
from lab.machine import needed, tell, wished

PROJECT = Path(__file__).resolve().parents[2]
RECORD = Path("/run/mmlab")  # there while a lab is up, so that another process finds it
CLAIM = Path("/run/mmlab.lock")  # held while a lab is claimed
PROGRAMS = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "/usr/sbin/sshd")


class Lab:
    """Hosts h1..hN on one bridge; h1 is the master: it sees the project and holds the owner's key.

    cpus: cores per host; memory: bytes per host; rate: link speed in tc's words, each way. Workers see neither this
    repository, nor the package registry's settings, nor the real home. `shared_home=True` is the quick variant: every
    host uses one home and sees the repository and its interpreter. With `folder`, the hosts' homes outlive the lab and
    are used again. shown: folders of the real home that hosts see which see the repository.
    """

    def __init__(
        self,
        *,
        hosts: int = 3,
        cpus: float | None = None,
        memory: int | None = None,
        rate: str | None = "100mbit",
        shared_home: bool = False,
        folder: Path | None = None,
        shown: Sequence[Path] = (),
    ):
        self.size, self.cpus, self.rate, self.shared_home = hosts, cpus, rate, shared_home
        self.memory = memory
        self.folder, self.shown = folder, (PROJECT, *shown)
        self.hosts: dict[str, LabHost] = {}

    def __enter__(self) -> Lab:
        return self.up(owner=os.getpid())

    def __exit__(self, *exc: object) -> None:
        down()

    def up(self, owner: int = 0) -> Lab:
        """Build everything. `owner` is the process that takes the lab down; 0: nobody, it stays until `down`."""
        check_machine()
        claim(owner)
        try:
            self._build()
        except BaseException:
            down()
            raise
        return self

    def _build(self) -> None:
        temporary = self.folder is None
        folder = Path(tempfile.mkdtemp(prefix="mmlab-")) if temporary else self.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        save(folder=folder, temporary=temporary)
        if not (folder / "owner_key").exists():
            keys.new_key(folder / "owner_key", "lab owner")
        with needed("network bridges"):
            network.add_bridge()
        for index in range(1, self.size + 1):
            host = self._start(f"h{index}", index, folder)
            self.hosts[host.name] = host
            save(hosts=[host_json(h) for h in self.hosts.values()])
        self._meet()
        tell()

    def _start(self, name: str, index: int, folder: Path) -> LabHost:
        home = folder / "homes" / ("shared" if self.shared_home else name)
        keys.authorize(home, folder / "owner_key.pub")
        bare = index > 1 and not self.shared_home
        tmp = folder / "tmp" / name if bare else None
        if tmp is not None:
            tmp.mkdir(parents=True, exist_ok=True)
            tmp.chmod(0o1777)
        if index == 1:
            keys.own(home, folder / "owner_key")
        host = LabHost(
            name=name,
            address=network.address(index),
            home=home,
            tmp=tmp,
            hidden=(PROJECT, *registry_paths()) if bare else (),
            shown=() if bare else (Path(sys.base_prefix), *self.shown),
        )
        network.add_host(name, index)
        with wished(network.LIMITED_LINKS, "they are as fast as memory"):
            network.set_rate(name, self.rate)
        with wished(cpu.SHARES, "hosts take what they get of the processor"):
            cpu.add_group(name, self.cpus)
        if self.memory is not None:
            with needed(memory.LIMITS):
                memory.set_limit(name, self.memory)
        config = keys.write_sshd(folder / "sshd" / name, host.address, name)
        log = folder / f"{name}.sshd.log"
        log.write_bytes(b"")
        return replace(host, pid=host.start(config, log))

    def _meet(self) -> None:
        """Connect from the master to each host once, as the owner would, so that known_hosts has their keys."""
        known = self.hosts["h1"].home / ".ssh" / "known_hosts"
        known.unlink(missing_ok=True)
        for host in self.hosts.values():
            result = self.exec("h1", ["ssh", "-o", "StrictHostKeyChecking=accept-new", host.address, "true"])
            if result.returncode:
                raise LabError(f"h1 cannot reach {host.name} over SSH: {result.stderr.strip()}")

    @classmethod
    def current(cls) -> Lab:
        """The lab that is up now, perhaps made by another process."""
        record = load()
        if not record.get("hosts"):
            raise LabError("no lab is up: `python -m lab up`")
        lab = cls(hosts=len(record["hosts"]), folder=Path(record["folder"]))
        lab.hosts = {host.name: host for host in map(host_from_json, record["hosts"])}
        return lab

    def __getitem__(self, host: str) -> LabHost:
        if host not in self.hosts:
            raise LabError(f"no host {host!r} in this lab: {', '.join(self.hosts)}")
        return self.hosts[host]

    def popen(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: int | None = subprocess.PIPE,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.Popen:
        """Start `command` in a host, text pipes, in a session of its own: signal it with os.killpg or `signal`."""
        line = self[host].command(command, env=env, cwd=cwd)
        return subprocess.Popen(line, stdin=stdin, stdout=stdout, stderr=stderr, text=True, start_new_session=True)

    def exec(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        input: str | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess:
        """Run `command` in a host to its end; text output."""
        line = self[host].command(command, env=env, cwd=cwd)
        stdin = subprocess.DEVNULL if input is None else None
        return subprocess.run(line, stdin=stdin, input=input, capture_output=True, text=True, timeout=timeout)

    def processes(self, host: str, pattern: str = "") -> list[LabProcess]:
        """Live processes of a host whose command line contains `pattern`."""
        return [process for process in self[host].processes() if pattern in " ".join(process.command)]

    def kill(self, host: str, pattern: str) -> list[LabProcess]:
        return self[host].signal(signal.SIGKILL, pattern)

    def freeze(self, host: str, pattern: str = "") -> list[LabProcess]:
        """Stop a host's processes in mid-air, but not its sshd; `faults.asleep` is a closed lid."""
        return self[host].signal(signal.SIGSTOP, pattern)

    def thaw(self, host: str, pattern: str = "") -> list[LabProcess]:
        return self[host].signal(signal.SIGCONT, pattern)

    def link(self, host: str, *, up: bool) -> None:
        network.set_link(self[host].name, up)

    def set_rate(self, host: str, rate: str | None) -> None:
        network.set_rate(self[host].name, rate)

    def set_cpus(self, host: str, cpus: float | None) -> None:
        cpu.set_share(self[host].name, cpus)

    def set_memory(self, host: str, limit: int | None) -> None:
        memory.set_limit(self[host].name, limit)

    def set_cpus_of_first_threads(self, host: str, pids: Iterable[int], cpus: float) -> None:
        cpu.set_share_of_first_threads(self[host].name, pids, cpus)

    def drop(self, host: str, peer: str | None = None) -> None:
        """Drop packets between a host and `peer` (a host's name; None: everybody)."""
        network.drop(self[host].name, self[peer].address if peer else None)

    def pass_all(self, host: str) -> None:
        network.pass_all(self[host].name)


def check_machine() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise LabLacks("the lab needs Linux and root")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise LabLacks(f"not installed: {', '.join(missing)} (apt-get install openssh-server iproute2 nftables)")
    with needed("namespaces, as root in a container may"):
        network.sh("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true")


def claim(owner: int) -> None:
    """Take the one place for a lab; one whose owner is gone is cleared away first."""
    with CLAIM.open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        record = load()
        if record and record["owner"] == 0:
            raise LabError("a lab is up already: `python -m lab down` first")
        if record and alive(record["owner"]):
            raise LabError(f"a lab is up already, owned by process {record['owner']}")
        down()
        RECORD.mkdir()
        save(owner=owner)


def alive(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


def load() -> dict:
    try:
        return json.loads((RECORD / "lab.json").read_text())
    except FileNotFoundError:
        return {}


def save(**values: object) -> None:
    record = load() | {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    temporary = RECORD / "lab.json.new"
    temporary.write_text(json.dumps(record))
    temporary.rename(RECORD / "lab.json")


def host_json(host: LabHost) -> dict:
    return json.loads(json.dumps(asdict(host), default=str))


def host_from_json(values: dict) -> LabHost:
    tmp = Path(values["tmp"]) if values["tmp"] else None
    paths = {name: tuple(map(Path, values[name])) for name in ("hidden", "shown")}
    return LabHost(**values | paths | {"home": Path(values["home"]), "tmp": tmp})


def registry_paths() -> list[Path]:
    """Where this machine finds packages without the network: pip's settings and local folders of packages."""
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    words = listing.replace("'", " ").replace("\\n", " ").split()
    local = [Path(word.removeprefix("file://")) for word in words if word.startswith(("file:///", "/"))]
    folders = [path for path in local if path.is_dir() and ("wheel" in str(path) or "pypi" in str(path))]
    return [Path("/etc/pip.conf"), *sorted(set(folders))]


def down(timeout: float = 5.0) -> None:
    """Remove every process, namespace, link, group and folder of any lab; does nothing if there is none."""
    record = load()
    deadline = time.monotonic() + timeout
    while (pids := lab_pids()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    network.remove_all()
    cpu.remove_all()
    memory.remove_all()
    if record.get("temporary") and Path(record["folder"]).name.startswith("mmlab-"):
        shutil.rmtree(record["folder"], ignore_errors=True)
    shutil.rmtree(RECORD, ignore_errors=True)


def lab_pids() -> set[int]:
    pids = {pid for name in network.namespaces() for pid in network.namespace_pids(name)}
    return pids | {pid for folder in cpu.groups() for pid in cpu.pids(folder)}
