"""What has been answered so far, and the sections of config.ini that follow from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from distributed.plan.job import Job, resolve
from distributed.ssh.host import Hosts
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.dataset import Sample
from whisper_tuner.errors import ConfigError
from whisper_tuner.model.memory import ModelShape

from .ini_text import Section, with_sections

KINDS = ("train", "validation", "test")


@dataclass(kw_only=True)
class Model:
    """`section` is the name of its [model:NAME], if any; `base_model` is a folder's absolute path or a hub id."""

    base_model: str
    section: str = ""
    shape: ModelShape | None = None
    multilingual: bool = False
    learning_rate: float | None = None

    @property
    def title(self) -> str:
        return self.section or Path(self.base_model).name


@dataclass(kw_only=True)
class Data:
    """`manifests` by kind. `split` holds those that are still to be written, with their clips.

    `source` is the training manifest as it was found, before it is split.
    """

    section: str = ""
    language: str = ""
    manifests: dict[str, Path] = field(default_factory=dict)
    samples: dict[str, tuple[Sample, ...]] = field(default_factory=dict)
    split: dict[Path, tuple[Sample, ...]] = field(default_factory=dict)

    source: Path = Path()

    @property
    def title(self) -> str:
        return self.section or self.manifests["train"].parent.name


@dataclass(kw_only=True)
class Group:
    """The machines to train on. `text` is what the hosts file will hold; None: it holds that already.

    bytes_s: the speed of the slowest link between them, if it was measured. machine_workers: of each host, see RunSpec.
    """

    hosts: Hosts
    path: Path
    text: str | None = None
    bytes_s: float | None = None
    machine_workers: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Draft:
    config_path: Path
    config_text: str
    model: Model | None = None
    data: Data | None = None
    language: str = ""
    method: str = "full"
    settings: dict[str, str] = field(default_factory=dict)  # epochs, learning_rate, batch_size
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
        """Those to be added to config.ini, or replaced in it."""
        data, found = self.data, []
        manifests = {kind: self._inside(data.manifests[kind]) for kind in KINDS if kind in data.manifests}
        profile = {"model": self.model.section} if self.model.section else {"base_model": self._path(self.model)}
        profile["dataset"] = data.section or self.name
        if not data.section:
            found.append((f"dataset:{self.name}", manifests | ({"language": self.language} if self.language else {})))
        elif self.language != data.language:
            profile["language"] = self.language
        profile |= {"method": self.method} | self.settings
        if data.section and data.split:
            profile |= manifests
        found.append((f"profile:{self.name}", profile))
        if self.group:
            hosts = {"hosts_config": self._inside(self.group.path)}
            found.append((f"distributed:{self.run_name}", {"base_profile": self.name} | self.strategy | hosts))
        return found

    def job(self) -> Job:
        """What config.ini with these sections resolves to. Raises ConfigError."""
        text = with_sections(self.config_text, self.sections())
        config = ConfigFile(self.config_path, text)
        job = resolve(config, self.run_name, strategy="diloco" if self.group else "allreduce")
        for kind in KINDS:
            meant = self.data.manifests.get(kind)
            if getattr(job.profile, kind) != meant:
                raise ConfigError(f"{meant}: config.ini cannot hold this path", remedy="Rename the file or folder.")
        return job

    def _path(self, model: Model) -> str:
        return self._inside(Path(model.base_model)) if Path(model.base_model).is_dir() else model.base_model

    def _inside(self, path: Path) -> str:
        """Relative to config.ini where it is below its folder. Raises ConfigError for what an INI file cannot hold."""
        folder = self.config_path.parent
        text = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
        if any(mark in text for mark in (" #", " ;", "\n", "\t#", "\t;")) or text != text.strip():
            raise ConfigError(f"{text!r}: config.ini cannot hold this path", remedy="Rename the file or folder.")
        return text


def replaced(job: Job, **values) -> Job:
    """The same job with other values in its profile."""
    return dataclasses.replace(job, profile=dataclasses.replace(job.profile, **values))
