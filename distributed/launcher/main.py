"""The launcher: one process per run, in a session of its own. `python -m distributed.launcher.main RUN_DIR`.

It holds the SSH sessions, and rank 0 as a child; it writes events.jsonl and, when all
ranks are done, evaluates. The command that the user typed only follows events.jsonl: closing its terminal is no harm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from distributed.hosts.keep_awake import keep_awake
from distributed.hosts.paths import PROJECT
from distributed.plan.forecast import learn
from distributed.plan.launch import Launch, Rank
from distributed.plan.run_spec import Rendezvous
from distributed.run_dir.away import forget_away, read_away
from distributed.run_dir.folder import as_typed, only_one
from distributed.run_dir.log import RESERVE, EventLog
from distributed.run_dir.summary import NOT_EVALUATED, read_history, read_run
from distributed.ssh.machine import on_each
from whisper_tuner.errors import ExitStatus, TunerError
from whisper_tuner.text import harmless

from .notify import Notifier
from .spawner import HostSpawner, LocalSpawner, Spawner
from .training import Meeting, Refused, Training

REPORT_S = 120.0  # it usually takes a second or two; a run of a day must not wait for a disk that hangs
REPORT_AT_ONCE_S = 10.0  # of a run that was to stop at once
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Launcher:
    """Trains, evaluates, and tells of it in events.jsonl. report: the module that writes a report of the run; or ""."""

    def __init__(self, run_dir: Path, *, resume: bool = False, report: str = ""):
        self.run_dir, self.resume, self._report = run_dir, resume, report
        self.launch = Launch.load(run_dir)
        events = EventLog(run_dir / "events.jsonl", reserve=RESERVE)
        self._notifier = Notifier(events, self.launch.notify, self.launch.run_id) if self.launch.notify else None
        self.events = self._notifier or events
        self._away: set[str] = set()  # who was left out as training ended
        self._interrupts = 0
        self._trained = self._at_once = self._was_stopped = False

    def interrupt(self, *_signal) -> None:
        """First: finish the step, agree, save, stop. Second, or once the model is saved: stop now."""
        self._interrupts += 1
        if self._interrupts > 1 or self._trained:
            raise KeyboardInterrupt

    def run(self) -> ExitStatus:
        status, message = self._outcome()
        self.events({"type": "end", "status": int(status), "message": message})
        self._trained = True  # a signal from here on means: now
        with contextlib.suppress(KeyboardInterrupt):  # whatever becomes of these, the run has ended as it has
            longest_s = REPORT_AT_ONCE_S if self._at_once else REPORT_S
            if self._report and (event := report_event(self._report, self.run_dir, longest_s)):
                self.events(event)
            if self._notifier:
                self._notifier.close()
            if status == ExitStatus.OK:
                self._learn()
        return status

    def _learn(self) -> None:
        """Remember what the parts of the run took, for the next forecast."""
        profile = self.launch.ranks[0].spec.profile
        if not self.launch.forecast or not profile:
            return
        run = read_history(self.run_dir, ended=True)[0]
        if run.took:
            learn(self.launch.forecast, run.took, profile.base_model, self.launch.test)

    def _outcome(self) -> tuple[ExitStatus, str]:
        """Train and evaluate; how it ended, and what to tell the user of that."""
        try:
            self._train()
            if (self.run_dir / "final").is_dir():
                self.events({"type": "model", "path": str(self.run_dir / "final")})
            if self._was_stopped:
                message = "stopped as asked; what was trained so far is in final/"
                return ExitStatus.INTERRUPTED, message + self._again()
            if self.launch.evaluate and (self.launch.test or self.launch.keeps):
                self._trained = True
                if self._interrupts:  # by one that came after the last step
                    raise KeyboardInterrupt
                self._evaluate()
            return ExitStatus.OK, ""
        except KeyboardInterrupt:
            self._at_once = True
            kept = "; what was trained before is in final/" if (self.run_dir / "final").is_dir() else ""
            stopped = "stopped at once" + (self._again() or kept or "; nothing was saved yet")
            return ExitStatus.INTERRUPTED, self._not_evaluated() if self._trained else stopped
        except Refused as error:
            return error.exit_status, str(error)
        except TunerError as error:
            return error.exit_status, self._not_evaluated(str(error)) if self._trained else f"{error}{self._again()}"
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error} (see {self.run_dir}/launcher.log)"
            return ExitStatus.ERROR, self._not_evaluated(message) if self._trained else message + self._again()

    def _not_evaluated(self, why: str = "") -> str:
        told = f"\n  {why}" if why else ""
        return f"{NOT_EVALUATED}{told}\n  Measure it with: multimac evaluate {as_typed(self.run_dir)}"

    def _again(self) -> str:
        run = read_run(self.run_dir)
        if not run.has_checkpoints:
            return ""
        return f"\n  Go on with: {self.launch.resume_command(self.run_dir)}"

    def _train(self) -> None:
        ranks = self.launch.ranks
        started = {"type": "phase", "phase": "start", "hosts": [rank.label for rank in ranks]}
        self.events(started | ({"commit": commit} if (commit := commit_of(PROJECT)) else {}))
        for leak in () if self.resume else self.launch.leaks:
            self.events({"type": "warning", "what": leak})
        meeting: Meeting | None = None
        place: Rendezvous | None = None
        if len(ranks) > 1:
            meeting = Meeting(self.launch.address, ranks[0].spec.interface)
            place = Rendezvous(address=meeting.address, key=secrets.token_hex(32))
        spawners = [spawner_of(rank, self.run_dir, place, resume=self.resume) for rank in ranks]
        training = Training(
            spawners,
            events=self.events,
            log=log,
            min_hosts=self.launch.min_hosts,
            patience_s=self.launch.timeout_s,
            resumed=self.resume,
            meeting=meeting,
            asked_away=lambda: read_away(self.run_dir),
        )
        finished = False
        try:
            exporter = training.run(lambda: self._interrupts > 0)
            self._away = training.away
            profile = ranks[0].spec.profile
            if exporter.spawner.host and profile:  # an adapter that it has saved names its base as it lies there
                from whisper_tuner.export.final import name_base

                name_base(self.run_dir / "final", profile.base_model)
            finished = True
        except Exception:  # whatever it is: what the workers have agreed on is not to be lost
            training.end(rescue=True)
            raise
        finally:
            training.end()
            self._was_stopped = training.was_stopped
            finished = finished and not self._was_stopped
            on_each(spawners, lambda spawner: spawner.leave(finished=finished))

    def _evaluate(self) -> None:
        from .evaluate import evaluate_launch

        self.events({"type": "phase", "phase": "evaluate"})
        out = self._away.union(read_away(self.run_dir))
        helpers = [rank for rank in self.launch.ranks if rank.host and rank.label not in out]
        spec = self.launch.ranks[0].spec
        evaluate_launch(self.launch, spec, self.events, helpers, asked_away=lambda: read_away(self.run_dir))


def spawner_of(rank: Rank, run_dir: Path, rendezvous: Rendezvous | None, *, resume: bool) -> Spawner:
    if rank.host:
        return HostSpawner(rank, rank.host, run_dir, rendezvous, resume=resume)
    return LocalSpawner(rank, rendezvous, resume=resume)


def commit_of(project: Path) -> str:
    """Read from git's files which commit of this program is here: a Mac without its developer tools has no git.

    Returns "" if it is not a clone. The files may have been changed since.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        folder = project / ".git"
        if folder.is_file():  # of a worktree or a submodule
            folder = project / folder.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
        found = (folder / "HEAD").read_text(encoding="utf-8").strip()
        if found.startswith("ref:"):
            reference, common = found.removeprefix("ref:").strip(), folder
            with contextlib.suppress(FileNotFoundError):
                common = folder / (folder / "commondir").read_text(encoding="utf-8").strip()
            if (common / reference).is_file():
                found = (common / reference).read_text(encoding="utf-8").strip()
            else:
                lines = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
                found = next((line.split()[0] for line in lines if line.endswith(f" {reference}")), "")
        return found if HASH.fullmatch(found) else ""
    return ""


def report_event(module: str, run_dir: Path, longest_s: float) -> dict | None:
    """Have a report written, and make the event to tell. A process of its own does it, so that it does the run no harm.

    `python -m MODULE RUN_DIR` prints the path, nothing, or with status 1 a reason. The command that starts a run names
    the module, since it belongs to what a person sees.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            timeout=longest_s,
        )
        said = done.stdout.strip().splitlines()
        if not done.returncode:
            return {"type": "report", "path": said[-1]} if said else None
        reason = said[-1] if said else f"its process ended with status {done.returncode}; see launcher.log"
    except subprocess.TimeoutExpired:
        reason = f"it took over {longest_s:.0f} s"
    except OSError as error:
        reason = str(error)
    return {"type": "warning", "what": f"the report was not written: {reason}"}


def log(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        print(harmless(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--report", default="")
    asked = parser.parse_args()
    with only_one(asked.run_dir):
        forget_away(asked.run_dir)
        launcher = Launcher(asked.run_dir, resume=asked.resume, report=asked.report)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, launcher.interrupt)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        keep_awake(os.getpid())  # while the master sleeps nobody trains
        return launcher.run()


if __name__ == "__main__":
    sys.exit(main())
