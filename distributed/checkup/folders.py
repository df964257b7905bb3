"""Finds hosts that share a folder: of two that do, each would replace and remove what the other has.

Neither links hide that, nor the names by which the hosts know a network disk. See distributed/hosts/agent/files.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from unicodedata import normalize

from distributed.hosts.paths import PROJECT
from distributed.hosts.sync import taken, this_master
from distributed.ssh.connection import Remote
from distributed.ssh.host import PROJECT_PATH, Host
from distributed.ssh.machine import LocalMachine
from whisper_tuner.errors import HostError

from .findings import Finding
from .look import BUSY, Look, ask_all
from .session import Session

LOOK_S = 20.0
SHARED = "these folders are the same, or one is in another: each host would replace and remove what the others have"
OWN_FOLDERS = (
    "If two are one machine, name it once. Else give each worker its own folder by one line at the top of the hosts"
    f' file, and no other project_path below it: "project_path": "{PROJECT_PATH}-{{host}}". Then: multimac hosts setup'
)


def shared_folders(master: Host, remotes: Sequence[Remote]) -> list[Finding]:
    """Find what is wrong with the folders of hosts, before anything is changed there."""
    looks = [Look(0, master), *(Look(number, remote.host) for number, remote in enumerate(remotes, 1))]
    try:
        for look, machine in zip(looks, [LocalMachine(master.address), *remotes], strict=True):
            look.folders = [machine.expand(look.facts.host.project_path) if look.number else str(PROJECT)]
            try:
                look.session = Session(machine, look.facts.host.python if look.number else sys.executable)
            except HostError as error:
                look.failed("folder", error)
        shared = folder_problems([look for look in looks if look.session], time.monotonic() + LOOK_S)
        return [*shared, *(problem for look in looks for problem in look.problems)]
    finally:
        for look in looks:
            if look.session:
                look.session.close()


def folder_problems(looks: Sequence[Look], deadline: float, *, sync: bool = True) -> list[Finding]:
    """Find what hosts with a session share. What is wrong with one alone is added to its look.

    sync: whether new files will be sent.
    """

    def call_all(op: str, **request: list[str]) -> Iterator[tuple[Look, dict]]:
        def failed(look: Look, error: HostError) -> None:
            look.failed("folder", error, remedy=f"{BUSY} {look.name}")

        return ask_all(looks, op, lambda look: {"folders": look.folders, **request}, deadline, failed)

    marked = list(call_all("mark", master=this_master()))
    marks = {name: (look, below) for look, answer in marked for name, below in answer["marks"]}
    sharing = set()
    for look, answer in call_all("seen", marks=list(marks)):
        for name, above in answer["seen"]:
            other, below = marks.get(name, (look, above))
            if other is not look and are_nested(above, below):
                sharing |= {look.number, other.number}
    for look, answer in marked:
        other = answer["master"] if look.number else ""
        if answer["busy"] and other:
            look.failed("folder", taken(look.name, other, look.folders[0]))
        elif other and not sync:
            what = f"{other}, another master, sent its files last"
            look.failed("folder", HostError(look.name, what, remedy="Leave --no-sync out."))
    if not (group := [look for look in looks if look.number in sharing]):
        return []
    what = f"{', '.join(f'{look.name} ({look.folders[0]})' for look in group)}: {SHARED}"
    return [Finding(hosts=tuple(look.name for look in group), what=what, remedy=OWN_FOLDERS, check="folder")]


def are_nested(one: Sequence[str], other: Sequence[str]) -> bool:
    """Tell from the names that lead to two folders from one place if they are the same, or one is in the other.

    Upper and lower case are the same on most Macs, and so is an accent as a character of its own.
    """
    pairs = zip(one, other, strict=False)  # to the end of the shorter
    return all(len({normalize("NFKD", name).casefold() for name in pair}) == 1 for pair in pairs)
