"""What a terminal shows of a run while it lasts: one screen, made anew from a RunView for the size that it has then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.text import Text

from distributed.run_dir.events import Event
from distributed.run_dir.run_view import GONE, HostView, RunView
from whisper_tuner.text import counted, duration, harmless, size

from .terminal import wrapped

GAP = "  "
BETWEEN_HINTS = "   "
BAR = 12  # characters
DONE, TO_DO = "━", "─"  # also without colours
CURRENT_S = 30.0  # a machine tells every 10 s how it is; an older word says nothing of now
FEW_LINES = 3  # of what happened: they go before a second line for each host
ROOMY = 16  # rows, from which on empty ones set parts apart
NAME = 20  # columns that a host's name may take


@dataclass(frozen=True)
class Column:
    """importance: the least important columns go first where all do not fit; None: this one never goes."""

    name: str
    cell: Callable[[HostView], str]
    importance: int | None = None
    right: bool = True


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _heat(machine: Event) -> str:
    degrees = "" if machine.temperature is None else f"{machine.temperature:.0f} °C"
    return " ".join(filter(None, [degrees, machine.thermal.removeprefix("nominal")]))


def _battery(machine: Event) -> str:
    return _share(machine.battery) + (", no mains" if machine.on_mains is False else "")


def _memory(machine: Event) -> str:
    if not machine.memory_total or machine.memory_used is None:
        return ""
    return _share(100 * machine.memory_used / machine.memory_total)


READINGS: dict[str, Callable[[Event], str]] = {
    "cpu": lambda machine: _share(machine.cpu),
    "gpu": lambda machine: _share(machine.gpu),
    "memory": _memory,
    "heat": _heat,
    "battery": _battery,
}
FIGURES = (
    Column("host", lambda host: _name(host), right=False),
    Column("", lambda host: _bar(host), 4, right=False),
    Column("step", lambda host: f"{host.step}/{host.total_steps}" if host.total_steps else "", 6),
    Column("loss", lambda host: f"{host.loss:.3f}" if host.loss is not None else "", 5),
    Column("clips/s", lambda host: f"{host.speed:.1f}" if host.speed else "", 3),
    Column("round", lambda host: str(host.round or ""), 1),
    Column("sent", lambda host: size(host.sent) if host.sent else "", 2),
    Column("left", lambda host: duration(host.remaining), 7),
    Column("", lambda host: harmless(host.device if host.state == "training" else host.state), 8, right=False),
)


def _name(host: HostView) -> str:
    name = Text(harmless(host.name.removesuffix(".local")))
    name.truncate(NAME, overflow="ellipsis")
    return name.plain


def _bar(host: HostView) -> str:
    if not host.total_steps:
        return ""
    done = min(BAR, BAR * host.step // host.total_steps)
    return DONE * done + TO_DO * (BAR - done)


def reading_of(name: str, host: HostView, *, now: float) -> str:
    """Return one of READINGS as a host has told it lately; "" if it has not."""
    machine = host.machine if host.state not in GONE else None
    return harmless(READINGS[name](machine)) if machine and now - machine.time < CURRENT_S else ""


def screen(
    view: RunView, told: Sequence[str], *, name: str, console: Console, hint: str = "", now: float
) -> list[Text]:
    """Return a terminal's rows, from the top: the run, its hosts, and the last of what it has `told`.

    hint: what keys do. now: the time as events have it.
    """
    width, height = console.size
    hosts, roomy = list(view.hosts.values()), height >= ROOMY
    top = [_head(view, name, width), *([Text()] if roomy else [])]
    hints = ([hint] if len(hint) <= width else hint.split(BETWEEN_HINTS)) if hint else []
    foot = [Text(one, "dim", no_wrap=True) for one in hints if height > len(hosts) + 2 + len(hints)]
    room = height - len(top) - len(foot)
    table = _table(hosts, width, room, now=now)
    table += [Text()] if roomy and table and len(table) + 1 < room else []
    rows = [*top, *table, *_last(told, console, room - len(table))]
    return [*rows, *[Text()] * (height - len(rows) - len(foot)), *foot]


def _head(view: RunView, name: str, width: int) -> Text:
    epoch = max((host.epoch for host in view.hosts.values()), default=0)
    lefts = [host.remaining for host in view.hosts.values() if host.state == "training"]
    left = max(filter(None, lefts), default=None) if None not in lefts else None  # one that begins may take longest
    phase = _phase(view)
    is_training = epoch and phase == "training"
    parts = [phase, f"{duration(left)} left" if left else "", f"epoch {epoch}" if is_training else ""]
    head = Text(harmless(name), "bold", overflow="ellipsis", no_wrap=True)
    for part in filter(None, parts):
        if head.cell_len + len(GAP) + len(part) <= width:
            head.append(GAP).append(harmless(part), "not bold")
    head.truncate(width)
    return head


def _phase(view: RunView) -> str:
    if view.end:
        return "ended"
    if view.progress or view.phase == "evaluate":
        return view.progress or "evaluating"
    if view.is_paused:
        return "paused"
    states = {host.state for host in view.hosts.values()}
    return "training" if "training" in states else "saving" if "done" in states else "starting"


def _table(hosts: Sequence[HostView], width: int, room: int, *, now: float) -> list[Text]:
    """Return a row for each host below the columns' names; what machines tell in columns, or else in a second row."""
    shown = list(hosts) if len(hosts) < room else list(hosts[: max(0, room - 2)])
    columns, readings = (
        [column for column in found if any(map(column.cell, shown))]
        for found in (FIGURES, [Column(name, partial(reading_of, name, now=now)) for name in READINGS])
    )
    if in_columns := _width([*columns, *readings], shown) <= width:
        columns += readings
    while _width(columns, shown) > width and (optional := [column for column in columns if column.importance]):
        columns.remove(min(optional, key=lambda column: column.importance or 0))
    heads, *rows = _rows(columns, shown)
    in_rows = not in_columns and 2 * len(hosts) + 1 + FEW_LINES <= room
    found = [heads]
    for host, row in zip(shown, rows, strict=True):
        found.append(row)
        if in_rows and (about := _readings_told(host, width, now)):
            found.append(Text(f"{GAP}{about}", "dim"))
    if len(shown) < len(hosts):
        found.append(Text(f"and {counted(len(hosts) - len(shown), 'more host')}"))
    return found if hosts else []


def _readings_told(host: HostView, width: int, now: float) -> str:
    told = ""
    for name in READINGS:
        value = reading_of(name, host, now=now)
        longer = ", ".join(filter(None, [told, f"{name} {value}" if value else ""]))
        told = longer if len(GAP) + len(longer) <= width else told
    return told


def _width(columns: Sequence[Column], hosts: Sequence[HostView]) -> int:
    return max(row.cell_len for row in _rows(columns, hosts))


def _rows(columns: Sequence[Column], hosts: Sequence[HostView]) -> list[Text]:
    rows = [Text("", "dim"), *(Text() for _ in hosts)]
    for number, column in enumerate(columns):
        cells = [Text(column.name), *(Text(column.cell(host)) for host in hosts)]
        widest = max(cell.cell_len for cell in cells)
        for row, cell in zip(rows, cells, strict=True):
            cell.align("right" if column.right else "left", widest)
            row.append(GAP if number else "").append(cell)
    for row in rows:
        row.rstrip()
        row.highlight_regex(f"{DONE}+", "green")
    return rows


def _last(told: Sequence[str], console: Console, room: int) -> list[Text]:
    """Return the last lines that fit as whole ones, each in as many rows as it takes."""
    found: list[Text] = []
    for line in reversed(told):
        rows = [*Text(harmless(wrapped(line, console.width))).wrap(console, console.width)]
        if found and len(found) + len(rows) > room:
            break
        found = rows + found
    return found[: max(0, room)]
