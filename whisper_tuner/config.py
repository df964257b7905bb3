"""`config.ini`: sections that inherit (profile <- model + dataset <- DEFAULT) become one frozen Profile."""

from __future__ import annotations

import configparser
import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from exogym.config import FALSE, TRUE, hints_of, nearest, parse, setting, validate
from whisper_tuner.errors import ConfigError
from whisper_tuner.files import expanded, like

INHERITED = ("model", "dataset")  # kinds of sections that a profile is made of
KINDS = (*INHERITED, "profile", "distributed")
SETS = ("train", "validation", "test", "also_train", "keeps")
OF_DATA = (*SETS, "layout", "audio_column", "text_column", "encoding", "delimiter")
OF_RUNS = ("notify",)  # keys that any section may have, though they belong to no profile: see distributed/plan/job.py
SIZES = "tiny tiny.en base base.en small small.en medium medium.en large large-v2 large-v3 large-v3-turbo"
WHISPERS = [f"openai/whisper-{size}" for size in SIZES.split()]  # all that OpenAI has on the hub
HEADER = re.compile(r"^(?=\[)", re.MULTILINE)
TASKS = ("transcribe", "translate")
Section = tuple[str, dict[str, str]]  # such as "profile:mine", with its keys and values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A flat list of settings: what to train, on what, and how. `multimac config show NAME` prints them."""

    base_model: str = setting(
        help="Whisper checkpoint: a folder in transformers layout, or a hub id", example="openai/whisper-small"
    )
    language: str = setting("", "language of the speech, for multilingual checkpoints, e.g. fr or pt-BR", example="fr")
    task: str = setting(
        "transcribe",
        "transcribe as spoken, or translate into English",
        choices=TASKS,
        example="translate",
    )

    train: Path = setting(
        help="training clips: a manifest (CSV, JSON), or a data set of another layout (data.md)",
        example="recordings/train.csv",
    )
    validation: Path | None = setting(
        None,
        "clips for the loss after each epoch; without this key, those beside train",
        example="recordings/validation.csv",
    )
    test: Path | None = setting(
        None, "clips for WER before and after; without this key, those beside train", example="recordings/test.csv"
    )
    also_train: tuple[str, ...] = setting(
        (),
        "other training clips, so that less is forgotten: names of [dataset:NAME], or lists; NAME*0.2 takes a fifth, "
        "NAME*3 each clip three times an epoch. "
        "Without this key: of what `keeps` names, where it has training clips, up to a quarter as many as the "
        "profile's own; empty: none",
        example="english*0.2",
    )
    keeps: tuple[str, ...] = setting(
        (),
        "what the model is still to know: names of [dataset:NAME], or lists of clips; WER is measured on them, too, "
        "and some of their training clips are trained (also_train)",
        example="english",
    )
    terms: Path | None = setting(
        None,
        "names and terms that matter, one a line: how many of those that are said are written is told",
        example="terms.txt",
    )
    terms_times: int = setting(
        1,
        "how many times an epoch the training clips are that have one of `terms` that few of them have",
        low=1,
        high=10,
        example="3",
    )
    layout: str = setting("", "layout of the data set, where its files fit several (data.md)", example="subtitles")
    audio_column: str = setting("", "column of the audio's names; without a header, its number", example="Datei")
    text_column: str = setting("", "column of the text; without a header, its number", example="Satz")
    encoding: str = setting("", "encoding of texts that are not UTF-8, e.g. cp1251", example="cp1251")
    delimiter: str = setting(
        "",
        "what stands between columns, where that cannot be told",
        choices=("", "comma", "semicolon", "tab", "bar"),
        example="semicolon",
    )
    max_duration_s: float = setting(30.0, "seconds; longer clips are skipped", low=0.1, high=30.0, example="20")

    bad_rows: str = setting(
        "skip",
        "rows that cannot be used: train without them, or refuse to start",
        choices=("skip", "refuse"),
        example="refuse",
    )
    no_speech: str = setting(
        "skip",
        "rows with an empty text: they cannot be used, or train that there is no speech in them",
        choices=("skip", "train"),
        example="train",
    )
    timestamps_share: float | None = setting(
        None,
        "share of the steps that are trained with timestamps, their clips joined as in a long recording; 0: the model "
        "forgets them; without this key 0.5, or 0 where the model has no timestamps or clips cannot be joined",
        low=0.0,
        high=1.0,
        example="0.5",
        changes_plan=True,
    )
    previous_text_share: float = setting(
        0.0,
        "share of the clips that are trained with the text of the row before as a prompt",
        low=0.0,
        high=1.0,
        example="0.5",
        changes_plan=True,
    )

    method: str = setting("full", "which weights are trained", choices=("full", "lora", "decoder"), example="lora")
    lora_r: int = setting(32, "rank of the LoRA matrices", low=1, high=1024, example="16")
    lora_alpha: int = setting(64, "LoRA scale: updates are multiplied by alpha / r", low=1, example="32")
    lora_dropout: float = setting(0.0, "dropout inside the LoRA branches", low=0.0, high=0.9, example="0.05")
    lora_targets: tuple[str, ...] = setting(
        ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
        "names of the linear layers that LoRA adapts",
        example="q_proj, v_proj",
    )
    lora_part: str = setting(
        "all",
        "where LoRA adapts those layers: everywhere, or in the decoder alone",
        choices=("all", "decoder"),
        example="decoder",
    )
    encoder_cache_gb: float = setting(
        20.0,
        "disk space on each host for the outputs of an encoder that is not trained (method = decoder, or lora_part = "
        "decoder), which is then computed once for each clip and not in each epoch; 0: none",
        low=0.0,
        example="50",
    )
    dropout: float = setting(
        0.0, "dropout in the model's feed-forward layers while training", low=0.0, high=0.9, example="0.1"
    )
    label_smoothing: float = setting(
        0.0, "share of each target token's probability that is spread over all tokens", low=0.0, high=0.5, example="0.1"
    )
    speed_perturbation: float = setting(
        0.0,
        "clips are played slower or faster by this share, or as they are, anew in each epoch",
        low=0.0,
        high=0.5,
        example="0.1",
        changes_plan=True,
    )
    mask_time_prob: float = setting(
        0.0,
        "SpecAugment: share of a clip's frames that is masked",
        low=0.0,
        high=0.5,
        example="0.05",
        changes_plan=True,
    )
    mask_time_length: int = setting(
        10, "frames (of 10 ms) of a mask; at most a quarter of the clip", low=1, example="20", changes_plan=True
    )
    mask_feature_prob: float = setting(
        0.0, "SpecAugment: share of the mel bands that is masked", low=0.0, high=0.5, example="0.05", changes_plan=True
    )
    mask_feature_length: int = setting(
        10, "mel bands of a mask; at most a quarter of them", low=1, example="8", changes_plan=True
    )
    gradient_checkpointing: bool = setting(
        False, "saves memory, takes a third longer; `false`: only where not even one clip would fit", example="true"
    )

    epochs: int = setting(5, "passes over the training clips", low=1, example="3")
    max_steps: int = setting(0, "stop after this many optimizer steps; 0: no limit", low=0, example="500")
    early_stopping: int = setting(
        0,
        "epochs in a row without a new lowest validation loss (or WER, see keep_best), after which training ends; "
        "0: never",
        low=0,
        example="3",
    )
    keep_best: str = setting(
        "",
        "the model is that of the epoch with the lowest validation loss (`loss`, or `true`) or WER (`wer`: all hosts "
        "write down what they hear after each epoch), not that of the last one; early_stopping goes by the same",
        choices=("", "loss", "wer"),
        example="wer",
    )
    blend: float = setting(
        1.0,
        "share of what was learnt that the model keeps: with 0.8 it has four parts of the trained weights and one of "
        "the base's, so that it forgets less, and learns a little less",
        low=0.0,
        high=1.0,
        example="0.8",
    )
    batch_size: int = setting(
        8, "clips per optimizer step, of all hosts together", low=1, example="4", changes_plan=True
    )
    accumulation: int = setting(1, "micro-batches that one batch is cut into, to save memory", low=1, example="2")
    learning_rate: float = setting(1e-5, "peak learning rate", low=0.0, high=10.0, example="1e-4")
    schedule: str = setting(
        "cosine", "learning rate after warm-up", choices=("constant", "linear", "cosine"), example="linear"
    )
    warmup_ratio: float = setting(
        0.1, "share of the steps in which the learning rate rises", low=0.0, high=1.0, example="0.05"
    )
    weight_decay: float = setting(0.01, "weight decay; none for biases and norms", low=0.0, example="0.0")
    optimizer: str = setting(
        "adamw",
        "what makes the steps: adamw, or low_memory (Adafactor), which keeps next to no moments; with method = full or "
        "decoder it holds the weights that are trained in bf16",
        choices=("adamw", "low_memory"),
        example="low_memory",
    )
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm; 0: never", low=0.0, example="0.5")
    seed: int = setting(
        42, "order of the clips, initial LoRA weights, dropout, augmentation", low=0, example="7", changes_plan=True
    )
    audio_context: str = setting(
        "mixed",
        "how long clips are made: padded to little more than they last, or to the full 30 s; mixed: a share of them to "
        "30 s",
        choices=("cropped", "mixed", "full"),
        example="full",
        changes_plan=True,
    )
    full_share: float = setting(
        0.02,
        "with audio_context = mixed: share of the clips that are padded to 30 s",
        low=0.0,
        high=1.0,
        example="0.2",
        changes_plan=True,
    )

    device: str = setting("auto", "where to train", choices=("auto", "mps", "cuda", "cpu"), example="mps")
    precision: str = setting(
        "float32", "arithmetic of forward and backward", choices=("float32", "bf16"), example="bf16"
    )
    frozen_precision: str = setting(
        "auto",
        "how weights are held that are not trained (method = lora, decoder); auto: float32, or where there is too "
        "little memory for it bf16 or int8; the model that comes out has the published weights",
        choices=("auto", "float32", "bf16", "int8"),
        example="bf16",
    )
    num_threads: int = setting(0, "CPU threads per process; 0: torch decides", low=0, example="2")
    runs_dir: Path = setting(Path("runs"), "where runs are kept", example="~/whisper-runs")
    checkpoint_interval: int = setting(
        0,
        "exchanges (rounds; with allreduce: steps) between checkpoints; 0: about twenty in a run, 25 steps or more "
        "apart, and with diloco fewer if they are large",
        low=0,
        example="5",
    )
    keep_checkpoints: int = setting(2, "checkpoints that each host keeps during a run", low=2, high=16, example="2")
    shards: tuple[str, ...] = setting(
        (),
        "train on one machine the batches that hosts with these names would get, to compare runs",
        example="mac-studio.local mac-mini.local",
        changes_plan=True,
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def trains_encoder(self) -> bool:
        return self.method == "full" or (self.method == "lora" and self.lora_part == "all")

    @property
    def rounds_frozen(self) -> bool:
        return self.method != "full" and self.frozen_precision in ("bf16", "int8")

    @property
    def rounds_trained(self) -> bool:
        """Tell whether matrices that are trained are held in bf16; adapters never are."""
        return self.method != "lora" and self.optimizer == "low_memory"

    @property
    def caches_encoder(self) -> bool:
        """Tell whether the encoder's outputs are kept: not where a clip changes from epoch to epoch."""
        changes = self.speed_perturbation or self.mask_time_prob or self.mask_feature_prob
        return not self.trains_encoder and self.encoder_cache_gb > 0 and not changes


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Values of one section with what it inherits. `origin[key]` is 'config.ini:12 [dataset:demo]'."""

    name: str
    values: dict[str, str]
    origin: dict[str, str]

    def with_changes(self, changes: Resolved) -> Resolved:
        return Resolved(self.name, self.values | changes.values, self.origin | changes.origin)

    def only(self, keys: Collection[str]) -> Resolved:
        values = {key: value for key, value in self.values.items() if key in keys}
        return Resolved(self.name, values, {key: self.origin[key] for key in values if key in self.origin})

    def without(self, keys: Collection[str]) -> Resolved:
        return self.only(self.values.keys() - {*keys})


UNCHANGED = Resolved("", {}, {})
READ_AS = {"keep_best": dict.fromkeys(TRUE, "loss") | dict.fromkeys(FALSE, "")}  # words that stand for others
TAKEN_OUT = {("audio_context", "pack")}  # settings and values that an older config.ini may have


def set_by_hand(settings: Sequence[str]) -> Resolved:
    """Return the settings of `--set KEY=VALUE`, to be read as the profile's own keys. Raises ConfigError."""
    values: dict[str, str] = {}
    for text in settings:
        key, equals, value = map(str.strip, text.partition("="))
        if not (key and equals):
            raise ConfigError(f"--set {text}: not a setting", remedy="Write KEY=VALUE, for example --set epochs=3.")
        if key == "base_profile":
            raise ConfigError(f"--set {key}: that is another profile", remedy="Name its [distributed:NAME] instead.")
        if key in values:
            raise ConfigError(f"--set {key}: it is set twice", remedy="Leave one of them out.")
        values[key] = value
    return Resolved("--set", values, {key: f"--set {key}" for key in values})


class IniParser(configparser.ConfigParser):
    """Keeps keys in the case that they are written in."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


class ConfigFile:
    """A parsed `config.ini`, or `text` in its place. Raises ConfigError with file and line."""

    def __init__(self, path: Path | str = "config.ini", text: str | None = None):
        self.path = Path(path).absolute()
        # [DEFAULT] is read as an ordinary section: what a section inherits is decided below, with where it came from.
        self._parser = IniParser(interpolation=None, inline_comment_prefixes=("#", ";"), default_section="")
        try:
            text = self.path.read_text(encoding="utf-8-sig") if text is None else text.removeprefix("\ufeff")
            self._parser.read_string(text, source=self.path.name)
        except OSError as error:
            remedy = "Run from the project folder, or name a file that you may read with --config."
            raise ConfigError(f"{path}: {error.strerror or error}", remedy=remedy) from None
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{self.path.name}:{line}: not UTF-8 text", remedy="Save it as UTF-8.") from None
        except configparser.Error as error:
            raise self._unreadable(error, text or "") from None
        before, nul, _ = text.partition("\0")
        if nul:
            line = before.count("\n") + 1
            raise ConfigError(f"{self.path.name}:{line}: not UTF-8 text: it holds a NUL", remedy="Save it as UTF-8.")
        self._lines = _line_numbers(text)
        for header in self._parser.sections():
            for key in (key for key in self._parser[header] if key.startswith("[")):
                place = f"{self.path.name}:{self._lines.get((header, key), '?')}"
                raise ConfigError(
                    f"{place}: the name of a section lacks its closing bracket", remedy="Write [KIND:NAME]."
                )
            kind, _, name = header.partition(":")
            if header != "DEFAULT" and (kind not in KINDS or not name):
                place = f"{self.path.name}:{self._lines.get((header, None), '?')}"
                raise ConfigError(
                    f"{place}: unknown section [{header}]{nearest(kind, KINDS)}",
                    remedy="Sections are [DEFAULT], [model:NAME], [dataset:NAME], [profile:NAME], [distributed:NAME].",
                )

    def names(self, kind: str) -> list[str]:
        return [s.split(":", 1)[1] for s in self._parser.sections() if s.startswith(f"{kind}:")]

    def has(self, kind: str, name: str) -> bool:
        return self._parser.has_section(f"{kind}:{name}")

    def section(self, kind: str, name: str, asked_by: str = "") -> Resolved:
        """Return the keys of one section alone, without what it inherits. `asked_by` is the place that names it."""
        if not self.has(kind, name):
            known, place = self.names(kind), asked_by or self.path.name
            raise ConfigError(
                f"{place}: there is no [{kind}:{name}]{nearest(name, known)}",
                remedy=f"Known: {', '.join(known) or 'none'}. `multimac config show` lists them.",
            )
        return self._layer(f"{kind}:{name}")

    def paths(self, key: str) -> list[Path]:
        """Return the values that any section has for `key`, as absolute paths."""
        texts = (self._layer(header).values.get(key) for header in self._parser.sections())
        return [(self.path.parent / expanded(text)).absolute() for text in texts if text]

    def profile_values(self, name: str, asked_by: str = "", changes: Resolved = UNCHANGED) -> Resolved:
        """Return profile <- model + dataset <- DEFAULT, the nearest winning, without `model` and `dataset` themselves.

        `changes` are read as if they stood in the profile's section.
        """
        profile = self.section("profile", name, asked_by).with_changes(changes)
        layers = [self._layer("DEFAULT")]
        for kind in INHERITED:
            if kind in profile.values:
                layers.append(self.section(kind, profile.values[kind], profile.origin[kind]))
        layers.append(profile)
        values = {key: value for layer in layers for key, value in layer.values.items() if key not in INHERITED}
        return Resolved(name, values, {key: place for layer in layers for key, place in layer.origin.items()})

    def profile(self, name: str) -> Profile:
        values = self.profile_values(name)
        return self.build(Profile, values.without(OF_RUNS), f"profile:{name}")

    def build(self, cls, resolved: Resolved, section: str):
        """Return an instance of the settings dataclass `cls` from text. Raises ConfigError naming line and key."""
        fields, hints = {field.name: field for field in dataclasses.fields(cls)}, hints_of(cls)
        built: dict[str, Any] = {}
        for key, text in resolved.values.items():
            place = resolved.origin.get(key, self.path.name)
            if key not in fields:
                known = f"Known keys: {', '.join(sorted(fields))}."
                raise ConfigError(f"{place}: unknown key {key!r}{nearest(key, fields)}", remedy=known)
            if (key, text.strip()) in TAKEN_OUT:
                remedy = '"Tried, and left out" in docs/performance.md says why, and what to use.'
                raise ConfigError(f"{place}: {key} = {text} is no longer there", remedy=remedy)
            try:
                value = parse(fields[key], hints[key], READ_AS.get(key, {}).get(text.strip().lower(), text))
            except ValueError as error:
                raise ConfigError(f"{place}: {key} = {text}: {error}", remedy=fields[key].metadata["help"]) from None
            built[key] = (self.path.parent / expanded(value)).absolute() if isinstance(value, Path) else value
        for key, field in fields.items():
            if key not in built and field.default is dataclasses.MISSING:
                help = field.metadata["help"]
                raise ConfigError(f"{self.path.name}: [{section}] has no {key}", remedy=f"{key}: {help}")
        if "base_model" in built:
            built["base_model"] = self._model_path(built["base_model"], resolved.origin["base_model"])
        if built.get("runs_dir") is None and "runs_dir" in fields:
            built["runs_dir"] = self.path.parent / Profile.runs_dir
        return cls(**built)

    def _model_path(self, text: str, place: str) -> str:
        """Return an existing folder as an absolute path; anything else must look like a hub id (`owner/name`)."""
        path = (self.path.parent / expanded(text)).absolute()
        try:
            if path.is_dir():
                return str(path)
        except OSError as error:  # a name longer than names can be
            raise ConfigError(f"{place}: base_model: {error.strerror}", remedy="Give a folder, or a hub id.") from None
        if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith("."):
            return text
        remedy = f"A folder in transformers layout (looked at {path}), or a hub id such as openai/whisper-small."
        near = like(path) or nearest(text, WHISPERS)
        what = f"{place}: base_model = {text}: no such folder, and not a hub id{near}"
        raise ConfigError(what, remedy=remedy)

    def _unreadable(self, error: configparser.Error, text: str) -> ConfigError:
        errors = getattr(error, "errors", None)  # of a ParsingError
        line: int = errors[0][0] if errors else getattr(error, "lineno", 0)
        place = f"{self.path.name}:{line}"
        match error:
            case configparser.MissingSectionHeaderError():
                remedy = "Put it below [DEFAULT] or [profile:NAME]."
                return ConfigError(f"{place}: a setting before the first section", remedy=remedy)
            case configparser.DuplicateOptionError():
                what = f"{place}: {error.option} is set twice in [{error.section}]"
                return ConfigError(what, remedy="Remove one of them.")
            case configparser.DuplicateSectionError():
                what = f"{place}: section [{error.section}] appears twice"
                return ConfigError(what, remedy="Remove one of them, or merge the two.")
        found = text.split("\n")[line - 1].strip()
        return ConfigError(f"{place}: not a setting: {found}", remedy="Write `key = value`, or # before a comment.")

    def _layer(self, header: str) -> Resolved:
        """Return the keys of a section, none if there is no such section, and where each stands."""
        values = dict(self._parser.items(header)) if self._parser.has_section(header) else {}
        lines = {key: self._lines.get((header, key), "?") for key in values}
        return Resolved(header, values, {key: f"{self.path.name}:{line} [{header}]" for key, line in lines.items()})


def _line_numbers(text: str) -> dict[tuple[str, str | None], int]:
    """Return (section, key) -> line; (section, None) is the section's header."""
    lines: dict[tuple[str, str | None], int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if match := re.match(r"\[([^\]]+)\]", line):
            section = match[1]
            lines[section, None] = number
        elif match := re.match(r"([^\s#;=:][^=:]*?)\s*[=:]", line):
            lines[section, match[1]] = number
    return lines


def with_sections(text: str, sections: Sequence[Section]) -> str:
    """Put sections into a text: one that exists is replaced where it stands, a new one is added at the end."""
    newline = "\r\n" if "\r\n" in text else "\n"
    for header, keys in sections:
        body = newline.join([f"[{header}]", *(f"{key} = {value}" for key, value in keys.items())]) + newline
        parts = HEADER.split(text)
        old = next((number for number, part in enumerate(parts) if part.startswith(f"[{header}]")), None)
        if old is not None:
            lines = parts[old].splitlines(keepends=True)
            end = len(lines)  # comments and blank lines at a section's end belong to the next one
            while end and (not (line := lines[end - 1].strip()) or line.startswith(("#", ";"))):
                end -= 1
            parts[old] = body + "".join(lines[end:])
            text = "".join(parts)
        else:
            gap = "" if not text else newline if text.endswith("\n") else newline * 2
            text = f"{text}{gap}{body}"
    return text


def read_text(path: Path) -> str:
    """Read a config.ini with its own line ends; '' if there is none. Raises ConfigError."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        ConfigFile(path)  # says what is wrong with it, and where
        raise
