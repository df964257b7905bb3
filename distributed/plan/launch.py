"""What the launcher of a run needs to know: run.json, and shipment.json, which names the files that each host needs.

With the latter the launcher can send them again during the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from distributed.hosts.paths import SyncItem
from distributed.run_dir.folder import as_typed
from distributed.ssh.host import Host
from whisper_tuner.errors import ConfigError, RunError
from whisper_tuner.files import atomic_path, sync_folder, write_atomically
from whisper_tuner.text import parse_json

from .job import OtherSet
from .json_fields import build, json_of
from .run_spec import CHECKPOINTS, SPEC, RunSpec

FILE_LISTS = "shipment.json"  # in a run's folder
PARTS = (".safetensors", ".json")  # of a checkpoint, in the order in which exogym writes them
UNUSABLE = "This run cannot be used any more: start a new one."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One worker to start. `host` is None on this machine; `label` stands before each of its lines."""

    label: str
    spec: RunSpec
    host: Host | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The content of run.json. `address` is this machine's own, where the ranks meet.

    forecast: what was expected of it, see forecast.Forecast.kept; {} where that was not known.
    stated: the settings that the user has made; all others are defaults, or were chosen.
    leaks: tell of clips that are both trained and measured. added: the last rows of train.csv are those of other lists;
    how many are of which.
    notify: how the user is told of what happens. It may hold a token: no spec of a rank has it, nor does a report.
    """

    run_id: str
    name: str
    ranks: tuple[Rank, ...]
    address: str = "127.0.0.1"
    timeout_s: float = 120.0
    min_hosts: int = 1
    notify: str | None = dataclasses.field(default=None, repr=False)
    manifests: dict = dataclasses.field(default_factory=dict)  # kind: the user's own file
    evaluate: bool = True
    test: str | None = None
    keeps: tuple[OtherSet, ...] = ()
    master: Host | None = None
    created: float = 0.0
    versions: dict = dataclasses.field(default_factory=dict)
    forecast: dict = dataclasses.field(default_factory=dict)
    stated: tuple[str, ...] = ()
    test_clips: int = 0
    leaks: tuple[str, ...] = ()
    added: dict = dataclasses.field(default_factory=dict)

    def save(self, run_dir: Path) -> None:
        write_atomically(run_dir / "run.json", json_of(self, indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> Launch:
        """Read run.json. Raises RunError for a folder that holds no run, or a damaged one."""
        path = run_dir / "run.json"
        try:
            launch = build(cls, parse_json(path.read_text(encoding="utf-8")), str(path))
            if not launch.ranks:
                raise ConfigError(f"{path}: 'ranks' is empty")
            return launch
        except ConfigError as error:  # it names the place in the file
            raise RunError(str(error), remedy=UNUSABLE) from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: {error}", remedy=UNUSABLE) from None

    def resume_command(self, run_dir: Path) -> str:
        command = "distributed-train" if any(rank.host for rank in self.ranks) else "finetune"
        return f"multimac {command} --resume {as_typed(run_dir)}"


def change_hosts(run_dir: Path, before: Launch, after: Launch) -> None:
    """Make `after` the run.json. Checkpoints of this machine are found under its address, which may be another now.

    They have both names while run.json is replaced. So the run can go on from them after a crash at any line, with
    the hosts that it had or with those that it was to have.
    """
    old, new = (quote(launch.ranks[0].label, safe="") for launch in (before, after))
    # `runs recover` reads checkpoints by their spec.
    names = [*(f"*/{old}{part}" for part in PARTS), f"{old}{SPEC}"] if old != new else []
    renamed = [file for name in names for file in sorted((run_dir / CHECKPOINTS).glob(name))]
    for file in renamed:
        also = file.with_name(new + file.name.removeprefix(old))
        also.unlink(missing_ok=True)  # of an earlier attempt
        try:
            also.hardlink_to(file)
        except OSError:  # exFAT and some network drives have no hard links
            with atomic_path(also) as part:
                shutil.copyfile(file, part)
    for folder in {file.parent for file in renamed}:
        sync_folder(folder)
    after.save(run_dir)
    for file in renamed:
        file.unlink()


def save_items(run_dir: Path, items: Mapping[str, Sequence[SyncItem]], audio: Sequence[SyncItem]) -> None:
    """Remember model, manifests and audio of each host, and all audio; the code is looked for anew when it is sent.

    Hosts that the run had before keep theirs: it goes on with them if it never begins with these.
    """
    if not items:
        return
    before = {}
    with contextlib.suppress(RunError):  # there is none yet, or it is damaged
        before = load_items(run_dir)

    def listed(items: Sequence[SyncItem]) -> list[list[str]]:
        return [[str(item.local), item.remote] for item in items if not item.refuse_foreign]

    hosts = {host: listed(own) for host, own in {**before, **items}.items()}
    write_atomically(run_dir / FILE_LISTS, json.dumps({"hosts": hosts, "audio": listed(audio)}))


def load_items(run_dir: Path) -> dict[str, list[SyncItem]]:
    """Return model, manifests and audio of each host. Raises RunError."""
    return _load(run_dir)[0]


def load_audio(run_dir: Path) -> dict[str, SyncItem]:
    """Return all audio of a run by its name on the hosts. Raises RunError."""
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
