"""The launcher: one process per run, in a session of its own. `python -m distributed.launcher.main RUN_DIR`.

It holds the SSH sessions, and rank 0 as a child; it writes events.jsonl and, when all
ranks are done, evaluates. The command that the user typed only follows events.jsonl: closing its terminal is no harm.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import traceback
from pathlib import Path

from distributed.hosts.keep_awake import keep_awake
from distributed.hosts.paths import PROJECT
from distributed.plan.launch import Launch, Rank
from distributed.plan.run_spec import CHECKPOINTS, Rendezvous
from distributed.run_dir.folder import only_one
from distributed.run_dir.log import EventLog
from distributed.ssh.machine import on_each
from whisper_tuner.errors import ExitStatus, TunerError
from whisper_tuner.text import harmless

from .commit import commit_of
from .host_spawner import HostSpawner
from .meeting import Meeting
from .report import AT_ONCE_S, LONGEST_S, REPORT, report_event
from .spawner import LocalSpawner
from .training import Refused, Training

NOT_EVALUATED = "stopped before WER was measured; the model is in final/, and `multimac evaluate` measures it"


class Launcher:
    def __init__(self, run_dir: Path, *, resume: bool = False, report: str = ""):
        """report: the module that writes a report of the run at its end; none without it."""
        self.run_dir, self.resume, self._report = run_dir, resume, report
        self.launch = Launch.load(run_dir)
        self.events = EventLog(run_dir / "events.jsonl")
        self._interrupts = 0
        self._trained = self._at_once = False

    def interrupt(self, *_signal) -> None:
        """First: finish the step, agree, save, stop. Second, or once the model is saved: stop now."""
        self._interrupts += 1
        if self._interrupts > 1 or self._trained:
            raise KeyboardInterrupt

    def run(self) -> ExitStatus:
        status, message = self._outcome()
        self.events({"type": "end", "status": int(status), "message": message})
        if self._report:
            self._write_report()
        return status

    def _write_report(self) -> None:
        """Whatever becomes of it, the run has ended as it has."""
        self._trained = True  # a signal from here on means: now
        with contextlib.suppress(KeyboardInterrupt):
            longest_s = AT_ONCE_S if self._at_once else LONGEST_S
            if event := report_event(self._report, self.run_dir, longest_s):
                self.events(event)

    def _outcome(self) -> tuple[ExitStatus, str]:
        """Train and evaluate; how it ended, and what to tell the user of that."""
        try:
            self._train()
            if (self.run_dir / "final").is_dir():
                self.events({"type": "model", "path": str(self.run_dir / "final")})
            if self._interrupts:
                message = "stopped as asked; what was trained so far is in final/"
                return ExitStatus.INTERRUPTED, message + self._again()
            if self.launch.evaluate and self.launch.test:
                self._trained = True
                self._evaluate()
            return ExitStatus.OK, ""
        except KeyboardInterrupt:
            self._at_once = True
            message = NOT_EVALUATED if self._trained else "stopped at once" + self._again()
            return ExitStatus.INTERRUPTED, message
        except Refused as error:
            return error.exit_status, str(error)
        except TunerError as error:
            return error.exit_status, str(error) + self._again()
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error} (see {self.run_dir}/launcher.log)"
            return ExitStatus.ERROR, message + self._again()

    def _again(self) -> str:
        kept = any((self.run_dir / CHECKPOINTS).glob("*/*.json"))
        return f"\n  Go on with: {self.launch.resume_command(self.run_dir)}" if kept else ""

    def _train(self) -> None:
        ranks = self.launch.ranks
        started = {"type": "phase", "phase": "start", "hosts": [rank.label for rank in ranks]}
        self.events(started | ({"commit": commit} if (commit := commit_of(PROJECT)) else {}))
        meeting = Meeting(self.launch.address, ranks[0].spec.interface) if len(ranks) > 1 else None
        place = meeting and Rendezvous(address=meeting.address, key=secrets.token_hex(32))
        spawners = [spawner_of(rank, self.run_dir, place, resume=self.resume) for rank in ranks]
        training = Training(
            spawners,
            events=self.events,
            log=log,
            min_hosts=self.launch.min_hosts,
            patience_s=self.launch.timeout_s,
            resumed=self.resume,
            meeting=meeting,
        )
        finished = False
        try:
            training.run(lambda: self._interrupts > 0)
            if training.exporter.spawner.host:
                self._name_base()
            finished = True
        except Exception:  # whatever it is: what the workers have agreed on is not to be lost
            training.end(rescue=True)
            raise
        finally:
            training.end()
            finished = finished and not self._interrupts
            on_each(spawners, lambda spawner: spawner.leave(finished=finished))

    def _name_base(self) -> None:
        """An adapter that another host has saved names its base as it lies there."""
        from whisper_tuner.export.final import name_base

        if profile := self.launch.ranks[0].spec.profile:
            name_base(self.run_dir / "final", profile.base_model)

    def _evaluate(self) -> None:
        from .evaluate import evaluate_run

        self.events({"type": "phase", "phase": "evaluate"})
        helpers = [rank for rank in self.launch.ranks if rank.host]
        evaluate_run(self.launch.ranks[0].spec, Path(self.launch.test), self.events, helpers)


def spawner_of(rank: Rank, run_dir: Path, rendezvous: Rendezvous | None, *, resume: bool) -> HostSpawner | LocalSpawner:
    if rank.host:
        return HostSpawner(rank, run_dir, rendezvous, resume=resume)
    return LocalSpawner(rank, rendezvous, resume=resume)


def log(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        print(harmless(line), flush=True)


def main() -> int:
    run_dir = Path(sys.argv[1])
    with only_one(run_dir):
        options = sys.argv[2:]
        report = next((option.removeprefix(REPORT) for option in options if option.startswith(REPORT)), "")
        launcher = Launcher(run_dir, resume="--resume" in options, report=report)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, launcher.interrupt)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        keep_awake(os.getpid())  # while the master sleeps nobody trains
        return launcher.run()


if __name__ == "__main__":
    sys.exit(main())
