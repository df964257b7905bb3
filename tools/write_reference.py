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
from reference_texts import HOST_TEXTS, KINDS, SECTIONS  # noqa: E402

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
    parts += ["## Hosts file", SECTIONS["hosts"], _table(_hosts_rows(), header=header)]
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
    return [_row(field, hints_of(cls)[field.name]) for field in dataclasses.fields(cls) if field.name not in without]


def _row(field: dataclasses.Field, hint) -> Row:
    kind, limits = kind_of(hint), _range(field.metadata)
    words = "words" if typing.get_origin(kind) is tuple else KINDS[kind]
    default = "required" if field.default is dataclasses.MISSING else _value(field.default)
    example = f"`{field.name} = {field.metadata['example']}`"
    return f"`{field.name}`", ", ".join(filter(None, [words, limits])), default, field.metadata["help"], example


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
