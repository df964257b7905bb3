"""`multimac hosts yield`: a host leaves a running run, so that its owner has the machine, and takes part again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from distributed.run_dir.away import ASKED, read_away, set_away
from distributed.run_dir.folder import is_running
from distributed.run_dir.log import new_events
from distributed.run_dir.run_view import HostView, RunView
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
    known = followed.view.hosts
    name = next((each for each in known if host in (each, each.removesuffix(".local"))), host)
    typed = f"multimac hosts yield {name}" + ("" if run == "last" else f" --run {run}")
    is_asked = name in read_away(run_dir)
    if is_asked and not back:
        raise RunError(f"{name} is left out already", remedy=f"Take it back with: {typed} --back")
    if back and not is_asked and name in known:
        if known[name].state == "away":
            raise RunError(f"{name} is left out by itself: {known[name].away_for}", remedy="It comes back after that.")
        raise RunError(f"{name} is not left out", remedy="It takes part, or is lost: see `multimac runs attach`.")
    set_away(run_dir, name, not back)
    if followed.view.phase == "evaluate":
        told = "is not called again while clips are transcribed" if back else "takes no more clips than it has in hand"
    else:
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
        while not (told := _told(self.view.hosts[name], back=back)):
            if not is_running(self._run_dir):
                raise RunError("the run has ended meanwhile", remedy=f"See it: multimac runs show {self._run_dir.name}")
            if not has_said and time.monotonic() - begun > SAY_AFTER_S:
                has_said = True
                others = "the others'" if back else "its"
                console.print(f"waiting for the end of {others} round: step {self._step} is made", soft_wrap=True)
            time.sleep(EVERY_S)
            self._read()
        time.sleep(EVERY_S)  # the last step of a round is told after the round
        self._read()
        return _told(self.view.hosts[name], back=back) or told

    @property
    def _step(self) -> int:
        return max(host.step for host in self.view.hosts.values())


def _told(host: HostView, *, back: bool) -> str:
    """Return what has become of a host that is to leave or to come back; "" as long as nothing has."""
    if not back:
        since = f" since step {host.step}" if host.step else ""
        return f"is left out{since}" if host.state == "away" else ""
    if host.state == "away":
        return "" if host.away_for == ASKED else f"stays away by itself: {host.away_for}"
    if host.state in ("lost", "given up"):
        return f"is {host.state}; it takes part again once it is found" if host.state == "lost" else "is given up"
    return f"takes part again since step {host.step}" if host.state == "training" else ""
