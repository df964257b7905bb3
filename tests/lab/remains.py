"""What a run may leave on the hosts: processes, listening ports, temporary files. One line each, with its host."""

from __future__ import annotations

import re

from lab.lab import Lab

# Parts of files, workers' sockets, what .sync holds but its index, its locks and the master's name, and the names that
# mkstemp and mkdtemp make for this project.
TEMPORARY = re.compile(r".*\.(part|new|sock)|\..+\.[a-z0-9_]{8}|(multimac|exogym)-.+")
SYNC, KEPT = ".sync", {"index.json", "lock", "master", "in-use"}


def processes(lab: Lab) -> list[str]:
    """All but sshd and its sessions: a host has nothing else of its own."""
    return [
        f"{host.name}: process {process}"
        for host in lab.hosts.values()
        for process in host.processes()
        if not process.command[0].startswith(("sshd:", "/usr/sbin/sshd"))
    ]


def ports(lab: Lab) -> list[str]:
    return [f"{host.name}: port {listener}" for host in lab.hosts.values() for listener in host.listeners()]


def files(lab: Lab, *folders: str) -> list[str]:
    """Temporary files below `folders`, which are absolute or relative to a host's home; some may not be there."""
    return [
        f"{host.name}: file {folder}/{path.relative_to(host.path(folder))}"
        for host in lab.hosts.values()
        for folder in folders
        for path in sorted(host.path(folder).rglob("*"))
        if TEMPORARY.fullmatch(path.name) or (path.parent.name == SYNC and path.name not in KEPT)
    ]


def everything(lab: Lab, *folders: str) -> list[str]:
    return processes(lab) + ports(lab) + files(lab, *folders)
