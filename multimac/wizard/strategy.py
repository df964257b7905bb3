"""Asks whether to train on all hosts, and with which strategy: first the probe and what it promises."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from distributed.checkup.speed import Speed, measure, remember, step_of_all
from distributed.plan.automatic import FEWEST_ROUNDS, Conditions, Measured, chosen
from distributed.ssh.connection import Remote
from distributed.ssh.machine import on_each
from multimac.view.transfers import transfers
from whisper_tuner.config import Profile
from whisper_tuner.data.steps import steps_in_epoch
from whisper_tuner.errors import TunerError
from whisper_tuner.model.memory import trained_parameters
from whisper_tuner.text import size

from .draft import Draft, Group
from .questions import Option, Questions

SMALL_SHARE = 0.2  # of a step; agreeing at each may take so much
STRATEGIES = {
    "diloco": "DiLoCo: agree every few steps; for home networks and large models",
    "allreduce": "AllReduce: agree at every step; the same as on one machine, but much traffic",
}


def ask_strategy(questions: Questions, draft: Draft, group: Group, scratch: Path, console: Console) -> None:
    """Fill draft.group and draft.strategy, unless the user prefers to train on this machine alone."""
    speeds = _probe(questions, draft, group, scratch, console)
    conditions = _conditions(draft, group, speeds)
    suggested = suggested_strategy(conditions)
    job, rounds = chosen(draft.job().with_strategy("diloco"), conditions)
    if suggested == "diloco":
        waiting = conditions.waiting(job.strategy_config(conditions.steps))
    else:
        waiting, rounds = waiting_at_every_step(conditions), _each_step(conditions)
    times = speed_up(speeds, waiting)
    if conditions.parameters:
        console.print(f"{rounds[0].upper()}{rounds[1:]}.", markup=False, soft_wrap=True)
    promise = "not measured" if times is None else f"{times:.1f} times"
    console.print(f"Estimated speed-up over this machine alone: {promise}.")
    count = len(group.hosts.all)
    worth_it = times is None or times > 1.1 or not questions.interactive  # an answers file that names hosts means them
    if questions.confirm("together", f"Train on these {count} machines together?", worth_it):
        draft.group = group
        draft.strategy = _choose(questions, conditions.steps, suggested, job.distribution.communication_interval)


def _probe(questions: Questions, draft: Draft, group: Group, scratch: Path, console: Console) -> list[Speed]:
    message = "Measure each machine's speed with three training steps? (sends the model and some clips)"
    if not questions.confirm("probe", message, True):
        return []
    job = draft.job()

    def try_steps() -> list[Speed]:
        with contextlib.ExitStack() as stack:
            remotes = on_each(group.hosts.workers, Remote.connect)
            for remote in remotes:
                stack.callback(remote.close)
            samples = draft.data.samples["train"]
            show = stack.enter_context(transfers(console))
            console.print("three training steps on all machines at once; this usually takes less than a minute")
            speeds = measure(job, samples, group.hosts, remotes, scratch, show, group.machine_workers)
            remember(job, group.hosts, speeds)
            return speeds

    def all_measured(speeds: Sequence[Speed]) -> bool:
        return all(speed.clips_s is not None for speed in speeds)

    try:
        speeds = questions.once("speed", (draft.job_of_machines(), group.hosts), try_steps, may_stay=all_measured)
    except (TunerError, OSError) as error:
        console.print(f"The speed could not be measured: {error}", style="yellow", soft_wrap=True)
        return []
    _show_speeds(speeds, console)
    return speeds


def _conditions(draft: Draft, group: Group, speeds: Sequence[Speed]) -> Conditions:
    hosts, shape = len(group.hosts.all), draft.model.shape
    measured = max((speed.trainable for speed in speeds), default=0)
    profile = Profile(base_model=draft.model.base_model, train=Path(), method=draft.method)
    trained = measured or (trained_parameters(shape, profile) if shape else 0)
    clips, batch_size = len(draft.data.samples["train"]), int(draft.settings["batch_size"])
    dealt_over = draft.job().with_strategy("diloco").dealt_over
    steps = steps_in_epoch(clips, hosts, batch_size, dealt_over) * int(draft.settings["epochs"])
    known = Measured(bytes_s=group.bytes_s, spare_bytes=group.spare_bytes, step_s=step_of_all(speeds))
    return Conditions(parameters=trained, hosts=hosts, steps=steps, measured=known)


def _show_speeds(speeds: Sequence[Speed], console: Console) -> None:
    table = Table(header_style="bold")
    for column in ("machine", "clips/s", "seconds a step"):
        table.add_column(column, overflow="fold", justify="left" if column == "machine" else "right")
    for speed in speeds:
        cells = (f"{speed.clips_s:.1f}", f"{speed.step_s:.2f}") if speed.clips_s else ("not measured", "")
        table.add_row(speed.host, *cells)
    console.print(table)
    for speed in speeds:
        if speed.problem:
            console.print(f"{speed.host}: {speed.problem}", style="yellow", soft_wrap=True)


def _each_step(conditions: Conditions) -> str:
    measured = "as measured" if conditions.measured.bytes_s else "assumed"
    sent, seconds = size(conditions.round_bytes()), conditions.exchange_s()
    rate = f"{conditions.bytes_s * 8e-6:.0f} Mbit/s"
    return f"in each step a host sends {sent}: {seconds:.1f} s at {rate}, {measured}"


def _choose(questions: Questions, most: int, suggested: str, steps: int) -> dict[str, str]:
    options = [Option(value=name, short=title.split(":")[0], title=title) for name, title in STRATEGIES.items()]
    message = "How should the machines agree on their weights? (docs/strategies.md has more ways)"
    settings = {"strategy": questions.select("strategy", message, options, suggested)}
    if settings["strategy"] == "diloco":
        key, most = "communication_interval", max(1, most)
        message = f"Steps between two agreements (of {most}; fewer learn better but send more):"

        def check(text: str) -> None:
            if not text.isdigit() or not 1 <= int(text) <= most:
                raise ValueError(f"expected a whole number from 1 to {most}")

        settings[key] = questions.text(key, message, str(min(steps, most)), check)
    return settings


def speed_up(speeds: Sequence[Speed], waiting: float) -> float | None:
    """Tell how many times as fast as the first machine (the master) alone they are; None if one was not measured.

    Every host gets clips in proportion to its speed. What a step takes beside its clips is left out: alone, the master
    makes as many steps, of more clips. waiting: the part of the time that all wait for the network.
    """
    if not speeds or any(speed.clips_s is None for speed in speeds):
        return None
    return sum(speed.clips_s for speed in speeds) / speeds[0].clips_s * (1 - waiting)


def waiting_at_every_step(conditions: Conditions) -> float:
    """Return the part of the time that AllReduce takes."""
    exchange_s = conditions.exchange_s()
    return exchange_s / (exchange_s + conditions.step_s)


def suggested_strategy(conditions: Conditions) -> str:
    """Choose AllReduce where agreeing at every step costs little, or where a run is too short for rounds."""
    is_known = conditions.parameters > 0
    cheap = is_known and conditions.exchange_s() <= SMALL_SHARE * conditions.step_s
    return "allreduce" if cheap or conditions.steps < 2 * FEWEST_ROUNDS else "diloco"
