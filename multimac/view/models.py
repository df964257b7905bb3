"""How a user names a model: a folder, a run by its folder, its id or `last`, or a hub id; and what run it is from."""

from __future__ import annotations

import re
from pathlib import Path

from distributed.run_dir.find import find_run, run_dirs
from distributed.run_dir.summary import INTERRUPTED, RUNNING, RunSummary, read_run
from exogym.config import nearest
from whisper_tuner.config import WHISPERS, ConfigFile
from whisper_tuner.errors import ConfigError
from whisper_tuner.files import beside, expanded, like, shown
from whisper_tuner.hub import ADAPTER_CONFIG, HUB_ID, model_file, model_folder

FINAL = "final"
REMEDY = "Name a run (see `multimac runs list`), a model's folder, or a hub id such as openai/whisper-small."


def folders_of(config: Path, runs_dir: Path | None = None) -> list[Path]:
    """Return the folders of runs: `runs_dir` if given, else `runs` beside config.ini and each runs_dir that it sets.

    Raises ConfigError.
    """
    if runs_dir is not None:
        if not runs_dir.is_dir():
            raise ConfigError(f"{runs_dir}: there is no such folder", remedy="--runs-dir names the folder of all runs.")
        return [runs_dir]
    if not config.exists():
        return [Path("runs")]
    file = ConfigFile(config)
    return [shown(folder) for folder in dict.fromkeys([file.path.parent / "runs", *file.paths("runs_dir")])]


def model_named(name: str, config: Path) -> str:
    """Return a folder of a model, or a hub id; runs are looked for where `config` says. Raises ConfigError."""
    path = expanded(name)
    if path.is_dir():
        if any((path / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            return name
        return _final_of(path, name)
    if path.exists():
        raise ConfigError(f"{name} is a file, not a model's folder", remedy=REMEDY)
    if "/" in name:
        if re.fullmatch(HUB_ID, name) and not path.parent.is_dir():
            return name
        near = like(path) or nearest(name, WHISPERS)
        raise ConfigError(f"there is no folder {name}{near}", remedy=REMEDY)
    others = [*beside(path), *WHISPERS]
    return _final_of(find_run(name, folders_of(config), others=others, remedy=REMEDY), name)


def unfinished(model: str) -> str:
    """Say of a model that its run has not come to its end; "" if it has, or if it is of no run."""
    if (origin := origin_of(model)) is None:
        return ""
    run = read_run(origin.path)
    if run.state == RUNNING:
        return f"{run.id} is still running: its model is that of an earlier stop"
    if run.state == INTERRUPTED and run.steps < run.total_steps:
        return f"{run.id} was stopped at step {run.steps} of {run.total_steps}: its model is that of this step"
    return ""


def _final_of(folder: Path, name: str) -> str:
    """Return the model of a run's folder. Raises ConfigError if it has none."""
    final = folder / FINAL
    if final.is_dir() and any(final.iterdir()):
        return str(shown(final.absolute()))
    if folder in run_dirs([folder.parent]):
        raise ConfigError(f"run {folder.name} has no model yet", remedy=f"See: multimac runs show {folder.name}")
    near = nearest(FINAL, beside(folder / FINAL))  # where one of its folders may be meant
    what = f"{name} is no model's folder, which has a config.json or an {ADAPTER_CONFIG}{near}"
    raise ConfigError(what, remedy=REMEDY)


def fetch_model(name: str) -> None:
    """Download a model from the hub, with a bar, if it is not here yet. Folders and adapters are left alone."""
    if not expanded(name).exists() and re.fullmatch(HUB_ID, name) and model_file(name, "config.json"):
        model_folder(name, show=True)


def origin_of(model: str) -> RunSummary | None:
    """Return the run whose folder holds this model."""
    runs = [read_run(folder, only_asked=True) for folder in list(Path(model).absolute().parents)[:2]]
    return next((run for run in runs if run.base_model), None)


def short_name(model: str) -> str:
    """Name a model where there is little room: by its run, else by its folder's own name; a hub id stays as it is."""
    path = expanded(model)
    if not path.is_dir():
        return model
    return path.absolute().parent.name if path.name == FINAL else path.name


def english_only(model: str) -> str:
    """Say what becomes of a language that an English-only model is given."""
    return f"{short_name(model)} is English-only: it is told no language."


def slug(text: str, otherwise: str = "model") -> str:
    """Return a name for a folder; `otherwise` if nothing of the text is left."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or otherwise


def file_name(path: str | Path | None) -> str:
    """Return a path's last name, since others need not know this machine's folders; a hub id stays as it is."""
    text = str(path or "")
    return Path(text).name if text.startswith(("/", "~", ".")) else text
