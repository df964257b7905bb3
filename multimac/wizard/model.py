"""Asks which model: those of config.ini, the bundled one, published sizes, or a folder; shows the memory of each."""

from __future__ import annotations

import re
from pathlib import Path

from distributed.hosts.paths import PROJECT
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.data.labels import MULTILINGUAL_VOCABULARY
from whisper_tuner.errors import ConfigError
from whisper_tuner.json_text import parse_json
from whisper_tuner.model.memory import ModelShape, profile_memory, shape_of
from whisper_tuner.paths import expanded
from whisper_tuner.settings import parse
from whisper_tuner.text import size

from .draft import Model
from .machine import this_machine
from .questions import Option, Questions

BUNDLED = PROJECT / "bundled" / "model"
OFFERED = ("tiny", "base", "small", "medium", "large-v3", "large-v3-turbo")
METHODS = ("full", "lora", "decoder")
RATE = Profile.__dataclass_fields__["learning_rate"]


def ask_model(questions: Questions, config: ConfigFile) -> Model:
    offers = options(config)
    answer = questions.select(
        "model",
        "Which model do you want to fine-tune?",
        offers,
        next((option.value for option in offers if not option.unfit), ""),
        other="another: a folder, or a hub id",
        check=lambda text: _check(text, config),
    )
    return offered(config).get(answer) or model_of(answer, config)


def options(config: ConfigFile) -> list[Option]:
    return [_option(name, model, config.path.parent) for name, model in offered(config).items()]


def offered(config: ConfigFile) -> dict[str, Model]:
    models = {name: _of_section(config, name) for name in config.names("model")}
    known = {model.base_model for model in models.values()}
    if BUNDLED.is_dir() and str(BUNDLED) not in known:
        models[str(BUNDLED)] = model_of(str(BUNDLED), config)
    ids = [f"openai/whisper-{name}" for name in OFFERED]
    return models | {name: model_of(name, config) for name in ids if name not in known}


def model_of(text: str, config: ConfigFile, section: str = "", learning_rate: float | None = None) -> Model:
    folder = (config.path.parent / expanded(text)).absolute()
    try:
        name = str(folder) if folder.is_dir() else text
    except OSError as error:  # a name longer than names can be
        raise ConfigError(f"{config.path.name}: base_model = {text}: {error.strerror}") from None
    shape = shape_of(name)
    return Model(
        base_model=name,
        section=section,
        shape=shape,
        multilingual=_is_multilingual(name, shape),
        learning_rate=learning_rate,
    )


def memory_needed(model: Model, method: str, batch_size: int = 1) -> int | None:
    """Bytes; None if the model's size is not known here."""
    return profile_memory(Profile(base_model=model.base_model, train=Path(), method=method, batch_size=batch_size))


def fits(model: Model, method: str, batch_size: int = 1) -> bool:
    needed = memory_needed(model, method, batch_size)
    return needed is None or needed <= this_machine().memory


def _of_section(config: ConfigFile, name: str) -> Model:
    section = config.section("model", name)
    rate = section.values.get("learning_rate")
    try:
        learning_rate = parse(RATE, float, rate, config.path.parent) if rate else None
    except ValueError as error:
        place = section.origin["learning_rate"]
        raise ConfigError(f"{place}: learning_rate = {rate}: {error}", remedy=RATE.metadata["help"]) from None
    return model_of(section.values.get("base_model", ""), config, name, learning_rate)


def _option(name: str, model: Model, folder: Path) -> Option:
    where = Path(model.base_model)
    base = next((base for base in (folder, PROJECT) if where.is_absolute() and where.is_relative_to(base)), None)
    place = where.relative_to(base).as_posix() if base else model.base_model
    label = f"{name} ({place})" if model.section and place != name else place
    if model.shape is None:
        return Option(value=name, short=label, title=f"{label:<38}  size unknown")
    full, lora = (memory_needed(model, method) for method in ("full", "lora"))
    here = this_machine().memory
    if not any(fits(model, method) for method in METHODS):
        return Option(value=name, title=label, unfit=_unfit(model))
    count = model.shape.parameters / 1e6
    needs = f"needs {size(full)}" if full <= here else f"LoRA only: needs {size(lora)}"
    return Option(value=name, short=label, title=f"{label:<38} {count:>6,.{1 if count < 10 else 0}f} M  {needs}")


def _unfit(model: Model) -> str:
    least = min(memory_needed(model, method) for method in METHODS)
    return f"does not fit: needs {size(least)} of memory, this machine has {size(this_machine().memory)}"


def _check(text: str, config: ConfigFile) -> None:
    model = model_of(text, config)
    if not Path(model.base_model).is_dir() and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text):
        raise ValueError("no such folder, and not a hub id such as openai/whisper-small")
    if Path(model.base_model).is_dir() and model.shape is None:
        raise ConfigError(f"{text} holds no Whisper model: it has no config.json of one")
    if not any(fits(model, method) for method in METHODS):
        raise ValueError(_unfit(model))


def _is_multilingual(name: str, shape: ModelShape | None) -> bool:
    """As the checkpoint says, else by vocabulary size as OpenAI does; an unknown hub id may be."""
    try:
        stated = parse_json((Path(name) / "generation_config.json").read_text()).get("is_multilingual")
    except (OSError, ValueError, AttributeError):
        stated = None
    if stated is None:
        return shape.vocab_size >= MULTILINGUAL_VOCABULARY if shape else not name.endswith(".en")
    return bool(stated)
