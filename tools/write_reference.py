"""Write docs/configuration.md and docs/messages.md from the source; `--check` says whether they are up to date."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Collection
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym"), str(PROJECT / "tools")]

import messages  # noqa: E402

from distributed.plan.hosts_file import HOST_KEYS, TOP_KEYS  # noqa: E402
from distributed.plan.job import FROM_PROFILE, Distribution  # noqa: E402
from distributed.ssh.host import PROJECT_PATH  # noqa: E402
from exogym.config import hints_of, kind_of  # noqa: E402
from exogym.errors import SettingError  # noqa: E402
from exogym.strategy import STRATEGIES, StrategyConfig, strategy_config  # noqa: E402
from whisper_tuner.config import Profile  # noqa: E402

NOTE = "<!-- Written by tools/write_reference.py (`make reference`): change the source, not this file. -->"
PACKAGES = ("whisper_tuner", "distributed", "multimac", "gym/exogym")
Row = tuple[str, ...]

# What the settings do not say: words for their types, the hosts file's keys, introductions.
KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}

# key -> type, default, meaning, example
SSH_CONFIG = "as `~/.ssh/config` says"
HOST_TEXTS = {
    "master": (
        "address or object",
        "required",
        "the machine that you run the command on; it also trains, as rank 0",
        '"master": "mac-studio.local"',
    ),
    "workers": (
        "list",
        "required",
        "the other machines: addresses or objects; may be empty",
        '"workers": ["mac-mini.local", {"host": "192.168.1.30"}]',
    ),
    "host": (
        "text",
        "required",
        "name, `.local` name or IPv4 address",
        '"host": "192.168.1.30"',
    ),
    "ssh_user": ("text", SSH_CONFIG, "user name on that machine", '"ssh_user": "anna"'),
    "ssh_key_path": (
        "path",
        SSH_CONFIG + ", and ssh-agent",
        "private key on this machine",
        '"ssh_key_path": "~/.ssh/id_ed25519"',
    ),
    "python_env": (
        "path on the host",
        "`.venv` in `project_path`",
        "virtual environment that trains, or the path of a Python. Without it `hosts setup` makes one, and repairs it."
        " `{host}` as below",
        '"python_env": "~/multimac-whisper/.venv"',
    ),
    "project_path": (
        "path on the host",
        "`{}`",
        "where code, models and audio go; no other host may have the same. `{host}` becomes the host's address",
        '"project_path": "~/multimac-whisper-{host}"',
    ),
    "ssh_port": ("whole number, 1 to 65535", SSH_CONFIG, "port of its SSH server", '"ssh_port": 2222'),
    "interface": (
        "text",
        "the one that reaches the others",
        "network interface that the ranks talk over",
        '"interface": "en0"',
    ),
    "device": (
        "`auto`, `mps`, `cuda`, `cuda:N` or `cpu`",
        "the profile's `device`",
        "where this host trains",
        '"device": "cpu"',
    ),
}

SECTIONS = {
    "configuration": """\
`config.ini` has sections `[DEFAULT]`, `[model:NAME]`, `[dataset:NAME]`, `[profile:NAME]` and `[distributed:NAME]`.
A profile names a `model` and a `dataset` and inherits from both, and all inherit from `[DEFAULT]`; the most specific
section wins. Relative paths are relative to the folder of `config.ini`. `multimac config show NAME` prints the
resolved values, and where each comes from.

`finetune` and `distributed-train` take `--set KEY=VALUE`, several times, for any key that the profile may have. It is
read as if it stood in the profile, is kept with the run, and holds when that is resumed.""",
    "profile": """\
In `[DEFAULT]`, `[model:NAME]`, `[dataset:NAME]` or `[profile:NAME]`; a `[distributed:NAME]` section may override any
of them. `model = NAME` and `dataset = NAME` belong in a profile only.

[data.md](data.md) shows what data may look like, and `layout`, `audio_column`, `text_column`, `encoding` and
`delimiter`. A row has an audio and a text column. It may have `id`, `duration_s`, `speaker` and `language`: one with a
language is trained with that one in place of the profile's. English-only models ignore it. A language is a code, a
locale or an English name. The profile still needs a `language`, which the trained model then assumes.

`speed_perturbation`, `mask_time_prob`, `mask_feature_prob`, `timestamps_share` and `previous_text_share` change clips
anew in each epoch. All is drawn from the seed, the epoch and the clip's id, so that a clip is the same on whichever
machine trains it, and after a resume; only timestamps go by the step. Validation and test clips are never changed.

* `speed_perturbation = 0.1` plays a clip at 0.9, 1 or 1.1 of its speed, and so changes its pitch, too. No clip becomes
  longer than the longest. The cache of features takes three times the space.
* What each brings alone on 400 short French clips (tiny.en, 5 epochs, one seed, WER of 105 other clips): none 26.2,
  dropout 0.1 24.8, speed 0.1 25.2, masks 25.9, smoothing 26.1, previous text 26.2, all together 26.5. Two runs without
  any came to 25.4 and 26.2, so none stands out; all without timestamps.
  `python benchmarks/host_counts.py MODEL DATA --ranks 1 --also "dropout dropout=0.1"` measures it on your own data.
* `dropout` acts on what feed-forward layers compute (transformers' `activation_dropout`). Dropout of whole states, as
  transformers' `dropout`, spoils a Whisper, which was trained without: with 0.1 tiny.en came to WER 186, not 26.
* The masks are those of SpecAugment (1904.08779), with the clip's mean in them; the keys mean what transformers' mean.
  A model whose own `config.json` has `apply_spec_augment` masks as that says, besides.
* With `timestamps_share` this share of the steps is trained with timestamps: the text stands between the times at
  which the clip begins and ends, or each of its parts between its own times, if the manifest has them
  ([`timed_text`](data.md#columns)). The clips of such a step are joined to windows of up to 30 s, with pauses of up
  to a second between them, and most windows cut one more clip, as those of a long recording do. A quarter of such
  steps have a window of noise besides, in which nobody speaks and nothing is to be written. A model that is trained
  without forgets to write times, which long recordings and subtitles need. The model must have these tokens. Where
  the outputs of an encoder that is not trained are kept (`encoder_cache_gb`), or memory is short, clips are not
  joined. With 400 short French clips (tiny.en, LoRA, 5 epochs, means of three seeds) WER of other clips was 29.0, and
  of the same clips in recordings of 90 s 29.4; with `timestamps_share = 0` 29.2 and 38.1. But of English, which was
  not trained, it was 39.4, and 33.6 without: see [`keeps`](data.md#what-the-model-is-still-to-know).
* With `previous_text_share` the text of the row before is the prompt, if it is in the same language: its last 223
  tokens, as in Whisper. Prompts are not learnt. Useful where the rows of a manifest follow each other in a recording.
* With `no_speech = train` a row with an empty text teaches the model to write nothing. Published models forbid that in
  their `generation_config.json` (`begin_suppress_tokens`), so the trained model's allows it; in whisper.cpp and
  faster-whisper switch `suppress_blank` off. A LoRA adapter needs the `generation_config.json` beside it, too.

A batch is `batch_size` clips of all lengths, so that steps take equally long; it is computed in parts of like length.
`audio_context` says how long those are, [performance.md](performance.md) what each costs. Validation is cropped,
unless `audio_context = full`.

An encoder that is not trained says the same of a clip in each epoch. What it says is kept as fp16 in `.multimac/cache`,
2 bytes x width of the model for each 20 ms, and the decoder alone is computed from the second epoch on. A run that
needs more than `encoder_cache_gb` does not start. With speed perturbation or masks nothing is kept.
With mixed, the same clips are padded to 30 s in every epoch.""",
    "distributed": "In `[distributed:NAME]`, along with any key of a profile.",
    "strategies": """\
Keys of `[distributed:NAME]`, by `strategy`; [strategies.md](strategies.md) says what each strategy sends, and when to
choose it. The learning rate, its schedule, weight decay and gradient clipping are the profile's. Where a strategy has
rounds (`diloco`, `parameter_server`, `fedavg`, `sparta_diloco`), their length is `communication_interval`.

Where you leave `communication_interval`, `wire`, `overlap_steps`, `share_moments`, `scale_lr` or `weigh_steps` of
`diloco` open, they are chosen when a run on several hosts starts:
[strategies.md](strategies.md#what-is-chosen-for-you) says how. The defaults below are those of one machine. What a
strategy made in Python has instead is in `gym/README.md`.

With `sparta`, and with `fedavg` in islands, the machines never hold the same weights while they train; with
`sparta_diloco` they do only at the end of a round. The validation loss is that of the mean of their weights, and this
mean is what is saved in the end.

At the end of a DiLoCo round the machines take the average of their weights. `outer_momentum = 0.9` makes it the outer
step of the paper (2311.08105) instead: Nesterov momentum, and `outer_lr` 0.7 unless you set it. It helps when a
model is pre-trained from scratch over many rounds. When fine-tuning the bundled model (WER 67.7), it overshot: to
75.9 with 2 ranks, 8 epochs and 62 rounds (plain averaging: 22.7), to 41.7 with 4 ranks, 16 epochs and 52 rounds
(plain averaging: 17.6).""",
    "hosts": """\
`distributed_hosts.json` is one object. A worker is an address, or an object with `host` and any of the keys below,
which apply to that machine only. See `distributed_hosts.example.json`.""",
}


def configuration() -> str:
    parts = ["# Configuration", NOTE, SECTIONS["configuration"]]
    parts += ["## Profile", SECTIONS["profile"], _table(_rows(Profile))]
    parts += ["## Distributed profile", SECTIONS["distributed"], _table(_rows(Distribution))]
    parts += ["## Strategies", SECTIONS["strategies"]]
    parts.append(_table(_rows(StrategyConfig, FROM_PROFILE), title="All strategies"))
    shared = {field.name for field in dataclasses.fields(StrategyConfig)}
    for name, (cls, _) in STRATEGIES.items():
        parts.append(_table(_rows(cls, {*FROM_PROFILE, *shared, *refused(name)}), title=f"`strategy = {name}`"))
    header = ("key", "where", "type", "default", "meaning", "example")
    rows = []
    for key in dict.fromkeys([*TOP_KEYS, *HOST_KEYS]):
        where = [name for name, keys in (("top", TOP_KEYS), ("host", HOST_KEYS)) if key in keys]
        kind, default, meaning, example = HOST_TEXTS[key]
        rows.append((f"`{key}`", " and ".join(where), kind, default.format(PROJECT_PATH), meaning, f"`{example}`"))
    parts += ["## Hosts file", SECTIONS["hosts"], _table(rows, header=header)]
    return "\n\n".join(part for part in parts if part) + "\n"


def refused(strategy: str) -> set[str]:
    """Return the keys that a strategy has from another one and does not take, whatever else is set."""
    examples = {field.name: field.metadata["example"] for field in dataclasses.fields(STRATEGIES[strategy][0])}
    rounds = {"H": examples["H"]} if "H" in examples else {}

    def is_taken(name: str) -> bool:
        with_it = {"outer_momentum": examples["outer_momentum"]} if name == "nesterov" else {}
        try:
            strategy_config(strategy, {name: examples[name]} | rounds | with_it)
        except SettingError:
            return False
        return True

    return {name for name in examples if name not in FROM_PROFILE and not is_taken(name)}


def _rows(cls, without: Collection[str] = ()) -> list[Row]:
    rows = []
    for field in dataclasses.fields(cls):
        if field.name in without:
            continue
        kind, meta = kind_of(hints_of(cls)[field.name]), field.metadata
        words = "words" if typing.get_origin(kind) is tuple else KINDS[kind]
        limits = _range(meta, several=words == "words")
        about = f"{words}, {limits}" if limits else words
        value = field.default
        if value is dataclasses.MISSING:
            default = "required"
        elif value is None or value in ("", ()):
            default = "none"
        else:
            text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            default = f"`{text.lower() if isinstance(value, bool) else text}`"
        rows.append((f"`{field.name}`", about, default, meta["help"], f"`{field.name} = {meta['example']}`"))
    return rows


def _range(meta, *, several: bool) -> str:
    if meta["choices"]:
        return f"{'any' if several else 'one'} of " + " ".join(f"`{choice}`" for choice in meta["choices"])
    low, high = meta["low"], meta["high"]
    if None not in (low, high):
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}" if high is not None else ""


def _table(rows: list[Row], *, header: Row = ("key", "type", "default", "meaning", "example"), title: str = "") -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return (f"### {title}\n\n" if title else "") + "\n".join(lines)


def main() -> int:
    sources = [path for package in PACKAGES for path in sorted((PROJECT / package).rglob("*.py"))]
    pages = {"configuration.md": configuration(), "messages.md": messages.page(sources, NOTE)}
    there = {path.name: path.read_text(encoding="utf-8") for path in (PROJECT / "docs").glob("*.md")}
    stale = [name for name, text in pages.items() if there.get(name) != text]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/{name} is not what the source says: make reference")
        return 1 if stale else 0
    for name in stale:
        (PROJECT / "docs" / name).write_text(pages[name], encoding="utf-8")
        print(f"docs/{name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
