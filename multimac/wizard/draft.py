"""What has been answered so far, and the files that follow from it: sections of config.ini, manifests, a hosts file."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from distributed.plan.forecast import Speed
from distributed.plan.job import Job, resolve
from distributed.ssh.host import Hosts
from whisper_tuner.config import ConfigFile, Section, read_text, with_sections
from whisper_tuner.data.dataset import Sample, write_manifest
from whisper_tuner.data.formats.rows import AS_IT_IS, Reading
from whisper_tuner.errors import ConfigError
from whisper_tuner.files import shown, write_shared
from whisper_tuner.model.memory import ModelShape

KINDS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Model:
    """`section` is the name of its [model:NAME], if any; `base_model` is a folder's absolute path or a hub id."""

    base_model: str
    section: str = ""
    shape: ModelShape | None = None  # None: not known without a download
    learning_rate: str = ""  # as its section has it


@dataclass(kw_only=True)
class Data:
    """The recordings, by kind: `manifests` as they were found, those of a `split` still to be written, all `samples`.

    source: what the user named. reading: what they, or its section, say of its columns. language: as its section has
    it. stated_language: the code that the recordings' own lists give. is_doubtful: there are rows to look at, by a
    command that needs the saved profile.
    """

    section: str = ""
    source: Path = Path()
    reading: Reading = AS_IT_IS
    language: str = ""
    stated_language: str = ""
    manifests: dict[str, Path] = field(default_factory=dict)
    split: dict[str, Path] = field(default_factory=dict)
    samples: dict[str, tuple[Sample, ...]] = field(default_factory=dict)
    is_doubtful: bool = False


@dataclass(kw_only=True)
class Group:
    """The machines to train on. `text` is what the hosts file will hold; None: it holds that already.

    bytes_s: the speed of the slowest link between them, if it was measured. spare_bytes: see automatic.Measured.
    machine_workers: of each host, see RunSpec. speeds: of each host, if they were measured. frozen_precision: what
    fits into the smallest, as the run itself will choose it.
    """

    hosts: Hosts
    path: Path
    text: str | None = None
    bytes_s: float | None = None
    spare_bytes: float | None = None
    machine_workers: tuple[int, ...] = ()
    speeds: Sequence[Speed] = ()
    frozen_precision: str = "auto"


@dataclass(kw_only=True)
class Draft:
    config_path: Path
    config_text: str
    model: Model
    data: Data
    language: str = ""
    method: str = "full"
    settings: dict[str, str] = field(default_factory=dict)  # epochs, learning_rate, batch_size, and BEST if wanted
    group: Group | None = None
    strategy: dict[str, str] = field(default_factory=dict)
    name: str = "wizard"

    @property
    def config(self) -> ConfigFile:
        return ConfigFile(self.config_path, self.config_text)

    @property
    def run_name(self) -> str:
        """The section that is run."""
        return f"{self.name}-hosts" if self.group else self.name

    def sections(self) -> list[Section]:
        """Return the sections to be added to config.ini, or replaced in it."""
        data = self.data
        found: list[Section] = []
        paths = data.manifests | data.split
        manifests = {kind: self._inside(paths[kind]) for kind in KINDS if kind in paths}
        model = self.model
        profile = {"model": model.section} if model.section else {"base_model": self._inside(Path(model.base_model))}
        profile["dataset"] = data.section or self.name
        columns = {key: value for key, value in vars(data.reading).items() if value}
        if not data.section:
            more = {} if data.split else columns  # lists that were split are our own
            more |= {"language": self.language} if self.language else {}
            found.append((f"dataset:{self.name}", manifests | more))
        elif self.language != data.language:
            profile["language"] = self.language
        profile |= {"method": self.method} | self.settings
        if data.section and data.split:
            profile |= manifests | dict.fromkeys(columns, "")
        found.append((f"profile:{self.name}", profile))
        if self.group:
            hosts = {"hosts_config": self._inside(self.group.path)}
            found.append((f"distributed:{self.run_name}", {"base_profile": self.name} | self.strategy | hosts))
        return found

    def extended_config(self) -> ConfigFile:
        """Return config.ini as it will be. Raises ConfigError."""
        return ConfigFile(self.config_path, with_sections(self.config_text, self.sections()))

    def job(self) -> Job:
        """Resolve the profile. Raises ConfigError, also for paths that an INI file cannot hold."""
        job = resolve(self.extended_config(), self.run_name, strategy="diloco" if self.group else "allreduce")
        held = vars(job.profile) | vars(job.distribution)
        meant = {"base_model": self.model.base_model} | self.data.manifests | self.data.split
        meant |= {"hosts_config": self.group.path} if self.group else {}
        for key, path in meant.items():
            if held[key] != path:
                raise ConfigError(f"{path}: config.ini cannot hold this path", remedy="Rename the file or folder.")
        return job

    def job_of_machines(self) -> Job:
        """Return what matters to machines: epochs and learning rate make no difference to them."""
        return self.job().with_profile(epochs=1, learning_rate=0.0)

    def _fits(self, text: str) -> bool:
        """Tell whether all that was decided stays as it is with this text of config.ini. Raises ConfigError."""
        if text == self.config_text:
            return True
        headers, other = [header.split(":", 1) for header, _ in self.sections()], replace(self, config_text=text)
        before, after = (ConfigFile(self.config_path, each) for each in (self.config_text, text))
        was, now = self.job(), other.job()
        is_free = all(before.has(*header) == after.has(*header) for header in headers)
        return is_free and (was.profile, was.distribution) == (now.profile, now.distribution)

    def save(self) -> list[str]:
        """Write all of it, config.ini last, or nothing; returns what was written, in words. Raises ConfigError."""
        config, group = self.config_path, self.group
        if group and group.text and group.path.exists():  # `hosts pair` has written one meanwhile
            free = next(path for path in map(group.path.with_stem, numbered(group.path.stem)) if not path.exists())
            self.group = group = replace(group, path=free)
        sections = self.sections()
        new: dict[Path, Callable[[Path], None]] = {  # beside config.ini
            path: partial(write_manifest, samples=self.data.samples[kind]) for kind, path in self.data.split.items()
        }
        if group and group.text:
            new[group.path] = partial(write_shared, text=group.text)
        changed = [path for path in new if path.exists()]
        if not changed and self._fits(text := read_text(config)):
            self.config_text = text
        else:
            what = f"{changed[0].name if changed else config.name} was changed meanwhile"
            raise ConfigError(what, remedy="Nothing was written; start again.")
        try:
            with contextlib.ExitStack() as undo:
                for path, write in new.items():
                    undo.callback(path.unlink, missing_ok=True)
                    write(path)
                write_shared(config, with_sections(self.config_text, sections))
                undo.pop_all()
        except OSError as error:
            remedy = "Check the free space and the folder's permissions."
            raise ConfigError(f"{error.filename or config}: {error.strerror}", remedy=remedy) from None
        return [*(str(shown(path)) for path in new), *(f"[{header}] in {config.name}" for header, _ in sections)]

    def _inside(self, path: Path) -> str:
        """Return a path relative to config.ini where it is below its folder."""
        folder = self.config_path.parent
        return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def numbered(name: str) -> Iterator[str]:
    """Give mine, mine-2, mine-3, ..."""
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))
