"""`[distributed:NAME]`: a profile, a strategy, and the hosts that train together. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import shlex
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed.run_dir.summary import KEPT
from exogym.config import nearest, setting, validate
from exogym.errors import SettingError
from exogym.strategy import STRATEGIES, StrategyConfig, strategy_config
from whisper_tuner.config import INHERITED, OF_DATA, OF_RUNS, ConfigFile, Profile, Resolved, set_by_hand
from whisper_tuner.data.formats.layouts import with_siblings
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import ConfigError
from whisper_tuner.files import expanded

# Of the profile's own clips, so many of the sets to keep. Measured (quality: tiny.en on fr): WER on English rises by
# 1.5 points, where it rises by 32.5 without them, and WER on French is no worse.
REHEARSED = 0.25
MOST_TIMES = 10  # that a clip may be in an epoch
BESIDE = "beside train"  # where a test set was found that no section names
# Why a host leaves a run by itself, see distributed/worker/in_use.py, and how that is told.
YIELD_WHEN = {"battery": "on battery", "busy": "its processor is busy with other programs"}
# Settings of a strategy that the profile decides; in an INI file they go by the profile's names.
FROM_PROFILE = ("lr", "weight_decay", "max_norm", "schedule", "warmup_steps", "H")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
    """How several ranks work together. Beside these keys a section takes the strategy's own and any profile key."""

    base_profile: str = setting(help="name of the [profile:NAME] to train", example="mine")
    strategy: str = setting("diloco", "how the ranks agree", choices=tuple(STRATEGIES), example="diloco")
    communication_interval: int = setting(
        5, "optimizer steps in a round, where a strategy has rounds", low=1, example="20"
    )
    hosts_config: Path | None = setting(None, "hosts file, unless --hosts names one", example="distributed_hosts.json")
    shares: str = setting(
        "auto",
        "clips of each host: auto (by speed) or fixed (equal, reproducible)",
        choices=("auto", "fixed"),
        example="fixed",
    )
    min_hosts: int = setting(1, "with fewer hosts a run pauses until others are back", low=1, example="2")
    round_timeout_s: float = setting(
        120.0, "seconds before a slow host may be given up; rounds may take longer", low=5.0, example="300"
    )
    notify: str | None = setting(
        None,
        "told of a run's end, of a host that stays away, of a problem: desktop, or a command that gets the message as "
        "its last argument. May also stand in [DEFAULT] or a profile; never sent to hosts (lost-hosts.md)",
        example="desktop",
    )
    yield_when: tuple[str, ...] = setting(
        (),
        "when a host leaves the run by itself, until that is over: battery, busy (with other programs)",
        choices=tuple(YIELD_WHEN),
        example="battery, busy",
    )

    def __post_init__(self) -> None:
        validate(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherSet:
    """Clips beside the profile's own: of Profile.also_train, or the test clips of one of Profile.keeps.

    language, task: of its speech, if the model has to be told. share: of its clips; 2: each twice an epoch. most: at
    most so many times the profile's own clips. is_list: it has no section of its own.
    """

    name: str
    clips: Path
    language: str
    task: str = "transcribe"
    reading: Reading
    share: float = 1.0
    most: float = math.inf
    is_list: bool = False

    @property
    def folder(self) -> str:
        """Return the name of its folder below a run's evaluation/."""
        return KEPT + urllib.parse.quote(self.name, safe="")

    def profile(self, trained: Profile) -> Profile:
        """Return the profile of a run with this set to test on in place of its own."""
        own = vars(self.reading) | {"test": self.clips, "language": self.language, "task": self.task}
        return dataclasses.replace(trained, **own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs but the machines. `strategy_settings` are the strategy's own keys, as written."""

    name: str
    profile: Profile
    added: tuple[OtherSet, ...] = ()
    keeps: tuple[OtherSet, ...] = ()
    distribution: Distribution
    strategy_settings: dict[str, str]
    origin: dict[str, str]

    def with_profile(self, **values) -> Job:
        """Return this job with other values in its profile."""
        return dataclasses.replace(self, profile=dataclasses.replace(self.profile, **values))

    def with_strategy(self, name: str) -> Job:
        """Return this job with another strategy, at its defaults."""
        distribution = dataclasses.replace(self.distribution, strategy=name)
        return dataclasses.replace(self, distribution=distribution, strategy_settings={})

    @property
    def dealt_over(self) -> int:
        """The steps of a round, in some of which a host may have no clips: 1 where each step needs all hosts'."""
        return self.distribution.communication_interval if self.distribution.strategy == "diloco" else 1

    def strategy_config(self, total_steps: int) -> StrategyConfig:
        """Return the strategy's settings for a run of `total_steps` optimizer steps."""
        profile = self.profile
        settings: dict[str, Any] = self.strategy_settings | {
            "lr": profile.learning_rate,
            "weight_decay": profile.weight_decay,
            "max_norm": profile.max_grad_norm or None,
            "schedule": profile.schedule,
            "warmup_steps": round(profile.warmup_ratio * total_steps),
        }
        return strategy_config(self.distribution.strategy, settings | _by_other_keys(self.distribution, profile))


def _by_other_keys(distribution: Distribution, profile: Profile) -> dict[str, Any]:
    """Return settings of the strategy that an INI file has by other names, where they are not its defaults."""
    found: dict[str, Any] = {}
    if "H" in STRATEGIES[distribution.strategy][0].__dataclass_fields__:
        found["H"] = distribution.communication_interval
    if profile.optimizer != "adamw":
        found["inner_optim"] = profile.optimizer
    return found


def resolve(config: ConfigFile, name: str, *, strategy: str = "diloco", settings: Sequence[str] = ()) -> Job:
    """Return the job of a [distributed:NAME], or of a plain [profile:NAME] with `strategy`'s defaults.

    settings: texts KEY=VALUE, which win over what the sections say. Raises ConfigError.
    """
    changes = set_by_hand(settings)
    if not config.has("distributed", name):
        section = Resolved(name, {"base_profile": name, "strategy": strategy}, {})
        if not config.has("profile", name):
            known = config.names("distributed") + config.names("profile")
            if config.has("dataset", name) and (train := config.section("dataset", name).values.get("train")):
                what = f"{config.path.name}: [dataset:{name}] names recordings, and is no profile"
                raise ConfigError(what, remedy=f"Train on them: multimac train {shlex.quote(train)}")
            raise ConfigError(
                f"{config.path.name}: there is neither a [distributed:{name}] nor a [profile:{name}]"
                f"{nearest(name, known)}",
                remedy=f"Known: {', '.join(known) or 'none'}. Of recordings, `multimac train` and the wizard make one.",
            )
    else:
        section = config.section("distributed", name)
    inherited = changes.only(INHERITED)  # they decide what is below the profile's own keys
    return _build(config, name, section.with_changes(changes.without(inherited.values.keys())), inherited)


def _build(config: ConfigFile, name: str, section: Resolved, inherited: Resolved) -> Job:
    own = {field.name for field in dataclasses.fields(Distribution)}
    profile_keys = {field.name for field in dataclasses.fields(Profile)}
    base_profile = config.build(Distribution, section.only(own), f"distributed:{name}").base_profile  # or it is missing
    base = config.profile_values(base_profile, section.origin.get("base_profile", ""), inherited)
    section, base = base.only(OF_RUNS).with_changes(section), base.without(OF_RUNS)
    distribution = config.build(Distribution, section.only(own), f"distributed:{name}")
    strategy_keys = {f.name for f in dataclasses.fields(STRATEGIES[distribution.strategy][0])} - {*FROM_PROFILE}
    if unknown := set(section.values) - own - profile_keys - strategy_keys:
        key = sorted(unknown)[0]
        what = f"{section.origin[key]}: unknown key {key!r}{nearest(key, own | profile_keys | strategy_keys)}"
        chosen = f"Keys of strategy {distribution.strategy}: {', '.join(sorted(strategy_keys))}. "
        remedy = f"{chosen if 'strategy' in section.values else ''}All keys: multimac config show {name}"
        raise ConfigError(what, remedy=remedy)
    merged = base.with_changes(section.only(profile_keys))
    profile = config.build(Profile, merged, f"profile:{distribution.base_profile}")
    settings = section.only(strategy_keys).values
    if profile.optimizer != "adamw" and (distribution.strategy == "demo" or "inner_optim" in settings):
        other = "inner_optim says" if "inner_optim" in settings else "strategy = demo says"
        what = f"{merged.origin['optimizer']}: optimizer = {profile.optimizer}, and {other} otherwise"
        raise ConfigError(what, remedy="Remove one of the two.")
    try:
        strategy_config(distribution.strategy, settings | _by_other_keys(distribution, profile))
    except SettingError as error:
        place = _wrong_setting(error, settings, section, distribution, profile)
        place = place or f"{config.path.name} [distributed:{name}]"
        remedy = f"Remove it; then `multimac config show {name}` explains every setting."
        raise ConfigError(f"{place}: {error}", remedy=remedy) from None
    origin = merged.origin | section.origin
    found = with_siblings(profile.train, Reading.of(profile))
    # Not where a section has the key: `test =` says that there is none.
    beside = {kind: path for kind, path in found.items() if kind not in merged.values}
    profile = dataclasses.replace(profile, **beside, train=found["train"])
    origin |= dict.fromkeys(beside, BESIDE)
    for key in ("early_stopping", "keep_best"):
        if getattr(profile, key) and not profile.validation:
            what = f"{origin[key]}: {key} = {merged.values[key]}: there are no validation clips to go by"
            remedy = "Name some with `validation =`, or make them: multimac data import SOURCE --out NAME --split"
            raise ConfigError(what, remedy=f"{remedy}. Or remove {key}.")
    if profile.keep_best == "wer" and distribution.strategy == "pipeline":
        what = f"{origin['keep_best']}: keep_best = wer: with strategy = pipeline no host has the whole model"
        raise ConfigError(what, remedy="Use keep_best = loss.")
    keeps = _others(config, profile.keeps, merged, "keeps", "test")
    added = _others(config, profile.also_train, merged, "also_train", "train")
    return Job(
        name=name,
        profile=profile,
        added=added if "also_train" in merged.values else _rehearsed(config, keeps, merged),
        keeps=keeps,
        distribution=distribution,
        strategy_settings=settings,
        origin=origin,
    )


def _others(config: ConfigFile, texts: Sequence[str], trained: Resolved, key: str, kind: str) -> tuple[OtherSet, ...]:
    """Return the sets of also_train or keeps, see _other. Raises ConfigError."""
    found: dict[str, OtherSet] = {}
    for text in dict.fromkeys(texts):
        other = _other(config, text, trained, key, kind)
        if other.name.casefold() in found:
            what = f"{trained.origin[key]}: {key}: two sets are called {other.name}"
            raise ConfigError(what, remedy="Give them sections with other names: [dataset:NAME].")
        found[other.name.casefold()] = other
    return tuple(found.values())


def _rehearsed(config: ConfigFile, keeps: Sequence[OtherSet], trained: Resolved) -> tuple[OtherSet, ...]:
    """Return what is trained of the sets to keep where nobody says it: of those that have training clips as well."""
    found = []
    for kept in keeps:
        is_own = not kept.is_list and config.has("dataset", kept.name)
        if is_own and "train" in config.section("dataset", kept.name).values:
            found.append(_other(config, kept.name, trained, "keeps", "train"))
    return tuple(dataclasses.replace(other, most=REHEARSED / len(found)) for other in found)


def _other(config: ConfigFile, text: str, trained: Resolved, key: str, kind: str) -> OtherSet:
    """Return the clips of a [dataset:NAME], or of a path. Raises ConfigError.

    trained: the values of the profile, in which `text` stands for `key`. kind: train or test, which of the set's lists.
    """
    place = trained.origin[key]
    name, times, number = (part.strip() for part in text.partition("*"))
    try:
        share = float(number) if times else 1.0
    except ValueError:
        share = 0.0
    if not name or not 0 < share <= MOST_TIMES or (times and key == "keeps"):
        wrong = "all its clips are measured" if key == "keeps" else f"not a number above 0, up to {MOST_TIMES}"
        what = f"{place}: {key} = {text}: {wrong}"
        named = name or "NAME"
        ways = f"*0.2 without spaces, {named} for all of it, or {named}*3 for each clip three times an epoch"
        remedy = f"Write {named}" + (f"{ways}." if key != "keeps" else ".")
        raise ConfigError(what, remedy=remedy)
    path = config.path.parent / expanded(name)
    if is_list := not config.has("dataset", name) and path.exists():
        own = Resolved(name, {kind: name}, {kind: place})
        name = f"{path.parent.name}-{path.stem}".strip("-")
    else:
        own = config.section("dataset", name, place)
    any_list = Resolved(name, {"train": own.values.get(kind, "")}, {})  # a profile cannot be without it
    profile = config.build(
        Profile, trained.without(OF_DATA).with_changes(any_list).with_changes(own), f"dataset:{name}"
    )
    reading = Reading.of(profile)
    found = with_siblings(profile.train, reading) if "train" in own.values else {}
    clips = (profile.test if kind == "test" else None) or found.get(kind)
    if not clips:
        what = f"{place}: {key} = {text}: it has no {'test' if kind == 'test' else 'training'} clips"
        raise ConfigError(what, remedy=f"Give [dataset:{name}] a list of clips: {kind} = ...")
    return OtherSet(
        name=name,
        clips=clips,
        language=profile.language,
        task=profile.task,
        reading=reading,
        share=share,
        is_list=is_list,
    )


def _wrong_setting(
    error: SettingError, settings: dict[str, str], section: Resolved, distribution: Distribution, profile: Profile
) -> str:
    """Return the place of the one setting that is to blame by itself, with its value if `error` does not begin with it.

    '' if several are to blame.
    """
    for key, value in settings.items():
        try:
            strategy_config(distribution.strategy, {key: value} | _by_other_keys(distribution, profile))
        except SettingError as alone:
            if str(alone) == str(error):
                place = section.origin[key]
                return place if str(error).startswith(f"{key} = {value}") else f"{place}: {key} = {value}"
    return ""
