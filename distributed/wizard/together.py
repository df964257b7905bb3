"""Whether to train on all machines, and how they agree: the probe, its estimate, the strategy."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from whisper_tuner.errors import TunerError
from whisper_tuner.memory import trained_parameters

from ..commands.transfers import Transfers
from ..console import size
from ..remote import Remote
from ..start import connect_all
from .draft import Draft, Group
from .estimate import HOME_NETWORK, Work, exchange_s, interval, speed_up, strategy
from .questions import Option, Questions
from .speed import Probe, measure

STRATEGIES = {
    "diloco": "DiLoCo: agree every few steps; for home networks and large models",
    "allreduce": "AllReduce: agree at every step; exactly one big batch, much traffic",
}
NOT_MEASURED = Probe(speeds=())


def ask_together(questions: Questions, draft: Draft, group: Group, scratch: Path, console: Console) -> bool:
    """Fill draft.group and draft.strategy; False: the user rather trains on this machine alone."""
    probe = _probe(questions, draft, group, scratch, console)
    work = _work(draft, group, probe)
    chosen = strategy(probe.speeds, work, probe.bytes_s)
    steps = interval(probe.speeds, work, probe.bytes_s)
    times = speed_up(probe.speeds, work, probe.bytes_s, steps if chosen == "diloco" else 1)
    _show(probe, work, times, console)
    count = len(group.hosts.all)
    if not questions.confirm("together", f"Train on these {count} machines together?", times is None or times > 1.1):
        return False
    draft.group = group
    draft.strategy = _ask_strategy(questions, work, probe, chosen, steps, console)
    return True


def _probe(questions: Questions, draft: Draft, group: Group, scratch: Path, console: Console) -> Probe:
    message = "Measure how fast each machine trains this? (three steps each; sends model and some clips)"
    if not questions.confirm("probe", message, True):
        return NOT_MEASURED
    try:
        with contextlib.ExitStack() as stack:
            remotes = connect_all(group.hosts.workers)
            for remote in remotes:
                stack.callback(Remote.close, remote)
            samples = draft.data.samples["train"]
            show = stack.enter_context(Transfers(console))
            stack.enter_context(_status(console, "three training steps on each machine"))
            return measure(draft.job(), samples, group.hosts, remotes, scratch, show)
    except TunerError as error:
        console.print(f"The speed could not be measured: {escape(str(error))}", style="yellow", soft_wrap=True)
        return NOT_MEASURED


def _status(console: Console, text: str):
    """Only a line: a bar of transfers may be on the screen at the same time."""
    console.print(f"{text} ...")
    return contextlib.nullcontext()


def _work(draft: Draft, group: Group, probe: Probe) -> Work:
    hosts, shape = len(group.hosts.all), draft.model.shape
    measured = max((speed.trainable for speed in probe.speeds), default=0)
    trained = measured or (trained_parameters(shape, method=draft.method) if shape else 0)
    share = math.ceil(len(draft.data.samples["train"]) / hosts)
    steps = math.ceil(share / int(draft.settings["batch_size"])) * int(draft.settings["epochs"])
    return Work(payload=4 * trained, steps=steps, hosts=hosts)


def _show(probe: Probe, work: Work, times: float | None, console: Console) -> None:
    if probe.speeds:
        table = Table(header_style="bold")
        for column in ("machine", "clips/s", "seconds a step"):
            table.add_column(column, overflow="fold", justify="left" if column == "machine" else "right")
        for speed in probe.speeds:
            cells = (f"{speed.clips_s:.1f}", f"{speed.step_s:.2f}") if speed.clips_s else ("not measured", "")
            table.add_row(escape(speed.host), *cells)
        console.print(table)
        for speed in probe.speeds:
            if speed.problem:
                console.print(f"{escape(speed.host)}: {escape(speed.problem)}", style="yellow", soft_wrap=True)
    rate = f"{size(probe.bytes_s)}/s, as measured" if probe.bytes_s else f"{size(HOME_NETWORK)}/s, assumed"
    seconds = exchange_s(work, probe.bytes_s)
    console.print(f"One agreement sends {size(work.payload)}: about {seconds:.1f} s at {rate}.")
    if times is None:
        console.print("Speed-up over this machine alone: not measured.")
    else:
        console.print(f"Estimated speed-up over this machine alone: [bold]{times:.1f} times[/bold].")


def _ask_strategy(
    questions: Questions, work: Work, probe: Probe, chosen: str, steps: int, console: Console
) -> dict[str, str]:
    options = [Option(value=name, short=title.split(":")[0], title=title) for name, title in STRATEGIES.items()]
    answer = questions.select("strategy", "How shall the machines agree?", options, chosen)
    settings = {"strategy": answer}
    if answer == "diloco":
        message = f"Steps between two agreements ({work.steps} steps in all; fewer learn better, cost more):"
        settings["communication_interval"] = questions.text(
            "communication_interval", message, str(steps), lambda text: _check_interval(text, work.steps)
        )
    return settings


def _check_interval(text: str, steps: int) -> None:
    if not text.isdigit() or not 1 <= int(text) <= max(1, steps):
        raise ValueError(f"expected a whole number from 1 to {max(1, steps)}")
