"""Shows files on their way to the hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.progress import TaskID

from distributed.hosts.keep_awake import hosts_awake
from distributed.hosts.paths import PRUNED, SyncItem
from distributed.hosts.sync import Progress, sync
from distributed.ssh.connection import Remote
from whisper_tuner.text import counted, size

from .progress import progress, transfer

STEPS_EVERYWHERE = "steps on each machine"


@contextlib.contextmanager
def transfers(console: Console, then: str = "") -> Iterator[Progress]:
    """A bar for each host; gives the progress callback of sync and setup. then: what goes on all the while."""
    tasks: dict[str, TaskID] = {}
    with progress(console, transfer) as bars:
        if then:
            bars.add_task(then, total=None)

        def show(host: str, done: int, total: int | None, file: str) -> None:
            if host not in tasks:
                tasks[host] = bars.add_task(host, total=total)
            bars.update(tasks[host], completed=done, total=total, visible=total is None or done < total)

        yield show


def send(console: Console, items: Mapping[str, Sequence[SyncItem]], remotes: Sequence[Remote]) -> None:
    """Bring code, base model, manifests and each host's shard up to date. Raises DataError, HostError."""
    with hosts_awake(remotes), transfers(console) as show:
        reports = sync(remotes, items, show, prune=PRUNED)
    for report in reports:
        said = f"{counted(report.files, 'file')}, {size(report.bytes)} sent" if report.files else "up to date"
        console.print(f"{report.host}: {said} in {report.seconds:.1f} s")
