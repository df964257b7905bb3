"""Answers from a file, for scripts and tests: JSON (one object) or INI (one section [answers])."""

from __future__ import annotations

import configparser
import json
from collections.abc import Mapping
from pathlib import Path

from whisper_tuner.errors import ConfigError
from whisper_tuner.files import write_atomically
from whisper_tuner.json_text import parse_json
from whisper_tuner.settings import nearest
from whisper_tuner.text import is_unicode

SECTION = "answers"
EXAMPLE = "The wizard's --save-answers FILE writes a correct one."
# Every question that can be answered from a file. A missing answer takes the default that the question shows.
KEYS = {
    "model": "name of a [model:NAME], a published size by hub id (openai/whisper-small), or a folder",
    "data": "name of a [dataset:NAME], or the path of a manifest (validation and test are found beside it)",
    "split": "yes or no: split off validation and test clips where there are none",
    "language": "language of the speech, for multilingual models: a code or an English name",
    "method": "full, lora or decoder",
    "epochs": "passes over the training clips",
    "learning_rate": "peak learning rate",
    "batch_size": "clips per host and step",
    "where": "alone (this machine), hosts (those of distributed_hosts.json), or new (others, or there is no such file)",
    "workers": "addresses of the other machines, with commas between them",
    "ssh_user": "user name on the other machines; empty: ssh decides",
    "ssh_key_path": "private key for them; empty: ssh decides",
    "master": "this machine's address, as the others see it",
    "setup": "yes or no: run `hosts setup` where an environment is missing or differs",
    "probe": "yes or no: measure each machine with three training steps",
    "together": "yes or no: train on all of them, after the preflight",
    "strategy": "diloco or allreduce",
    "communication_interval": "steps in a round (diloco)",
    "name": "name of the profile to save",
    "overwrite": "yes or no: replace sections of that name",
    "start": "now, or later (only save)",
}
# Whether these are asked depends on the machines, so an answer that was not needed is no mistake.
IF_NEEDED = {"setup", "overwrite", "master", "together"}


def load_answers(path: Path) -> dict[str, str]:
    """Raises ConfigError for a file that cannot be read, and for an unknown key."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = parse_json(text) if text.lstrip().startswith("{") else _from_ini(text)
    except json.JSONDecodeError as error:
        what = f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})"
        raise ConfigError(what, remedy=f"Look for a comma, quote or bracket there. {EXAMPLE}") from None
    except (OSError, ValueError, configparser.Error) as error:
        reason = " ".join(str(getattr(error, "strerror", error)).split())
        raise ConfigError(f"{path}: cannot be read: {reason}", remedy=f"--answers names a file. {EXAMPLE}") from None
    for key in values:
        if key not in KEYS:
            what = f"{path}: unknown key {key!r}{nearest(key, KEYS)}"
            raise ConfigError(what, remedy=f"Known keys: {', '.join(KEYS)}.")
    return {key: _plain(path, key, value) for key, value in values.items()}


def save_answers(path: Path, answers: Mapping[str, str]) -> None:
    """As JSON where the name ends in .json, else as INI."""
    if path.suffix.lower() == ".json":
        text = json.dumps(dict(answers), indent=2, ensure_ascii=False) + "\n"
    else:
        text = f"[{SECTION}]\n" + "".join(f"{key} = {value}\n" for key, value in answers.items())
    write_atomically(path, text)


def _from_ini(text: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    parser.optionxform = str
    parser.read_string(text)
    if parser.sections() != [SECTION]:
        raise ValueError(f"expected one section [{SECTION}], found: {', '.join(parser.sections()) or 'none'}")
    return dict(parser.items(SECTION))


def _plain(path: Path, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = ", ".join(value)
    if not isinstance(value, str | int | float) or not is_unicode(str(value)):
        raise ConfigError(f"{path}: {key}: expected a text or a number", remedy=f"{key}: {KEYS[key]}.")
    return str(value)
