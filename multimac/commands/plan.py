"""`multimac plan`: how long a profile will take, on which machines, and what holds it back."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from distributed.checkup.links import Pair
from distributed.checkup.preflight import Report, preflight
from distributed.checkup.speed import measure, of_all_lengths, remember, remembered
from distributed.checkup.this_machine import device_here, one_machine
from distributed.hosts.keep_awake import awake
from distributed.hosts.sync import lacking
from distributed.plan.automatic import HOME_NETWORK
from distributed.plan.forecast import HERE, Forecast, Speed, forecast, key_of, ratios_of
from distributed.plan.hosts_file import load_hosts
from distributed.plan.job import Job, resolve
from distributed.plan.prepare import Prepared, prepare_run
from distributed.run_dir.folder import new_run
from distributed.run_dir.summary import PARTS
from distributed.ssh.host import Hosts
from multimac.view.preflight_view import show_preflight
from multimac.view.progress import working
from multimac.view.run_tables import simple_table, times
from multimac.view.terminal import Console, fitting
from multimac.view.transfers import STEPS_EVERYWHERE, transfers
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, ExitStatus, RunError
from whisper_tuner.model.memory import profile_memory
from whisper_tuner.text import counted, duration, size

from .options import CONFIG, Config, Set, command

STEPS = 9  # of each size, the first of which is not counted: some have a clip that is padded to 30 s
HEARD = 8  # clips of the test set that are transcribed
STRATEGIES = ("diloco", "allreduce")
ALIKE = 1.05  # times the shortest: then fewer hosts are as good


@dataclass(frozen=True, kw_only=True)
class Known:
    """Measurements before the first run. copying_s: by host. before_s, checking_s: of this command, before it measured;
    and of the preflight in it. memory: of each host, in words.
    """

    speeds: Sequence[Speed]
    pairs: Sequence[Pair]
    copying_s: dict[str, float]
    before_s: float
    checking_s: float
    spare_bytes: float | None
    memory: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A run that could be started. command: "" where another machine would have to start it."""

    forecast: Forecast
    held_back_by: str
    speed_up: float
    command: str


@command("plan")
@awake()
def plan(
    profile: Annotated[str, Argument(help="A [profile:NAME] or [distributed:NAME].")],
    hosts: Annotated[Path | None, Option("--hosts", help="Hosts file. [default: this machine alone]")] = None,
    again: Annotated[bool, Option("--again", help="Measure anew what an earlier command has measured.")] = False,
    as_json: Annotated[bool, Option("--json", help="As JSON, with all figures.")] = False,
    settings: Set = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Tell how long a profile will take, here or on several machines, what holds it back, and what to type.

    Each machine trains a few steps, and this one transcribes a few clips; no run is begun.
    """
    console, entered = Console(stderr=as_json), time.time()
    resolved = partial(resolve, ConfigFile(config), profile, settings=settings or ())
    if hosts:
        job, machines = resolved(), load_hosts(hosts)
        with preflight(job, machines, hosts_file=hosts) as report:
            show_preflight(console, report)
            job = report.settled(job)
            known, prepared = _known(console, job, machines, report, entered, again=again)
    else:
        job, machines = resolved(strategy="allreduce"), HERE
        known, prepared = _known(console, job, machines, None, entered, again=again)
    typed = " ".join(f"--set {shlex.quote(text)}" for text in settings or ())
    typed += "" if config == CONFIG else f" --config {shlex.quote(str(config))}"
    ways = list(_ways(job, machines, known, prepared.clips, hosts, f" {typed.strip()}".rstrip()))
    best = _best(ways)
    if as_json:
        told = [dataclasses.asdict(way) | {"seconds": way.forecast.seconds} for way in ways]
        print(json.dumps({"ways": told, "command": best.command}, indent=2))
        return ExitStatus.OK
    _show(console, job, known, ways, best)
    return ExitStatus.OK


def _known(
    console: Console, job: Job, hosts: Hosts, report: Report | None, entered: float, *, again: bool
) -> tuple[Known, Prepared]:
    """Find out what a run on these hosts goes by. Raises RunError where a host cannot be measured."""
    with new_run(job.profile.runs_dir, job.name, keep=False) as run_dir:
        show = partial(working, console)
        prepared = prepare_run(job, run_dir, hosts=hosts if report else None, show_status=show)
        before_s = time.time() - entered
        speeds = [] if again else remembered(job, hosts, alone=True)
        if speeds and (speeds[0].clip_s or not job.profile.test):
            console.print("steps as they were measured before; to measure them again: --again", soft_wrap=True)
        else:
            speeds = _measured(console, job, hosts, report, prepared)
        to_send = lacking(report.remotes, prepared.items) if report else {}
    pairs = report.pairs if report else []
    rates = {pair.target: pair.mbit * 125_000 for pair in pairs if pair.source == speeds[0].host and pair.mbit}
    found = Known(
        speeds=speeds,
        pairs=pairs,
        copying_s={host: sent / rates.get(host, HOME_NETWORK) for host, (_, sent) in to_send.items()},
        before_s=before_s,
        checking_s=report.seconds if report else 0.0,
        spare_bytes=report.measured.spare_bytes if report else None,
        memory=_memory(job, prepared, report),
    )
    return found, prepared


def _memory(job: Job, prepared: Prepared, report: Report | None) -> list[str]:
    """Tell what training takes of the memory of each host; '' where that is not known."""
    if report is None:
        longest = max(clip.duration_s for clip in prepared.manifests["train"].samples)
        needed = profile_memory(job.profile, longest_s=longest, device=device_here())
        return [f"{size(needed)} of {size(one_machine().room_bytes or 0.0)}" if needed else ""]
    known = [(facts.way, facts.spare_memory) for facts in report.hosts]
    return [
        f"{size(way.whole)} of {size(way.whole + spare)}" if way and spare is not None else "" for way, spare in known
    ]


def _measured(console: Console, job: Job, hosts: Hosts, report: Report | None, prepared: Prepared) -> list[Speed]:
    """Measure all hosts side by side, and remember it."""
    samples = {kind: found.samples for kind, found in prepared.manifests.items()}
    console.print("measuring a few training steps on each machine, and transcripts here", soft_wrap=True)
    with tempfile.TemporaryDirectory() as scratch, transfers(console, STEPS_EVERYWHERE) as shown:
        speeds = measure(
            job,
            samples["train"],
            hosts,
            report.remotes if report else (),
            Path(scratch),
            shown,
            report.machine_workers if report else (1,),
            steps=STEPS,
            test=of_all_lengths(samples["test"], HEARD) if "test" in samples else (),
            alone=True,
        )
    if wrong := [f"{speed.host}: {speed.problem}" for speed in speeds if speed.problem]:
        raise RunError("\n".join(wrong), remedy="Mend it, or leave the host out of the hosts file.")
    remember(job, hosts, speeds)
    return speeds


def _ways(job: Job, hosts: Hosts, known: Known, clips: dict[str, int], file: Path | None, typed: str) -> Iterator[Way]:
    """Yield the master alone, the fastest host alone, and of each number of hosts the best with each strategy."""
    master, *others = known.speeds
    by_name = {host.address: host for host in hosts.all}

    def alone(speed: Speed) -> Forecast:
        clip_s = master.clip_s * speed.costs[1] / master.costs[1]
        ratios = ratios_of(key_of(job, hosts.all[:1])) if speed is master else {}
        before_s = known.before_s - known.checking_s
        return forecast(job, clips, [replace(speed, clip_s=clip_s)], before_s=before_s, ratios=ratios)

    def together(of_way: Job, speeds: Sequence[Speed]) -> Forecast:
        names = {speed.host for speed in speeds}
        rates = [pair.mbit for pair in known.pairs if pair.mbit and {pair.source, pair.target} <= names]
        return forecast(
            of_way,
            clips,
            speeds,
            bytes_s=min(rates) * 125_000 if rates else None,
            spare_bytes=known.spare_bytes,
            before_s=known.before_s + sum(known.copying_s.get(name, 0.0) for name in names),
            ratios=ratios_of(key_of(of_way, [by_name[speed.host] for speed in speeds])),
        )

    singles = {speed.host: alone(speed) for speed in known.speeds}
    fastest = min(singles.values(), key=lambda single: single.seconds)

    def way(found: Forecast, command: str) -> Way:
        slowest = max((s for s in known.speeds if s.host in found.hosts), key=lambda speed: speed.costs[1])
        held = found.held_back_by(fastest, _slowest_link(known.pairs, found.hosts), slowest.host)
        return Way(
            forecast=found, held_back_by=held, speed_up=fastest.seconds / found.seconds, command=f"{command}{typed}"
        )

    yield way(singles[master.host], f"multimac finetune {job.name}")
    if fastest.hosts[0] != master.host:
        yield replace(way(fastest, ""), command="")
    for count in range(1, len(others) + 1):
        sets = [(master, *some) for some in itertools.combinations(others, count)]
        found = [[together(one, speeds) for one in _jobs(job)] for speeds in sets]
        for one, best in zip(_jobs(job), min(found, key=lambda own: min(f.seconds for f in own)), strict=True):
            command = f"multimac distributed-train {job.name} --hosts {shlex.quote(str(file))}"
            command += f" --only {','.join(best.hosts[1:])}" if count < len(others) else ""
            is_own = one.distribution.strategy == job.distribution.strategy
            yield way(best, command + ("" if is_own else f" --set strategy={best.strategy}"))


def _jobs(job: Job) -> list[Job]:
    """Return the job with each strategy that is worth it, its own first. Raises ConfigError if there is none."""
    found = [job] if job.distribution.strategy in STRATEGIES else []
    if not job.strategy_settings:  # they are for its own
        found += [job.with_strategy(name) for name in STRATEGIES if name != job.distribution.strategy]
    if not found:
        what = f"{job.name}: how long strategy = {job.distribution.strategy} takes is not known"
        raise ConfigError(what, remedy=f"Plan with --set strategy={STRATEGIES[0]}, without the settings of the other.")
    return found


def _slowest_link(pairs: Sequence[Pair], hosts: Sequence[str]) -> str:
    within = [pair for pair in pairs if pair.mbit and {pair.source, pair.target} <= {*hosts}]
    slowest = min(within, key=lambda pair: pair.mbit or 0.0, default=None)
    return f"{slowest.source}-{slowest.target}" if slowest else "(not measured)"


def _best(ways: Sequence[Way]) -> Way:
    """Choose the way that ends first; of those that are alike, the one with the fewest hosts."""
    able = [way for way in ways if way.command]
    limit = ALIKE * min(way.forecast.seconds for way in able)
    alike = [way for way in able if way.forecast.seconds <= limit]
    return min(alike, key=lambda way: (len(way.forecast.hosts), way.forecast.seconds))


def _show(console: Console, job: Job, known: Known, ways: Sequence[Way], best: Way) -> None:
    machines = simple_table("machine", "clips", "s a step", "loading", "s a text", "memory")
    for speed, memory in zip(known.speeds, known.memory, strict=True):
        clips, steps = (
            " / ".join(cells) for cells in zip(*((f"{n:g}", f"{s:.2f}") for n, s in speed.sizes), strict=True)
        )
        heard = f"{speed.clip_s:.1f}" if speed.clip_s else ""
        machines.add_row(speed.host, clips, steps, f"{speed.start_s:.0f} s", heard, memory)
    console.print(fitting(console, machines))
    if known.pairs:
        console.print()
        each = {way.forecast.strategy: way.forecast for way in ways if len(way.forecast.hosts) > 1}
        links = simple_table("link", "Mbit/s", "ms", *(f"exchange: {strategy}" for strategy in each))
        for pair in known.pairs:
            if pair.mbit:
                exchanges = [f"{found.exchange_bytes * 8e-6 / pair.mbit:.2f} s" for found in each.values()]
                latency = f"{1000 * (pair.latency_s or 0):.1f}"
                links.add_row(f"{pair.source} -> {pair.target}", f"{pair.mbit:.0f}", latency, *exchanges)
        console.print(fitting(console, links))
    console.print()
    is_choice = len(ways) > 1
    table = simple_table(*[""] * is_choice, *PARTS, "in all", *["speed-up", "strategy", "sent"] * is_choice)
    for number, way in enumerate(ways, 1):
        found = way.forecast
        cells = [duration(found.parts[part]) for part in PARTS] + [duration(found.seconds)]
        if is_choice:
            sent = size(found.sent) if found.sent else ""
            cells = [str(number), *cells, times(way.speed_up), found.strategy, sent]
        table.add_row(*cells)
    console.print(fitting(console, table))
    console.print()
    for number, way in enumerate(ways if is_choice else [], 1):
        count = len(way.forecast.hosts)
        held = f"kept from being {count} times as fast" if count > 1 else "held back"
        console.print(f"{number}: {', '.join(way.forecast.hosts)}; {held} by {way.held_back_by}", soft_wrap=True)
    if is_choice:
        console.print("speed-up: over the fastest machine alone", soft_wrap=True)
    corrected = [part for part in PARTS if any(way.forecast.parts[part] != way.forecast.measured[part] for way in ways)]
    if corrected:
        told = f"{', '.join(corrected)}: corrected by what the last run on the same hosts took"
        console.print(told, soft_wrap=True)
    count = len(best.forecast.hosts)
    where = f"on {counted(count, 'machine')}" if count > 1 else "on this machine alone"
    soonest = f"The model is there soonest, or nearly, {where}" if is_choice else "To train it"
    console.print(f"\n{soonest}:\n  {best.command}", soft_wrap=True)
