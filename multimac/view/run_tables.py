"""What `runs list`, `show` and `compare` print: tables, and curves as text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distributed.plan.launch import Launch
from distributed.run_dir.away import read_away
from distributed.run_dir.folder import as_typed
from distributed.run_dir.summary import BROKEN, FAILED, FINISHED, RUNNING, HostFigures, RunSummary
from whisper_tuner.errors import RunError
from whisper_tuner.files import shown
from whisper_tuner.text import duration, size, wer_told, wer_verdict

LONG_WAIT = 0.02  # of the time of all steps; what is less is not worth a column
WIDE = 100  # columns of a terminal that has room for the names of hosts
STYLES = {RUNNING: "cyan", FINISHED: "green", FAILED: "red", BROKEN: "red"}
LOSS, VALIDATION = "·", "◆"
MARKS = "·+×o*#"


def list_table(rows: Sequence[tuple[RunSummary, float | None]], width: int) -> Table:
    """List runs, each with its speed-up."""
    table = _table(gap=1)
    table.add_column("run", overflow="fold")
    table.add_column("when", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("hosts", overflow="fold", justify="left" if width >= WIDE else "right")
    for name in ("WER", "time", "speed-up"):
        table.add_column(name, no_wrap=True, justify="right")
    for run, speed_up in rows:
        hosts = ", ".join(run.hosts) if width >= WIDE else str(len(run.hosts) or "")
        state = Text(run.state, STYLES.get(run.state, "default"))
        wer = wer_told(run.wer_before, run.wer_after).partition(":")[0]
        if verdict := wer_verdict(run.wer_difference, run.clips_tested):
            wer += f"\n{verdict}"
        figures = (wer, duration(run.seconds or None), times(speed_up))
        table.add_row(run.id, when(run.created), state, hosts, *figures)
    return table


def _table(*, gap: int = 2) -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold", show_edge=False)


def simple_table(first: str, *others: str) -> Table:
    """Make a table of figures, each column but the first to the right."""
    table = _table()
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def facts(run: RunSummary, speed_up: float | None) -> list[tuple[str, str]]:
    """Return label and value of everything that is known of a run."""
    per_second = f"{run.clips_per_s:.1f} clips/s" if run.clips_per_s else ""
    saved = str(len(run.checkpoints) or ("on other hosts" if run.has_checkpoints else ""))
    if run.checkpoint_step is not None:
        saved += f", the newest at step {run.checkpoint_step}"
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
    pairs = [
        ("profile", run.name),
        ("state", run.state + (f", {run.message}" if run.state == RUNNING and run.message else "")),
        ("begun", begun + (f", in {run.attempts} attempts" if run.attempts > 1 else "")),
        ("hosts", ", ".join(run.hosts)),
        ("hosts before", ", ".join(host.name for host in run.per_host if host.name not in run.hosts)),
        ("left out", ", ".join(read_away(run.path)) if run.state == RUNNING else ""),
        ("lost", "; ".join(f"{name}: {told}" for name, told in run.lost.items())),
        ("cut off", counted({f"{one} and {other} from each other": n for (one, other), n in run.apart.items()})),
        ("base model", run.base_model and str(shown(Path(run.base_model)))),
        ("method", run.method),
        ("strategy", run.strategy),
        ("steps", f"{run.steps} of {run.total_steps}" if run.total_steps else ""),
        ("best", run.best),
        ("rounds", str(run.rounds or "")),
        ("clips trained", clips_told(run)),
        ("training", ", ".join(filter(None, [duration(run.seconds or None), per_second]))),
        ("start to end", forecast_told(run)),
        ("speed-up", f"{times(speed_up)} the fastest run of one host alone" if speed_up else ""),
        ("sent", size(run.bytes) if run.bytes else ""),
        ("WER", wer_told(run.wer_before, run.wer_after, run.wer_difference, run.clips_tested)),
        *((f"WER on {kept.name}", kept.told) for kept in run.kept),
        ("terms", run.terms),
        ("normaliser", ", ".join(run.normalizers)),
        ("model", str(run.model or "")),
        ("report", str(run.report or "")),
        ("checkpoints", saved),
        ("on disk", size(run.size)),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
    ]
    return [(label, value) for label, value in pairs if value]


def clips_told(run: RunSummary) -> str:
    """Tell how many clips were trained, in all epochs together; "" for none."""
    lost = "; what a lost host had trained in vain is counted, too" if run.lost else ""
    return f"{run.clips:,}, in all epochs together{lost}" if run.clips else ""


def forecast_told(run: RunSummary) -> str:
    """Tell the time from the command to the report beside what was predicted; "" where one of them is not known.

    A run that was stopped and resumed has no such time.
    """
    predicted, took = sum(map(round, run.expected)), sum(run.took)
    if not predicted:
        return ""
    if not took:
        return f"predicted {duration(predicted)}" if run.state == RUNNING else ""
    off = f"{abs(predicted / took - 1):.0%} too {'long' if predicted > took else 'short'}"
    return f"{duration(took)}; predicted {duration(predicted)}, {off}"


def counted(found: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count} times)" if count > 1 else name for name, count in found.items())


def facts_table(run: RunSummary, speed_up: float | None) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for pair in facts(run, speed_up):
        table.add_row(*pair)
    return table


def host_table(run: RunSummary) -> Table:
    """Tell what each host did; a column that would be empty is left out."""
    is_several = len(run.per_host) > 1  # of one host alone the run's own speed stands above
    columns = {
        "host": [host.name for host in run.per_host],
        "device": [host.device for host in run.per_host],
        "steps": [str(host.steps or "") for host in run.per_host],
        "clips": [str(host.clips or "") for host in run.per_host],
        "clips/s": [f"{host.clips_per_s:.1f}" if host.clips_per_s and is_several else "" for host in run.per_host],
        "communicating": [f"{h.communicating:.1f} s" if h.communicating is not None else "" for h in run.per_host],
        "data wait": [f"{h.waiting:.1f} s" if waits_for_data(h) else "" for h in run.per_host],
        "sent": [size(host.bytes) if host.bytes else "" for host in run.per_host],
        "memory": [size(host.memory) if host.memory else "" for host in run.per_host],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    table = _table()
    for name in columns:
        table.add_column(name, justify="left" if name in ("host", "device") else "right", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def waits_for_data(host: HostFigures) -> bool:
    """Tell whether a host waited for batches for long, beside the time of its steps."""
    return bool(host.waiting and host.clips_per_s and host.waiting * host.clips_per_s > LONG_WAIT * host.clips)


def curve_lines(run: RunSummary, width: int) -> list[str]:
    """Draw the loss with validations marked, and the learning rate."""
    curves = run.curves
    loss = [Curve(mark=LOSS, points=curves.loss), Curve(mark=VALIDATION, points=curves.validation, in_front=True)]
    lines = []
    if curves.loss:
        marked = f"{LOSS} training" + (f", {VALIDATION} validation" if curves.validation else "")
        lines += [f"loss ({marked})", *plot(loss, width=width)]
    if curves.lr:
        lines += ["learning rate", *plot([Curve(mark=LOSS, points=curves.lr)], width=width, height=6)]
    return lines


def comparison(runs: Sequence[RunSummary], speed_ups: Sequence[float | None]) -> Table:
    """Tell figures, and the settings that differ, in a column for each run, headed by its mark."""
    table = _table()
    table.add_column("")
    for number in range(len(runs)):
        table.add_column(mark(number))
    known = [dict(facts(run, speed_up)) for run, speed_up in zip(runs, speed_ups, strict=True)]
    for label in dict.fromkeys(label for pairs in known for label in pairs if label not in ("model", "report")):
        table.add_row(label, *(pairs.get(label, "") for pairs in known))
    if found := differing(runs):
        table.add_section()
        table.add_row("settings that differ", style="bold")
    for name, values in found.items():
        table.add_row(name, *map(as_text, values))
    return table


def differing(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all runs, with each run's value; None where it has none."""
    settings = {name: [run.settings.get(name) for run in runs] for run in runs for name in run.settings}
    return {name: values for name, values in settings.items() if len(set(map(as_text, values))) > 1}


def compared_losses(runs: Sequence[RunSummary], width: int) -> list[str]:
    lines = plot([Curve(mark=mark(i), points=run.curves.loss) for i, run in enumerate(runs)], width=width)
    return ["loss", *lines] if lines else []


def print_next(console: Console, run: RunSummary) -> None:
    console.print("\n".join(["", "Next:", *(f"  {line}" for line in next_commands(run))]), soft_wrap=True)


def next_commands(run: RunSummary) -> list[str]:
    command, name = "multimac", as_typed(run.path)
    if run.state == RUNNING:
        return [f"{command} runs attach {name}", f"{command} runs stop {name}"]
    commands = []
    if run.resumable:
        kind = "distributed-train" if run.over_ssh else "finetune"
        with contextlib.suppress(RunError):  # begun by an earlier version, with settings that this one does not take
            Launch.load(run.path)
            commands.append(f"{command} {kind} --resume {name}")
    if run.model:
        if run.test and run.wer_after is None:
            commands.append(f"{command} evaluate {name}")
        commands.append(f"{command} transcribe recording.wav --model {name}")
        commands.append(f"{command} export {name} --to transformers")
    if run.steps and not run.report:
        commands.append(f"multimac report {name}")
    if run.state in (FAILED, BROKEN) and (run.path / "launcher.log").exists():
        commands.append(f"less {run.path / 'launcher.log'}")
    return commands


def mark(number: int) -> str:
    return MARKS[number % len(MARKS)]


def when(stamp: float) -> str:
    """Write a time as 12:10 if it was today, as 21 Nov if it was this year, else as 2025-11-21."""
    then, now = time.localtime(stamp), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%d %b" if then.tm_year == now.tm_year else "%Y-%m-%d", then)


def times(speed_up: float | None) -> str:
    return f"{speed_up:.2f}×" if speed_up else ""


def as_text(value: Any) -> str:
    """Write the value of a setting as config.ini has it; "" for None."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve drawn as text. Curves take turns in cells that they share; one in front always wins."""

    mark: str
    points: Sequence[tuple[float, float]]
    in_front: bool = False


def plot(curves: Sequence[Curve], *, width: int = 72, height: int = 12, x_label: str = "step") -> list[str]:
    """Draw finite values in lines of at most `width` characters, the last one labelling x; none without points."""
    everything = [point for curve in curves for point in curve.points]
    if not everything:
        return []
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    labels = _labels(low, high, height)
    margin = max(map(len, labels))
    columns = max(10, width - margin - 2)
    canvas = [[" "] * columns for _ in range(height)]
    for number, curve in enumerate(curves):
        by_column: dict[int, list[float]] = {}
        for x, y in curve.points:
            column = round((x - left) / (right - left) * (columns - 1)) if right > left else 0
            by_column.setdefault(column, []).append(y)
        for column, values in by_column.items():
            y = sum(values) / len(values)
            row = round((high - y) / (high - low) * (height - 1)) if high > low else height // 2
            if canvas[row][column] == " " or curve.in_front or column % len(curves) == number:
                canvas[row][column] = curve.mark
    lines = [
        f"{label:>{margin}} {'┤' if label else '│'}{''.join(row)}".rstrip()
        for label, row in zip(labels, canvas, strict=True)
    ]
    begin, end = f"{x_label} {left:g}", f"{right:g}" if right > left else ""
    lines.append(f"{'':>{margin}} └{'─' * columns}")
    lines.append(f"{'':>{margin}}  {begin}{end:>{columns - len(begin)}}")
    return lines


def _labels(low: float, high: float, height: int) -> list[str]:
    """Return the value at every fourth row and the last, "" at the others."""
    rows = {*range(0, height - 2, 4), height - 1} if high > low else {height // 2}
    values = [high - (high - low) * row / max(1, height - 1) for row in range(height)]
    return [f"{value:.3g}" if row in rows else "" for row, value in enumerate(values)]
