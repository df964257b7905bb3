"""Asks which machines train, and with which strategy.

They are this one, those of the hosts file, or new ones, which are checked until all is well; then a probe tells what
each strategy promises.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from distributed.checkup.preflight import Report, preflight, unique
from distributed.checkup.speed import measure, remember, remembered
from distributed.hosts.discovery import State, why_none
from distributed.hosts.interfaces import route_to
from distributed.plan.automatic import FEWEST_ROUNDS, PLAIN, Conditions, Measured, chosen
from distributed.plan.forecast import Speed, forecast, step_of_all
from distributed.plan.hosts_file import HOSTS_FILE, check_is_this_machine, load_hosts
from distributed.plan.job import Job
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from distributed.ssh.machine import on_each
from exogym.strategy import DiLoCoConfig
from multimac.commands.hosts import hosts_setup
from multimac.commands.pair import found, paired
from multimac.commands.pair import show as show_found
from multimac.view.preflight_view import show
from multimac.view.progress import working
from multimac.view.transfers import STEPS_EVERYWHERE, transfers
from whisper_tuner.config import Profile
from whisper_tuner.data.steps import steps_in_epoch
from whisper_tuner.errors import ConfigError, HostError, TunerError
from whisper_tuner.files import expanded
from whisper_tuner.model.memory import trained_parameters
from whisper_tuner.text import counted, size

from .draft import Draft, Group, numbered
from .questions import Option, Questions

LOGIN = ("workers", "ssh_user", "ssh_key_path", "master", "setup")  # keys of answers about new hosts
CURED_BY_SETUP = {"python", "packages", "device"}
ALONE, HOSTS, NEW = "alone", "hosts", "new"
AGAIN = Option(value="again", short="check again", title="check again (first do what it says, in another terminal)")
SETUP_HERE = "Let the wizard set it up: check again, and answer yes."
OTHERS = Option(value=NEW, title="enter other addresses, user or key")
GIVE_UP = Option(value=ALONE, title="train on this machine alone")
SMALL_SHARE = 0.2  # of a step; agreeing at each may take so much
STRATEGIES = {
    "diloco": "DiLoCo: agree every few steps; for home networks and large models",
    "allreduce": "AllReduce: agree at every step; as on one machine, but much traffic",
}


def ask_hosts(
    questions: Questions,
    draft: Draft,
    scratch: Path,
    console: Console,
    path: Path | None = None,
    *,
    several: bool = False,
) -> Group | None:
    """Return machines that passed the preflight; None: this machine alone. Writes only into `scratch`.

    path: the hosts file, which need not be there; usually the one in this folder. several: not this one alone.
    """
    path = path or Path.cwd() / HOSTS_FILE
    group: Group | None = None
    options = [] if several else [Option(value=ALONE, title="on this machine alone")]
    if path.exists():
        options.append(Option(value=HOSTS, title=f"on the machines in {path.name}"))
        options.append(Option(value=NEW, title="on other machines: asks for their addresses"))
    else:
        title = "on several machines, over SSH (those found here, or by their addresses)"
        options.append(Option(value=NEW, short="on several machines", title=title))
    where = questions.taken["where"] = NEW
    if len(options) > 1:
        message = "On which machines?" if several else "Where do you want to train?"
        where = questions.select("where", message, options, HOSTS if path.exists() else ALONE)
    while where != ALONE:
        try:
            if where == NEW:
                group = None
                group = _ask_new(questions, path, scratch, console)
            elif group is None or group.text is None:  # the user may have edited the file just now
                group = Group(hosts=load_hosts(path), path=path)
            _make_ready(questions, draft, group, scratch, console)
            return group
        except TunerError as error:
            options = [OTHERS, GIVE_UP] if where == NEW and group is None else [AGAIN, OTHERS, GIVE_UP]
            where = questions.again("What next?", options, error)
            if where != AGAIN.value:  # answers about hosts that were given up do not count any more
                questions.taken["where"] = where
                for key in LOGIN:
                    questions.taken.pop(key, None)
    return None


def _ask_new(questions: Questions, path: Path, scratch: Path, console: Console) -> Group:
    """Ask for what a hosts file needs: the addresses, and how SSH logs in. Raises ConfigError, HostError."""

    def check(text: str) -> None:
        if not _words(text):
            raise ValueError("give at least one address")
        _hosts_of(scratch, master="localhost", workers=_words(text))

    def check_key(text: str) -> None:
        if text and not expanded(text).is_file():
            raise ValueError("there is no such file")

    near = _nearby(questions, path, console) if questions.interactive else {}
    message = "Addresses of the other machines (such as mac-mini.local, 10.0.0.7):"
    workers = _words(questions.text("workers", message, " ".join(near), check))
    login = {}
    if not all(name in near for name in workers):
        user = questions.text("ssh_user", "User name there (empty: ssh decides):", getpass.getuser())
        key = questions.text("ssh_key_path", "Private key (empty: ssh decides):", "", check_key)
        login = {name: value for name, value in (("ssh_user", user), ("ssh_key_path", key)) if value}
    try:  # this machine's address, as that worker sees it
        master = questions.once("route", workers[0], lambda: route_to(workers[0])).address
    except HostError:  # the routing table cannot tell
        message, name = "This machine's address, as the others see it:", socket.gethostname()
        master = questions.text("master", message, name, lambda text: check_is_this_machine(Host(address=text)))
    told = [{"host": name, **near[name]} if near.get(name) else name for name in workers]
    hosts = _hosts_of(scratch, master=master, workers=told, **login)
    free = next(name for name in map(path.with_stem, numbered(path.stem)) if not name.exists())
    return Group(hosts=hosts, path=free, text=(scratch / HOSTS_FILE).read_text())


def _nearby(questions: Questions, path: Path, console: Console) -> dict[str, dict[str, object]]:
    """Find machines, and offer to pair with those that no key opens yet.

    Returns those that one opens, and what a hosts file has to say of each beside its name.
    """
    seen = questions.once("find", None, lambda: found(console, path))
    if not seen:
        console.print(f"No other machine was found in this network.\n{why_none()}", markup=False, soft_wrap=True)
        return {}
    show_found(console, seen)
    opened: dict[str, dict[str, object]] = {}
    for one in seen:
        name, port = one.candidate.name, one.candidate.host.port
        about: dict[str, object] = {"ssh_port": port} if port else {}
        if one.state in (State.READY, State.PAIRED):
            opened[name] = about
        if one.state in (State.NEW, State.LOCKED) and questions.confirm(f"pair {name}", f"Pair with {name}?", True):
            user = questions.text(f"user of {name}", f"Your user name on {name}:", getpass.getuser(), str)
            if questions.once("paired", (name, user), partial(paired, console, replace(one.candidate.host, user=user))):
                opened[name] = about | ({"ssh_user": user} if user != getpass.getuser() else {})
    return opened


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,;]+", text) if word]


def _hosts_of(scratch: Path, **values: object) -> Hosts:
    """Read a hosts file with these values, which stays in `scratch`. Raises ConfigError."""
    path = scratch / HOSTS_FILE
    path.write_text(json.dumps(values, indent=2) + "\n")
    try:
        return load_hosts(path)
    except ConfigError as error:
        raise ConfigError(str(error).partition(": ")[2]) from None  # its place is in a file that nobody knows


def _make_ready(questions: Questions, draft: Draft, group: Group, scratch: Path, console: Console) -> None:
    """Check every machine, and offer `hosts setup` where that helps. Raises TunerError."""
    if not group.hosts.workers:
        raise ConfigError(f"{group.path.name} names no workers", remedy="Add the other machines' addresses to it.")
    report = _look(questions, draft, group, console)
    unready = unique(name for problem in report.errors for name in problem.hosts)
    curable = all(problem.check in CURED_BY_SETUP for problem in report.errors)
    if questions.asks_nobody:  # an environment that the hosts file names, and is not there, may be a slip
        curable &= not any(host.python_env for host in group.hosts.workers if host.address in unready)
    if unready and curable and all(facts.reached for facts in report.hosts):
        for problem in report.errors:
            console.print(f"{problem.host}: {problem.what}", markup=False, style="red", soft_wrap=True)
        listed = ", ".join(unready)
        console.print(f"`hosts setup` creates a virtual environment with this machine's versions on {listed}.")
        console.print("A host without internet gets the packages from here: about 400 MB, several minutes.")
        if questions.confirm("setup", f"Set up {listed} now?", True):
            file = group.path if group.text is None else scratch / HOSTS_FILE
            questions.once("setup", group.hosts, lambda: hosts_setup(file), may_stay=lambda _: False, for_good=True)
            report = _look(questions, draft, group, console)
    report.raise_if_errors()
    group.bytes_s, group.spare_bytes = report.measured.bytes_s, report.measured.spare_bytes
    group.machine_workers = report.machine_workers
    group.frozen_precision = report.settled(draft.job()).profile.frozen_precision


def _look(questions: Questions, draft: Draft, group: Group, console: Console) -> Report:
    """Run the preflight, and show its report."""
    # The parts of a split are not written yet; the whole has the same clips.
    job = draft.job().with_profile(train=draft.data.manifests["train"], validation=None, test=None)

    file = group.path if group.text is None else None
    setup = "" if file else SETUP_HERE  # `hosts setup` does not know hosts that were just typed, and are in no file

    def look() -> Report:
        looking = preflight(job, group.hosts, hosts_file=file, setup=setup)
        with working(console, "checking each machine (up to 15 s)"), looking as report:
            return report

    asked = (draft.job_of_machines(), group.hosts)
    report = questions.once("preflight", asked, look, may_stay=lambda report: not report.errors)
    show(console, report, errors=False)
    return report


def ask_strategy(questions: Questions, draft: Draft, group: Group, scratch: Path, console: Console) -> None:
    """Fill draft.group and draft.strategy, unless the user prefers to train on this machine alone."""
    speeds = _probe(questions, draft, group, scratch, console)
    hosts, shape = len(group.hosts.all), draft.model.shape
    measured = max((speed.trainable for speed in speeds), default=0)
    profile = Profile(base_model=draft.model.base_model, train=Path(), method=draft.method)
    trained = measured or (trained_parameters(shape, profile) if shape else 0)
    clips = {kind: len(samples) for kind, samples in draft.data.samples.items() if kind != "test"}
    batch_size = int(draft.settings["batch_size"])
    dealt_over = draft.job().with_strategy("diloco").dealt_over
    steps = steps_in_epoch(clips["train"], hosts, batch_size, dealt_over) * int(draft.settings["epochs"])
    known = Measured(bytes_s=group.bytes_s, spare_bytes=group.spare_bytes, step_s=step_of_all(speeds, batch_size))
    conditions = Conditions(parameters=trained, hosts=hosts, steps=steps, measured=known)
    suggested = suggested_strategy(conditions)
    job, _ = chosen(draft.job().with_strategy("diloco"), conditions)
    config, when = PLAIN, "at each step"
    if suggested == "diloco":
        config = job.strategy_config(conditions.steps)
        assert isinstance(config, DiLoCoConfig)
        when = f"every {counted(config.H, 'step')}"
    times = speed_up(draft.job().with_strategy(suggested), clips, speeds, known)
    if times is None:
        console.print("How much faster they are together than this machine alone is not known: they were not measured.")
    else:
        sent, rate = size(conditions.round_bytes(config)), f"{conditions.bytes_s * 8e-6:.0f} Mbit/s"
        takes = f"{conditions.exchange_s(config):.1f} s at {rate}{'' if group.bytes_s else ' (assumed)'}"
        console.print(f"They would agree on the weights {when}: each sends {sent}, {takes}.", markup=False)
        console.print(f"Estimated speed-up over this machine alone: {times:.1f} times.")
    worth_it = times is None or times > 1.1 or not questions.interactive  # an answers file that names hosts means them
    if questions.confirm("together", f"Train on these {hosts} machines together?", worth_it):
        draft.group, group.speeds = group, speeds
        draft.strategy = _choose(questions, conditions.steps, suggested, job.distribution.communication_interval)


def _probe(questions: Questions, draft: Draft, group: Group, scratch: Path, console: Console) -> list[Speed]:
    """Measure each machine with a few training steps, if the user wants it, and show what came of it."""
    message = "Measure their speed with a few steps? (sends the model and some clips)"
    if not questions.confirm("probe", message, True):
        return []
    job = draft.job().with_profile(frozen_precision=group.frozen_precision)  # as the run that may remember it

    def try_steps() -> list[Speed]:
        if known := remembered(job, group.hosts, alone=True):
            return known
        with contextlib.ExitStack() as stack:
            remotes: list[Remote] = on_each(group.hosts.workers, Remote.connect)
            for remote in remotes:
                stack.callback(remote.close)
            samples = draft.data.samples["train"]
            console.print("measuring a few training steps on each machine")
            show = stack.enter_context(transfers(console, STEPS_EVERYWHERE))
            workers = group.machine_workers
            speeds = measure(job, samples, group.hosts, remotes, scratch, show, workers, alone=True)
            remember(job, group.hosts, speeds)
            return speeds

    def all_measured(speeds: Sequence[Speed]) -> bool:
        return all(speed.clips_s is not None for speed in speeds)

    try:
        speeds = questions.once("speed", (draft.job_of_machines(), group.hosts), try_steps, may_stay=all_measured)
    except (TunerError, OSError) as error:
        console.print(f"The speed could not be measured: {error}", style="yellow", soft_wrap=True)
        return []
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
    return speeds


def _choose(questions: Questions, most: int, suggested: str, steps: int) -> dict[str, str]:
    options = [Option(value=name, short=title.split(":")[0], title=title) for name, title in STRATEGIES.items()]
    message = "How should they agree on their weights? (more in docs/strategies.md)"
    settings = {"strategy": questions.select("strategy", message, options, suggested)}
    if settings["strategy"] == "diloco":
        key, most = "communication_interval", max(1, most)
        message = f"Steps between two agreements (of {most}; fewer learn better but send more):"

        def check(text: str) -> None:
            if not text.isdigit() or not 1 <= int(text) <= most:
                raise ValueError(f"expected a whole number from 1 to {most}")

        settings[key] = questions.text(key, message, str(min(steps, most)), check)
    return settings


def speed_up(job: Job, clips: Mapping[str, int], speeds: Sequence[Speed], known: Measured) -> float | None:
    """Tell how many times sooner all have trained than the first machine (the master) alone; None if one was not
    measured.
    """
    if not speeds or not all(speed.sizes for speed in speeds):
        return None
    alone, together = (
        forecast(job, clips, some, bytes_s=known.bytes_s, spare_bytes=known.spare_bytes)
        for some in (speeds[:1], speeds)
    )
    return alone.seconds / together.seconds


def suggested_strategy(conditions: Conditions) -> str:
    """Choose AllReduce where agreeing at every step costs little, or where a run is too short for rounds."""
    is_known = conditions.parameters > 0
    cheap = is_known and conditions.exchange_s() <= SMALL_SHARE * conditions.step_s
    return "allreduce" if cheap or conditions.steps < 2 * FEWEST_ROUNDS else "diloco"
