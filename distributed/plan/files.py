"""shipment.json: which files of a run each host needs, so that the launcher can send them again during the run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from distributed.hosts.paths import SyncItem
from whisper_tuner.errors import RunError
from whisper_tuner.files import write_atomically
from whisper_tuner.json_text import parse_json

FILE_LISTS = "shipment.json"  # in a run's folder


def save_items(run_dir: Path, items: Mapping[str, Sequence[SyncItem]], audio: Sequence[SyncItem]) -> None:
    """Model, manifests and audio of each host, and all audio, for later; the code is looked for anew then.

    Hosts that the run had before keep theirs: it goes on with them if it never begins with these.
    """
    if not items:
        return
    before = {}
    with contextlib.suppress(RunError):  # there is none yet, or it is damaged
        before = load_items(run_dir)
    hosts = {host: _listed(own) for host, own in {**before, **items}.items()}
    write_atomically(run_dir / FILE_LISTS, json.dumps({"hosts": hosts, "audio": _listed(audio)}))


def _listed(items: Iterable[SyncItem]) -> list[list[str]]:
    return [[str(item.local), item.remote] for item in items if not item.refuse_foreign]


def load_items(run_dir: Path) -> dict[str, list[SyncItem]]:
    """Model, manifests and audio of each host. Raises RunError."""
    return _load(run_dir)[0]


def load_audio(run_dir: Path) -> dict[str, SyncItem]:
    """All audio of a run by its name on the hosts. Raises RunError."""
    return {item.remote: item for item in _load(run_dir)[1]}


def _load(run_dir: Path) -> tuple[dict[str, list[SyncItem]], list[SyncItem]]:
    def items(listed: list[list[str]]) -> list[SyncItem]:
        if not all(isinstance(name, str) for names in listed for name in names):
            raise TypeError("a name that is no text")
        return [SyncItem(local=Path(local), remote=remote) for local, remote in listed]

    try:
        data = parse_json((run_dir / FILE_LISTS).read_text(encoding="utf-8"))
        return {host: items(own) for host, own in data["hosts"].items()}, items(data["audio"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{run_dir / FILE_LISTS}: cannot be read: {error}", remedy="Resume with --no-sync, or start a new run."
        ) from None
