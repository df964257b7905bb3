"""Asks what to train: model, method, the language of the speech, and the few settings that matter."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from distributed.checkup.this_machine import device_here, memory_here
from distributed.hosts.paths import PROJECT
from exogym.config import FALSE, nearest, parse
from multimac.view.models import english_only, short_name
from multimac.view.progress import working
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.data.labels import folder_is_multilingual, token_limit
from whisper_tuner.errors import ConfigError, ModelError
from whisper_tuner.eval.spoken_language import languages_heard
from whisper_tuner.files import expanded, like, shown
from whisper_tuner.hub import HUB_ID, check_at_hand, folder_here
from whisper_tuner.languages import language_code, language_name
from whisper_tuner.model.memory import PUBLISHED, Way, fastest, shape_of, ways_of
from whisper_tuner.text import counted, size

from .draft import Draft, Model
from .questions import Option, Questions

BUNDLED = PROJECT / "bundled" / "model"
SUGGESTED = ("small", "base", "tiny")  # the largest first
LONG_MIN = 60.0
# Seconds of speech x parameters that a core trains in a second: LoRA on whisper-base, 14 s of speech a second on two.
WORK = 14 * 73e6 / 2
EPOCHS = 5
OFFERED = ("tiny", "base", "small", "medium", "large-v3", "large-v3-turbo")
METHODS = {
    "full": "all weights: most memory, no better than LoRA on minutes of speech",
    "lora": "LoRA, small matrices beside the weights: little memory and traffic",
    "decoder": "the decoder only: new words and spelling rather than new sounds",
}
# (parameters up to, rate of full fine-tuning, rate of LoRA), as commonly used; small models bear larger rates.
LEARNING_RATES = (
    (20e6, 1.5e-3, 5e-3),
    (50e6, 3.75e-5, 1e-3),
    (100e6, 2.5e-5, 1e-3),
    (300e6, 1.25e-5, 1e-3),
    (1e9, 6.25e-6, 5e-4),
    (1e12, 5e-6, 1e-4),
)
SHORT_S = 10.0  # of speech: nobody has told yet how long the clips are
# AdamW moves each weight by about the rate at each step, and a Whisper's weights are of the size of 0.03.
LARGEST_RATE = 0.1
SETTINGS = {
    "epochs": "Epochs (passes over the clips):",
    "learning_rate": "Learning rate (too high forgets, too low learns little):",
    "batch_size": "Clips per step of all machines together (more are faster):",
}
NO_BETTER = 3  # epochs
LANGUAGE = "Language of the speech (en, fr, German, ...):"
CLIPS = 5  # to guess the language from
LISTENING_S = 20.0  # most of it is the loading of torch and of the model
ENOUGH_CLIPS = 20  # of validation: with fewer its loss says little
BEST = {"keep_best": "loss", "early_stopping": str(NO_BETTER)}


def ask_model(
    questions: Questions, config: ConfigFile, suggested: Model | None, console: Console, *, near: Path | None = None
) -> Model:
    """near: the recordings, see `offered`."""
    models = offered(config, near)
    here = [model for model in models.values() if model.base_model != str(BUNDLED) and folder_here(model.base_model)]
    default = suggested or next(iter(here), None)
    answer = questions.select(
        "model",
        "Which model do you want to fine-tune?",
        options(models),
        next((name for name, model in models.items() if model == default), ""),
        other="another: a folder, or a hub id",
        check=lambda text: _check_model(text, config),
    )
    model = models.get(answer) or _model_of(answer, config)
    is_multilingual(model)  # what is damaged there is told at once
    said = questions.once("at hand", model.base_model, partial(_not_at_hand, model.base_model, console))
    if said and questions.asks_nobody:
        raise said
    if said and questions.interactive:
        if questions.again("What next?", [OTHER_MODEL, KEEP_IT], said) == OTHER_MODEL.value:
            return ask_model(questions, config, None, console, near=near)
    elif said:
        console.print(str(said), style="yellow", markup=False)
    return model


OTHER_MODEL = Option(value="other", title="choose another model")
KEEP_IT = Option(value="keep", title="keep it: it can be fetched when the training begins")


def _not_at_hand(base_model: str, console: Console) -> ModelError | None:
    """Return why a model cannot be had now; None if it is on this disk or on the hub."""
    try:
        with working(console, f"looking for {base_model}"):
            check_at_hand(base_model)
    except ModelError as error:
        return error
    return None


def suggested_model(
    config: ConfigFile, speech_s: float, language: str, console: Console, *, near: Path | None = None
) -> Model | None:
    """Suggest the largest of SUGGESTED that LoRA trains here, in about an hour where there is no GPU.

    Where the hub does not answer, it is one that is on this disk, the demo's last; None if there is none for the
    language, which is "" if it is not known yet. near: the recordings, see `offered`.
    """
    models = offered(config, near)
    usual = [model for size in SUGGESTED for model in models.values() if model.base_model == f"openai/whisper-{size}"]
    soon = [model for model in usual if device_here() != "cpu" or _minutes(model, speech_s) <= LONG_MIN]
    usual = [model for model in soon or usual[-1:] if fits(model, "lora")]
    if usual and not _not_at_hand(usual[0].base_model, console):
        return usual[0]
    here = [model for model in [*usual, *models.values()] if _fitting(model) and folder_here(model.base_model)]
    here.sort(key=lambda model: model.base_model == str(BUNDLED))
    known = [model for model in here if language in ("", "en") or not _is_english_only(model)]
    if here and not known and here[0].base_model != str(BUNDLED):
        what = f"{shown(Path(here[0].base_model))} is on this disk, but knows English only. It can learn"
        what += f" {language_name(language)} all the same, if you choose it."
        console.print(what, style="yellow", markup=False)
    here = known
    if usual and here:
        what = f"{usual[0].base_model} cannot be fetched now; {shown(Path(here[0].base_model))} is on this disk."
        what += " It is English-only." if language != "en" and _is_english_only(here[0]) else ""
        if here[0].base_model == str(BUNDLED):
            what = f"{usual[0].base_model} cannot be fetched now, and the only model on this disk is that of the demo,"
            what += " which knows some English sentences and no other language."
        console.print(what, style="yellow", markup=False)
    elif usual:
        console.print(f"{usual[0].base_model} cannot be fetched now.", style="yellow", markup=False)
        return None
    return next(iter([*here, *filter(_fitting, models.values()), *models.values()]))


def _is_english_only(model: Model) -> bool:
    try:
        return not is_multilingual(model)
    except ModelError:  # damaged, which is told where it is chosen
        return False


def _minutes(model: Model, speech_s: float) -> float:
    """Estimate how long LoRA trains on this machine's CPU, roughly."""
    assert model.shape  # of a published size it is known
    return EPOCHS * speech_s * model.shape.parameters / (WORK * (os.cpu_count() or 1)) / 60


def ask_method(questions: Questions, model: Model) -> str:
    here, choices, fitting = memory_here(), [], _fitting(model)
    for method, words in METHODS.items():
        needed = memory_needed(model, method)
        unfit = f"needs {size(needed)}, this machine has {size(here)}" if method not in fitting else ""
        cost = f" ({size(needed)})" if needed > 4e9 else ""
        choices.append(Option(value=method, short=method, title=f"{method}: {words}{cost}", unfit=unfit))
    default = "lora" if "lora" in fitting else next(iter(fitting), "lora")
    return questions.select("method", "Which weights do you want to train?", choices, default)


def ask_settings(questions: Questions, draft: Draft, console: Console) -> dict[str, str]:
    """Ask for epochs, rate and batch size, and for the best epoch where validation can tell it.

    Suggestions are those of a profile with the same model, data and method, else those that suit the model's size.
    """
    model, method, clips, own = draft.model, draft.method, len(draft.data.samples["train"]), _alike(draft)
    usual, batch = usual_rate(model, method), next((n for n in (8, 4, 2) if fits(model, method, n)), 1)
    defaults = {"epochs": str(EPOCHS), "learning_rate": usual, "batch_size": str(batch)}
    defaults |= {key: own[key] for key in SETTINGS if key in own}
    if clips:
        defaults["batch_size"] = str(min(int(defaults["batch_size"]), clips))

    def check(key: str, text: str) -> None:
        _check_setting(key, with_point(text))
        if key == "batch_size" and clips and int(text) > clips:
            raise ValueError(f"a step cannot have more clips than the training set, which has {clips}")
        if key == "learning_rate" and float(with_point(text)) > LARGEST_RATE:
            raise ValueError(f"above {LARGEST_RATE:g} a model forgets all it knows; usual for this one: {usual}")

    settings = {}
    for key, message in SETTINGS.items():
        settings[key] = with_point(questions.text(key, message, defaults[key], partial(check, key)))
    batch = int(settings["batch_size"])
    longest = max((sample.duration_s for sample in draft.data.samples.get("train", ())), default=None)
    if not fits(model, method, batch, longest):  # no mistake: see distributed/worker/micro_batch.py
        needed = size(memory_needed(model, method, batch, longest))
        what = f"A step of {batch} clips would need {needed} of memory; this machine has {size(memory_here())}."
        what += " It is computed in smaller parts; the result is the same."
        console.print(what, style="yellow")
    if "validation" in draft.data.samples and int(settings["epochs"]) > 1:
        count = len(draft.data.samples["validation"])
        suggested = own["keep_best"].lower() not in {*FALSE, ""} if "keep_best" in own else count >= ENOUGH_CLIPS
        message = f"Stop after {NO_BETTER} epochs without progress, and keep the best?"
        settings |= BEST if questions.confirm("keep_best", message, suggested) else {}
        if questions.asks_nobody and count < ENOUGH_CLIPS and not suggested:
            what = (
                f"{counted(count, 'validation clip')} {'is' if count == 1 else 'are'} too few to choose the best epoch"
            )
            console.print(f"{what} by: the model is that of the last one.", markup=False)
    return settings


def ask_language(questions: Questions, draft: Draft, console: Console) -> str:
    """Return the code of a language; of an English-only model "" if none is known, since texts alone go by it.

    Whose recordings are not English, and the model is, may choose another one.
    """
    if not is_multilingual(draft.model):
        model = short_name(draft.model.base_model)
        given = questions.answers.get("language", "") or draft.data.language or draft.data.stated_language
        if questions.interactive:
            given = questions.text("language", LANGUAGE, given, language_code)
        code = language_code(given) if given else ""
        name = language_name(code or "en")
        if not code and questions.asks_nobody:
            remedy = "Give --language, such as fr."
            if "model" not in questions.answers:
                remedy = f"{remedy} If it is not en, give --model too: {model}, which is English-only, or another one."
            raise ConfigError("the language of the speech is stated nowhere", remedy=remedy)
        refused = ""
        while not is_multilingual(draft.model):
            message = f"{short_name(draft.model.base_model)} is English-only, and your recordings are {name}: train it"
            is_asked = questions.interactive and code not in ("", "en")
            if not is_asked or questions.confirm(
                "english_only", f"{message} all the same?", draft.model.base_model == refused
            ):
                console.print(f"{english_only(draft.model.base_model)} Texts are compared as {name}.", markup=False)
                break
            refused = draft.model.base_model  # who chooses it once more means it
            draft.model = ask_model(questions, draft.config, None, console, near=draft.data.source)
        return code
    # That of the data's section, else of the data itself, else what the profile inherits.
    draft.language = draft.data.language
    inherited = draft.extended_config().profile_values(draft.name).values.get("language", "")
    default = draft.data.language or draft.data.stated_language or inherited
    if not default and questions.interactive:
        default = _guessed(questions, draft, console)

    def check(text: str) -> None:
        language_code(text)
        if Path(draft.model.base_model).is_dir():
            token_limit(draft.model.base_model, language=text)

    return language_code(questions.text("language", LANGUAGE, default, check))


def _guessed(questions: Questions, draft: Draft, console: Console) -> str:
    """Guess what the model hears in most of a few clips, if it is on this disk; nothing is downloaded."""
    # Some of the longer half, from all over the list.
    samples = draft.data.samples["train"]
    longer = sorted(samples, key=lambda sample: -sample.duration_s)[: max(CLIPS, len(samples) // 2)]
    longer.sort(key=lambda sample: sample.line)
    clips = [longer[place * len(longer) // CLIPS].audio for place in range(min(CLIPS, len(longer)))]

    def listen() -> list[str]:
        folder = folder_here(draft.model.base_model)
        if folder is None:
            return []
        with working(console, f"listening to {counted(len(clips), 'clip')} (up to {LISTENING_S:.0f} s)"):
            return languages_heard(folder, clips, LISTENING_S)

    found = questions.once("listen", (draft.model.base_model, clips), listen)
    if not found:
        return ""
    [(code, count)] = Counter(found).most_common(1)
    name = language_name(code)
    console.print(f"A guess of this model: it sounds like {name} in {count} of {len(found)} clips.", markup=False)
    return code if count > len(found) / 2 else ""


def with_point(number: str) -> str:
    """Replace a decimal comma by a point."""
    return re.sub(r"^\s*(\d+),(\d+)\s*$", r"\1.\2", number)


def offered(config: ConfigFile, near: Path | None = None) -> dict[str, Model]:
    """Return models by section, folder or hub id: those of the config, in this folder, beside or in `near`, on the hub.

    No model stands there twice.
    """
    models = {name: _of_section(config, name) for name in config.names("model")}
    known = {model.base_model for model in models.values()}
    trained = [config.section("profile", name).values.get("base_model", "") for name in config.names("profile")]
    folders = [folder for name in trained if _is_folder(folder := (config.path.parent / expanded(name)).resolve())]
    around = [Path.cwd()]
    if near:  # a folder of recordings, or a list in it
        folder = near.resolve() if near.is_dir() else near.resolve().parent
        around += [folder, folder.parent]
    folders += [file.parent for place in around for file in sorted(place.glob("*/config.json"))]
    others = [str(folder) for folder in dict.fromkeys(folders) if folder != BUNDLED and shape_of(str(folder))]
    others += [str(BUNDLED)] if BUNDLED.is_dir() else []
    others += [f"openai/whisper-{name}" for name in OFFERED]
    return models | {name: _model_of(name, config) for name in others if name not in known}


def options(models: dict[str, Model]) -> list[Option]:
    return [_option(name, model) for name, model in models.items()]


def way_to_train(model: Model, method: str, batch_size: int = 1, clip_s: float | None = None) -> Way | None:
    """Return how it would be trained here; None if the model's size is not known. clip_s: 30 if not given."""
    profile = Profile(base_model=model.base_model, train=Path(), method=method, batch_size=batch_size)
    ways = ways_of(profile, longest_s=clip_s, device=device_here())
    return fastest(ways, memory_here()) if ways else None


def memory_needed(model: Model, method: str, batch_size: int = 1, clip_s: float | None = None) -> int:
    """Return the bytes of whole batches; 0 if the model's size is not known here."""
    way = way_to_train(model, method, batch_size, clip_s)
    return way.whole if way else 0


def fits(model: Model, method: str, batch_size: int = 1, clip_s: float | None = None) -> bool:
    return memory_needed(model, method, batch_size, clip_s) <= memory_here()


def is_multilingual(model: Model) -> bool:
    """Go by a folder's files, and by the name of a hub id. Raises ModelError."""
    name = model.base_model
    return folder_is_multilingual(name) if _is_folder(name) else not name.endswith(".en")


def _of_section(config: ConfigFile, name: str) -> Model:
    section = config.section("model", name)
    base_model, rate = (section.values.get(key, "") for key in ("base_model", "learning_rate"))
    try:
        if rate:
            _check_setting("learning_rate", rate)
    except ValueError as error:
        place = section.origin["learning_rate"]
        remedy = Profile.__dataclass_fields__["learning_rate"].metadata["help"]
        raise ConfigError(f"{place}: learning_rate = {rate}: {error}", remedy=remedy) from None
    return _model_of(base_model, config, name, rate)


def _model_of(text: str, config: ConfigFile, section: str = "", learning_rate: str = "") -> Model:
    folder = (config.path.parent / expanded(text)).absolute()
    name = str(folder) if _is_folder(folder) else text
    return Model(base_model=name, section=section, shape=shape_of(name), learning_rate=learning_rate)


def _is_folder(path: Path | str) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for a name longer than names can be


def _option(name: str, model: Model) -> Option:
    folder = Path(model.base_model)
    inside = folder.is_relative_to(PROJECT)
    place = (folder.relative_to(PROJECT) if inside else shown(folder)).as_posix()
    label = f"{name} ({place})" if model.section and place != name else place
    if model.shape is None:
        return Option(value=name, short=label, title=f"{label:<38}  size unknown")
    if not _fitting(model):
        return Option(value=name, title=label, unfit=_unfit(model))
    count = model.shape.parameters / 1e6
    method = _fitting(model)[0]
    limit = {"full": "needs ", "lora": "LoRA only: ", "decoder": "decoder only: "}[method]
    clip_s = None if fits(model, method) else SHORT_S
    way = way_to_train(model, method, clip_s=clip_s)
    assert way  # its size is known
    needs = f"clips of {SHORT_S:.0f} s: " if clip_s else limit
    needs += size(way.whole) + (f", {way.frozen_precision}" if way.frozen_precision != "float32" else "")
    return Option(value=name, short=label, title=f"{label:<38} {count:>6,.{1 if count < 10 else 0}f} M  {needs}")


def _fitting(model: Model) -> list[str]:
    """List the methods that there is memory for, in the order of METHODS; if for none, those for short clips."""
    for clip_s in (None, SHORT_S):
        if fitting := [method for method in METHODS if fits(model, method, clip_s=clip_s)]:
            return fitting
    return []


def _unfit(model: Model) -> str:
    least = min(memory_needed(model, method, clip_s=SHORT_S) for method in METHODS)
    return f"does not fit: needs {size(least)} of memory, this machine has {size(memory_here())}"


def _check_model(text: str, config: ConfigFile) -> None:
    model = _model_of(text, config)
    is_folder = _is_folder(model.base_model)
    if not is_folder and not re.fullmatch(HUB_ID, text):
        near = like(expanded(text)) or nearest(text, PUBLISHED)
        raise ValueError(f"no such folder{near or ', and not a hub id such as openai/whisper-small'}")
    if is_folder and model.shape is None:
        raise ConfigError(f"{text} holds no Whisper model: it has no config.json of one")
    is_multilingual(model)
    if not _fitting(model):
        raise ValueError(_unfit(model))


def _alike(draft: Draft) -> Mapping[str, str]:
    """Return the keys of a profile with the same model, data and method; none if there is no such profile."""
    wanted = (draft.model.section, draft.data.section, draft.method)
    for name in draft.config.names("profile") if all(wanted) else ():
        own = draft.config.section("profile", name).values
        if (own.get("model"), own.get("dataset"), own.get("method", "full")) == wanted:
            return own
    return {}


def usual_rate(model: Model, method: str) -> str:
    if model.learning_rate and method != "lora":
        return model.learning_rate
    count = model.shape.parameters if model.shape else 250e6
    _, full, lora = next(row for row in LEARNING_RATES if count <= row[0])
    return f"{lora if method == 'lora' else full:g}"


def _check_setting(key: str, text: str) -> None:
    field = Profile.__dataclass_fields__[key]
    if not parse(field, type(field.default), text):
        raise ValueError("expected a number above 0")
