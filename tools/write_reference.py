"""Writes docs/configuration.md and docs/messages.md from the source; `--check` says whether they are up to date."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "gym"), str(PROJECT / "tools")]

import messages  # noqa: E402
from reference_texts import EXAMPLES, HOST_TEXTS, KINDS, SECTIONS  # noqa: E402

from distributed.plan.hosts_file import HOST_KEYS, TOP_KEYS  # noqa: E402
from distributed.plan.job import FROM_PROFILE, Distribution  # noqa: E402
from distributed.ssh.host import PROJECT_PATH  # noqa: E402
from exogym.config import STRATEGIES, StrategyConfig, strategy_config  # noqa: E402
from exogym.errors import SettingError  # noqa: E402
from whisper_tuner.config import Profile  # noqa: E402

NOTE = "<!-- Written by tools/write_reference.py (`make reference`): change the source, not this file. -->"
PACKAGES = ("whisper_tuner", "distributed", "multimac", "gym/exogym")
Row = tuple[str, ...]


def configuration() -> str:
    parts = ["# Configuration", NOTE, SECTIONS["configuration"]]
    parts += ["## Profile", SECTIONS["profile"], _table(_settings_rows(Profile))]
    parts += ["## Distributed profile", SECTIONS["distributed"], _table(_settings_rows(Distribution))]
    parts += ["## Strategies", SECTIONS["strategies"]]
    parts.append(_table(_strategy_rows(StrategyConfig, set()), title="All strategies"))
    shared = {field.name for field in dataclasses.fields(StrategyConfig)}
    for name, (cls, _) in STRATEGIES.items():
        parts.append(_table(_strategy_rows(cls, shared | refused(name)), title=f"`strategy = {name}`"))
    header = ("key", "where", "type", "default", "meaning", "example")
    parts += ["## Hosts file", SECTIONS["hosts"], _table(_hosts_rows(), header=header)]
    return "\n\n".join(part for part in parts if part) + "\n"


def refused(strategy: str) -> set[str]:
    """Keys that a strategy has from another one and does not take, whatever else is set."""
    cls, _ = STRATEGIES[strategy]
    names = [field.name for field in dataclasses.fields(cls) if field.name not in FROM_PROFILE]
    rounds = {"H": "20"} if "H" in {field.name for field in dataclasses.fields(cls)} else {}
    return {name for name in names if not _is_taken(strategy, {name: EXAMPLES[name]} | rounds)}


def _is_taken(strategy: str, settings: dict[str, str]) -> bool:
    if "nesterov" in settings:
        settings |= {"outer_momentum": EXAMPLES["outer_momentum"]}
    try:
        strategy_config(strategy, settings)
    except SettingError:
        return False
    return True


def _settings_rows(cls) -> list[Row]:
    hints = typing.get_type_hints(cls)
    return [_row(field, _type(hints[field.name]), _range(field.metadata)) for field in dataclasses.fields(cls)]


def _strategy_rows(cls, without: set[str]) -> list[Row]:
    fields = [f for f in dataclasses.fields(cls) if f.name not in {*FROM_PROFILE, *without}]
    return [_row(field, KINDS[field.metadata["kind"]], "") for field in fields]


def _row(field: dataclasses.Field, kind: str, limits: str) -> Row:
    default = "required" if field.default is dataclasses.MISSING else _value(field.default)
    example = f"`{field.name} = {EXAMPLES[field.name]}`"
    return f"`{field.name}`", f"{kind}{', ' + limits if limits else ''}", default, field.metadata["help"], example


def _type(hint) -> str:
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return "words" if typing.get_origin(hint) is tuple else KINDS[hint]


def _range(meta) -> str:
    if meta["choices"]:
        return "one of " + " ".join(f"`{choice}`" for choice in meta["choices"])
    low, high = meta["low"], meta["high"]
    if None not in (low, high):
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}" if high is not None else ""


def _value(value) -> str:
    if value is None or value in ("", ()):
        return "none"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{text.lower() if isinstance(value, bool) else text}`"


def _hosts_rows() -> list[Row]:
    rows = []
    for key in dict.fromkeys([*TOP_KEYS, *HOST_KEYS]):
        where = [name for name, keys in (("top", TOP_KEYS), ("host", HOST_KEYS)) if key in keys]
        kind, default, meaning, example = HOST_TEXTS[key]
        rows.append((f"`{key}`", " and ".join(where), kind, default.format(PROJECT_PATH), meaning, f"`{example}`"))
    return rows


def _table(rows: list[Row], *, header: Row = ("key", "type", "default", "meaning", "example"), title: str = "") -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return (f"### {title}\n\n" if title else "") + "\n".join(lines)


def _sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((PROJECT / package).rglob("*.py"))]


def main() -> int:
    pages = {"configuration.md": configuration(), "messages.md": messages.page(_sources(), NOTE)}
    stale = [name for name, text in pages.items() if not _same(PROJECT / "docs" / name, text)]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/{name} is not what the source says: make reference")
        return 1 if stale else 0
    for name in stale:
        (PROJECT / "docs" / name).write_text(pages[name], encoding="utf-8")
        print(f"docs/{name}: written")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
