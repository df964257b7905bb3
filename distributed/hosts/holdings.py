"""What hosts hold of ours, and its removal: the caller's side of agent/holdings.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from distributed.ssh.connection import Remote
from whisper_tuner.errors import HostError

from .agent_call import agent_call
from .environment import MADE_BY, REMOTE_LISTS, REMOTE_WHEELS
from .paths import STORE

AUDIO = "audio"
RUN = f"runs/{'[0-9]' * 8}-{'[0-9]' * 6}-*"
# By kind, in the order of removal: names below the project folder that only we use. The records of what was sent, by
# which a removal that broke off goes on, come last.
KINDS = {
    AUDIO: [f"{STORE}/data", f"{STORE}/bundles", f"{STORE}/cache", ".sync/*.part", ".sync/*.copy"],
    "models": [f"{STORE}/models", f"{STORE}/evaluated"],
    "runs": [f"{RUN}/checkpoints", f"{RUN}/final", f"{RUN}/final[-.]*"],
    "environment": [],  # by a mark, see the agent
    "packages": [REMOTE_WHEELS, REMOTE_LISTS],
    "code": [],  # by the record
    "records": [".selftest-*", ".multimac-mark-*", f"{STORE}/*", ".sync/*"],
}


def holdings(remote: Remote, kinds: Sequence[str], *, remove: bool = False) -> dict[str, Any]:
    """List what a host holds of these kinds, and what of others lies in the folder `root`; `remove`: remove it then.

    Raises HostError, also for a host that is at work, and for a project folder that no sync has made.
    """
    root = remote.project
    environments = {f"{root}/.venv", str(PurePosixPath(remote.python).parent.parent)}
    found = agent_call(
        remote,
        "holdings",
        root=root,
        unwanted=list(kinds) if remove else [],
        kinds=list(KINDS.items()),
        environments=sorted(environments),
        made_by=MADE_BY,
    )
    if found["checkout"]:
        what = f"{root} is a checkout of this project, this machine's own or another: it has a cli_typer.py"
        remedy = f"What a sync has put there is in {root}/{STORE}: look at it there."
        raise HostError(remote.name, what, remedy=remedy)
    if found["in_use"]:
        what = f"{found['in_use']} is in progress in {root}"
        raise HostError(remote.name, what, remedy="Wait for its end, or on its master: multimac runs stop RUN")
    held = [row for row in found["held"] if row["kind"] in kinds]
    return {"host": remote.name, "root": root, "held": held, "others": found["others"], "named": found["named"]}
