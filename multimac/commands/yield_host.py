"""`multimac hosts yield`: a host leaves a running run, so that its owner has the machine, and takes part again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from distributed.run_dir.away import ASKED, read_away, set_away
from distributed.run_dir.folder import as_typed, is_running
from distributed.run_dir.log import new_events
from distributed.run_dir.run_view import HostView, RunView
from distributed.run_dir.summary import read_run
from multimac.view.models import folders_of
from multimac.view.terminal import Console
from whisper_tuner.errors import ExitStatus, RunError

from .attach_stop import going_on
from .options import CONFIG, Config, RunsDir, command

EVERY_S = 0.2
SAY_AFTER_S = 2.0  # a shorter wait needs no word


@command("hosts yield")
def hosts_yield(
    host: Annotated[str, Argument(help="The host, as the run names it.")],
    run: Annotated[str, Option("--run", metavar="RUN", help="A running run.")] = "last",
    back: Annotated[bool, Option("--back", help="Let it take part again.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Leave a host out of a running run, so that somebody can use it; the others go on."""
    run_dir, _ = going_on(folders_of(config, runs_dir), run)
    console, followed = Console(), _Followed(run_dir)
    known = read_run(run_dir, only_asked=True).hosts
    name = next((each for each in known if host in (each, each.removesuffix(".local"))), host)
    typed = f"multimac hosts yield {name}" + ("" if run == "last" else f" --run {run}")
    is_asked = name in read_away(run_dir)
    if is_asked and not back:
        raise RunError(f"{name} is left out already", remedy=f"Take it back with: {typed} --back")
    if back and not is_asked and name in known:
        host_view = followed.view.hosts.get(name, HostView(name))
        if host_view.state == "away":
            raise RunError(f"{name} is left out by itself: {host_view.away_for}", remedy="It comes back after that.")
        raise RunError(f"{name} is not left out", remedy="It takes part, or is lost: see `multimac runs attach`.")
    set_away(run_dir, name, not back)
    told = followed.outcome(name, console, back=back)
    if not back:
        told += f"; take it back with: {typed} --back"
    console.print(f"{name} {told}", soft_wrap=True)
    return ExitStatus.OK


class _Followed:
    """Follows a run's events from the first one on."""

    def __init__(self, run_dir: Path):
        self.view, self._run_dir, self._position = RunView(), run_dir, 0
        self._read()

    def _read(self) -> None:
        events, self._position = new_events(self._run_dir / "events.jsonl", self._position)
        for event in events:
            self.view.take(event)

    def outcome(self, name: str, console: Console, *, back: bool) -> str:
        """Wait until this host has left, or is back. Returns what has become of it. Raises RunError."""
        begun, has_said = time.monotonic(), False
        while not (told := self._told(name, back=back)):
            if not is_running(self._run_dir):
                remedy = f"See it: multimac runs show {as_typed(self._run_dir)}"
                raise RunError("the run has ended meanwhile", remedy=remedy)
            if not has_said and time.monotonic() - begun > SAY_AFTER_S:
                has_said = True
                others = "the others'" if back else "its"
                console.print(f"waiting for the end of {others} round: step {self._step} is made", soft_wrap=True)
            time.sleep(EVERY_S)
            self._read()
        time.sleep(EVERY_S)  # the last step of a round is told after the round
        self._read()
        return self._told(name, back=back) or told

    def _told(self, name: str, *, back: bool) -> str:
        host = self.view.hosts.get(name, HostView(name))  # of a launcher that has just started nothing is told yet
        if self.view.phase != "evaluate" and host.state != "done":
            return _told(host, self._step, back=back)
        if back:
            return "is not called again while clips are transcribed"
        if name == read_run(self._run_dir, only_asked=True).hosts[0]:
            set_away(self._run_dir, name, False)
            what = f"{name} leads the run: once training has ended, it does the rest in any case"
            raise RunError(what, remedy=f"Let it end, or stop it: multimac runs stop {as_typed(self._run_dir)}")
        return "takes no more clips than it has in hand"

    @property
    def _step(self) -> int:
        return max((host.step for host in self.view.hosts.values()), default=0)


def _told(host: HostView, step: int, *, back: bool) -> str:
    """Tell what has become of a host that is to leave or to come back; "" as long as nothing has. step: of the run."""
    if host.state in ("given up", "failed"):
        return "is given up" if host.state == "given up" else "has failed"
    if host.state == "lost":
        return f"is lost; it {'takes part again' if back else 'stays left out'} once it is found"
    if not back:
        since = f" since step {step}" if step else ""
        return f"is left out{since}" if host.state == "away" else ""
    if host.state == "away":
        return "" if host.away_for == ASKED else f"stays away by itself: {host.away_for}"
    return "takes part again" if host.state == "training" else ""
