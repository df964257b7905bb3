"""away.json: the hosts that a person has asked to leave out of a running run. The launcher looks at it each second."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from exogym.config import nearest
from whisper_tuner.errors import ConfigError, RunError
from whisper_tuner.files import write_atomically
from whisper_tuner.text import parse_json

from .folder import as_typed
from .summary import NOT_AS_WRITTEN, read_run

AWAY = "away.json"
ASKED = "as asked"  # the reason that is told of such a host


def read_away(run_dir: Path) -> tuple[str, ...]:
    """Return the hosts that are to be left out; none if the file cannot be read."""
    try:
        hosts = parse_json((run_dir / AWAY).read_text(encoding="utf-8"))["hosts"]
        return tuple(host for host in hosts if isinstance(host, str))
    except (OSError, *NOT_AS_WRITTEN):
        return ()


def set_away(run_dir: Path, host: str, away: bool) -> None:
    """Ask for a host to be left out, or to take part again.

    Raises ConfigError for one that is not in the run, RunError for one that the run cannot do without.
    """
    run = read_run(run_dir, only_asked=True)
    known = run.hosts
    if away and run.needs_all_hosts:
        remedy = f"Stop the run, and go on later: multimac runs stop {as_typed(run_dir)}"
        raise RunError("each host of a pipeline has a part of the model, so none can be left out", remedy=remedy)
    if host not in known:
        what = f"{host!r} is no host of run {run_dir.name}{nearest(host, known)}"
        raise ConfigError(what, remedy=f"Its hosts: {', '.join(known) or 'none'}.")
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # others may ask at this moment: a page, and commands
        others = [other for other in read_away(run_dir) if other != host]
        write_atomically(run_dir / AWAY, json.dumps({"hosts": [*others, host] if away else others}) + "\n")
    finally:
        os.close(handle)


def forget_away(run_dir: Path) -> None:
    """Begin with all hosts: who was left out when a run was stopped may be free by the time that it is resumed."""
    (run_dir / AWAY).unlink(missing_ok=True)
