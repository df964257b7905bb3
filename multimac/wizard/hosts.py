"""Asks which machines train: this one, those of the hosts file, or new ones. They are checked until all is well."""

from __future__ import annotations

import getpass
import json
import re
import socket
from pathlib import Path

from rich.console import Console

from distributed.checkup.facts import Report, unique
from distributed.checkup.preflight import preflight
from distributed.hosts.interfaces import route_to
from distributed.plan.hosts_file import HOSTS_FILE, check_is_this_machine, load_hosts
from distributed.ssh.host import Host, Hosts
from multimac.commands.hosts import hosts_setup
from multimac.view.preflight_view import show
from multimac.view.progress import working
from whisper_tuner.errors import ConfigError, HostError, TunerError
from whisper_tuner.paths import expanded

from .draft import Draft, Group, numbered
from .questions import Option, Questions

LOGIN = ("workers", "ssh_user", "ssh_key_path", "master", "setup")  # keys of answers about new hosts
CURED_BY_SETUP = {"python", "packages", "device"}
ALONE, HOSTS, NEW = "alone", "hosts", "new"
AGAIN = Option(value="again", short="check again", title="check again (first do what it says, in another terminal)")
OTHERS = Option(value=NEW, title="enter other addresses, user or key")
GIVE_UP = Option(value=ALONE, title="train on this machine alone")


def ask_hosts(questions: Questions, draft: Draft, scratch: Path, console: Console) -> Group | None:
    """Return machines that passed the preflight; None: this machine alone. Writes only into `scratch`."""
    path, group = Path.cwd() / HOSTS_FILE, None
    where = _where(questions, path)
    while where != ALONE:
        try:
            if where == NEW:
                group = None
                group = _ask_new(questions, path, scratch)
            elif group is None or group.text is None:  # the user may have edited the file just now
                group = Group(hosts=load_hosts(path), path=path)
            _make_ready(questions, draft, group, scratch, console)
            return group
        except TunerError as error:
            console.print(str(error), style="red", soft_wrap=True)
            options = [OTHERS, GIVE_UP] if where == NEW and group is None else [AGAIN, OTHERS, GIVE_UP]
            where = questions.again("What next?", options, error)
            if where != AGAIN.value:  # answers about hosts that were given up do not count any more
                questions.taken["where"] = where
                for key in LOGIN:
                    questions.taken.pop(key, None)
    return None


def _where(questions: Questions, path: Path) -> str:
    options = [Option(value=ALONE, title="on this machine alone")]
    if path.exists():
        options.append(Option(value=HOSTS, title=f"on the machines in {path.name}"))
        options.append(Option(value=NEW, title="on other machines: asks for their addresses"))
    else:
        title = "on several machines, over SSH (asks for their addresses)"
        options.append(Option(value=NEW, short="on several machines", title=title))
    return questions.select("where", "Where do you want to train?", options, HOSTS if path.exists() else ALONE)


def _ask_new(questions: Questions, path: Path, scratch: Path) -> Group:
    """Ask for what a hosts file needs: the addresses, and how SSH logs in. Raises ConfigError, HostError."""

    def check(text: str) -> None:
        if not _words(text):
            raise ValueError("give at least one address")
        _hosts_of(scratch, master="localhost", workers=_words(text))

    def check_key(text: str) -> None:
        if text and not expanded(text).is_file():
            raise ValueError("there is no such file")

    message = "Addresses of the other machines (such as mac-mini.local, 10.0.0.7):"
    workers = _words(questions.text("workers", message, "", check))
    user = questions.text("ssh_user", "User name there (empty: ssh decides):", getpass.getuser())
    key = questions.text("ssh_key_path", "Private key (empty: ssh decides):", "", check_key)
    login = {name: value for name, value in (("ssh_user", user), ("ssh_key_path", key)) if value}
    hosts = _hosts_of(scratch, master=_master(questions, workers[0]), workers=workers, **login)
    free = next(name for name in map(path.with_stem, numbered(path.stem)) if not name.exists())
    return Group(hosts=hosts, path=free, text=(scratch / HOSTS_FILE).read_text())


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


def _master(questions: Questions, worker: str) -> str:
    """Return this machine's address, as that worker sees it; asked for only if the routing table cannot tell."""
    try:
        return questions.once("route", worker, lambda: route_to(worker)).address
    except HostError:
        message, default = "This machine's address, as the others see it:", socket.gethostname()
        return questions.text("master", message, default, lambda text: check_is_this_machine(Host(address=text)))


def _make_ready(questions: Questions, draft: Draft, group: Group, scratch: Path, console: Console) -> None:
    """Check every machine, and offer `hosts setup` where that helps. Raises TunerError."""
    if not group.hosts.workers:
        raise ConfigError(f"{group.path.name} names no workers", remedy="Add the other machines' addresses to it.")
    report = _look(questions, draft, group, console)
    unready = ", ".join(unique(name for problem in report.errors for name in problem.hosts))
    curable = all(problem.check in CURED_BY_SETUP for problem in report.errors)
    if unready and curable and all(facts.reached for facts in report.hosts):
        for problem in report.errors:
            console.print(f"{problem.host}: {problem.what}", markup=False, style="red", soft_wrap=True)
        console.print(f"`hosts setup` creates a virtual environment with this machine's versions on {unready}.")
        console.print("A host without internet gets the packages from here: about 400 MB, several minutes.")
        if questions.confirm("setup", f"Set up {unready} now?", True):
            file = group.path if group.text is None else scratch / HOSTS_FILE
            questions.once("setup", group.hosts, lambda: hosts_setup(file), may_stay=lambda _: False, for_good=True)
            report = _look(questions, draft, group, console)
    report.raise_if_errors()
    group.bytes_s, group.spare_bytes = report.measured.bytes_s, report.measured.spare_bytes
    group.machine_workers = report.machine_workers


def _look(questions: Questions, draft: Draft, group: Group, console: Console) -> Report:
    """Run the preflight, and show its report."""
    # The parts of a split are not written yet; the whole has the same clips.
    job = draft.job().with_profile(train=draft.data.manifests["train"], validation=None, test=None)

    def look() -> Report:
        with working(console, "checking each machine (up to 15 s)"), preflight(job, group.hosts) as report:
            return report

    asked = (draft.job_of_machines(), group.hosts)
    report = questions.once("preflight", asked, look, may_stay=lambda report: not report.errors)
    show(console, report, errors=False)
    return report
