"""A profile trained by processes that another program has started: torchrun, Slurm or Ray. Who takes part is its job.

All ranks see one folder of runs. Rank 0 makes the run's folder there, or finds that of an earlier start again, tells
the others what to do, writes down what all of them tell, and evaluates.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distributed.checkup.this_machine import one_machine
from distributed.hosts.keep_awake import keep_awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.launcher.evaluate import evaluate_launch
from distributed.launcher.follow import PlainScreen
from distributed.launcher.main import REPORT_S, report_event
from distributed.launcher.notify import Notifier
from distributed.plan.job import Job
from distributed.plan.launch import Launch, Rank
from distributed.plan.prepare import STAGES, prepare_run
from distributed.plan.run_spec import CHECKPOINTS, RunSpec
from distributed.run_dir.events import event_of
from distributed.run_dir.folder import new_run, only_one, runs_named
from distributed.run_dir.log import EventLog
from distributed.run_dir.run_view import RunView
from distributed.run_dir.summary import FINISHED, NOT_EVALUATED, read_run
from distributed.worker.main import REMEDIES
from distributed.worker.readings import tell_readings
from distributed.worker.train import RankTrainer, train
from exogym.comm.comm import DEFAULT_TIMEOUT, Comm
from exogym.comm.process_group import brief
from exogym.errors import ExogymError
from exogym.launch import join, meeting_store, rank, world_size
from exogym.membership import ROUND
from whisper_tuner.errors import ExitStatus, RunError, TunerError
from whisper_tuner.text import harmless

Tell = Callable[[dict[str, Any]], None]

SLURM = {  # what torch's launchers set, as Slurm's srun calls it
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
}
LAUNCH_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")  # the same when a launch is started again
NO_ID = ("", "none")  # torchrun's own, where nobody has given one
PLAN_S = 3600.0  # rank 0 may have to fetch a model
LISTEN_EVERY_S, LAST_WORDS_S = 0.2, 60.0
PLAN, LEFT = "plan", "left"
TOLD = REMEDIES | {"PeerLost": "Another rank has ended, or is silent: look for what it has said last."}
COMMITS = "commit", "stopped"  # of a round, by whether a stop has cut it short


def take_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torch's variables are to be in a process of Slurm's, where nothing has set them."""
    return {name: environment[of] for name, of in SLURM.items() if of in environment and name not in environment}


def launch_id(environment: Mapping[str, str]) -> str:
    """Return the number of the launch, by which one that is started again finds its run; "" if it has none."""
    found = (environment.get(name, "") for name in LAUNCH_IDS)
    return next((known for known in found if known not in NO_ID), "")


def local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class LaunchedRun:
    """One rank's way through a run. known: by which a launch that is started again finds the run; "" if it cannot.

    report: the module that writes a report of the run; or "".
    """

    def __init__(self, job: Job, known: str, report: str = ""):
        self._job, self._known, self._report = job, known, report
        self.run_dir = Path()  # in rank 0, once the run is planned
        self._asked, self._trained, self._was_stopped = 0, False, False

    def go(self) -> ExitStatus:
        """Train to the end, or until SIGTERM or SIGINT: then all ranks agree, save and stop. Raises TunerError."""
        if threading.current_thread() is threading.main_thread():  # a worker of Ray's trains in another one
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._ask_to_stop)
        keep_awake(os.getpid())
        try:
            store = dist.PrefixStore("multimac", meeting_store(DEFAULT_TIMEOUT))
            return self._lead(store) if rank() == 0 else self._follow(store)
        except ExogymError as error:
            raise RunError(str(error), remedy=TOLD.get(type(error).__name__, "")) from error
        except dist.DistError as error:  # of the store, which has ended with the rank or the program that held it
            raise RunError(f"rank {rank()} of {world_size()} lost the others: {brief(error)}") from error

    def _ask_to_stop(self, *_signal: Any) -> None:
        """First: finish the step, agree, save, stop. Second, or once the model is saved: stop now."""
        self._asked += 1
        if self._asked > 1 or self._trained:
            raise KeyboardInterrupt

    def _train(self, spec: RunSpec, events: Tell) -> Callable[[], object]:
        """Be this rank from beginning to end. Returns how to save the model. Raises RunError, ExogymError."""
        if not Path(spec.run_dir).is_dir():
            remedy = "Set runs_dir to a folder that all machines share."
            raise RunError(f"rank {rank()} does not see the run's folder {spec.run_dir}", remedy=remedy)

        def tell(event: dict[str, Any]) -> None:
            events({**event, "host": spec.name, "rank": spec.rank})

        tell_readings(tell)
        result, save = train(
            spec,
            tell,
            lambda work: LaunchedTrainer(spec, work, tell),
            unsent=_Everything(),
            stopped=lambda: self._asked > 0,
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        )
        self._was_stopped = result.stopped  # it may be another rank that was asked
        return save

    def _own(self, spec: RunSpec) -> RunSpec:
        """Return what this rank is told: where it is, and the processors of its own machine."""
        threads = self._job.profile.num_threads or max(1, (os.cpu_count() or 1) // local_size())
        return replace(
            spec,
            rank=rank(),
            profile=replace(spec.known_profile, num_threads=threads),
            machine_workers=local_size(),
            cache_dir=str(PROJECT / STORE / "cache"),
        )

    def _follow(self, store: dist.Store) -> ExitStatus:
        store.wait([PLAN], timedelta(seconds=PLAN_S))
        plan = json.loads(store.get(PLAN))
        if "spec" not in plan:
            refused = RunError(f"rank 0 cannot begin: {plan['refused']}")
            refused.exit_status = ExitStatus(plan["status"])  # the same on all: by it another start is decided on
            raise refused
        letters = Letters(store)
        try:
            self._train(self._own(RunSpec.from_json(plan["spec"])), letters.send)
        finally:
            with contextlib.suppress(RuntimeError):  # rank 0 has ended, and with it the store
                letters.send({"type": LEFT})
        return ExitStatus.OK  # also if it was stopped: rank 0 tells, which may be saving still

    # Rank 0.

    def _lead(self, store: dist.Store) -> ExitStatus:
        with ExitStack() as held:
            try:
                run_dir, launch = self._planned(held)
            except BaseException as error:
                status = error.exit_status if isinstance(error, TunerError) else ExitStatus.ERROR
                status = ExitStatus.INTERRUPTED if isinstance(error, KeyboardInterrupt) else status
                store.set(PLAN, json.dumps({"refused": str(error) or type(error).__name__, "status": status}))
                raise
            self.run_dir = run_dir
            tell = Told(run_dir, launch.notify)
            tell({"type": "phase", "phase": "start", "hosts": [one.label for one in launch.ranks]})
            status, message = self._outcome(run_dir, launch, store, tell)
            tell({"type": "end", "status": int(status), "message": message})
            if message:
                print(harmless(message), flush=True)
            self._trained = True  # a signal from here on means: now
            has_run = status in (ExitStatus.OK, ExitStatus.INTERRUPTED)  # else the ranks are about to be started again
            with contextlib.suppress(KeyboardInterrupt):  # a finished run is not to be started again, as a new one
                if self._report and has_run and (event := report_event(self._report, run_dir, REPORT_S)):
                    tell(event)
                tell.close()
        return status

    def _planned(self, held: ExitStack) -> tuple[Path, Launch]:
        """Make the run's folder and its run.json, or find those of an earlier start. Raises TunerError.

        held: keeps others out of the run.
        """
        runs = self._job.profile.runs_dir.absolute()
        name = f"{self._job.name}-{self._known}" if self._known else self._job.name
        for run_dir in reversed(runs_named(runs, name) if self._known else []):
            launch = Launch.load(run_dir)
            if launch.name == self._job.name and read_run(run_dir).state != FINISHED:
                held.enter_context(only_one(run_dir))
                launch = among(launch, resume=True)
                launch.save(run_dir)
                print(f"run folder: {run_dir}; the run goes on, with the settings that it began with", flush=True)
                return run_dir, launch
        with new_run(runs, name) as run_dir:
            measured = one_machine if local_size() == world_size() else None
            prepared = prepare_run(self._job, run_dir, local_ranks=world_size(), measured=measured)
            launch = among(prepared.launch, resume=False)
            held.enter_context(only_one(run_dir))
            launch.save(run_dir)
            print(f"run folder: {run_dir}", flush=True)
            if not self._known:
                print(
                    "started again, this command begins a new run: --rdzv-id or --run NAME goes on with one", flush=True
                )
            return run_dir, launch

    def _outcome(self, run_dir: Path, launch: Launch, store: dist.Store, tell: Tell) -> tuple[ExitStatus, str]:
        """Train and evaluate; how it ended, and what to tell of that."""
        spec = self._own(launch.ranks[0].spec)
        how = launch.resume_command(run_dir)
        if self._known:
            how = f"start it again with --run {shlex.quote(self._known)}"
        again = f"\n  To go on from the last checkpoint: {how}"
        try:
            with Letters(store).read(tell):
                store.set(PLAN, json.dumps({"spec": spec.to_json()}))
                save = self._train(spec, tell)
                save()
                self._trained = True
            tell({"type": "model", "path": str(run_dir / "final")})
            if self._was_stopped:
                return ExitStatus.INTERRUPTED, f"stopped as asked; what was trained so far is in final/{again}"
            if launch.test or launch.keeps:
                if self._asked:  # after the last step
                    raise KeyboardInterrupt
                tell({"type": "phase", "phase": "evaluate"})
                evaluate_launch(launch, spec, tell)
            shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)  # the others have left
            return ExitStatus.OK, ""
        except KeyboardInterrupt:
            return ExitStatus.INTERRUPTED, NOT_EVALUATED if self._trained else f"stopped at once{again}"
        except TunerError as error:
            return error.exit_status, f"{error}{again}"
        except (ExogymError, dist.DistError) as error:
            return ExitStatus.RUN, f"{error}{again}"
        except Exception as error:
            traceback.print_exc()
            return ExitStatus.ERROR, f"{type(error).__name__}: {error}{again}"


def among(launch: Launch, *, resume: bool) -> Launch:
    """Return run.json for all processes of this launch, of which there may have been more or fewer before.

    Raises RunError for a pipeline, of which each rank has a part.
    """
    if launch.ranks[0].spec.is_pipeline and world_size() != STAGES:
        what = f"the run is a pipeline of {STAGES} ranks, not of {world_size()}"
        raise RunError(what, remedy=f"Start it with {STAGES}.")
    names = tuple(f"rank{number}" for number in range(world_size()))
    spec = replace(launch.ranks[0].spec, world_size=len(names), hosts=names, resume=resume)
    ranks = tuple(Rank(label=name, spec=replace(spec, rank=number)) for number, name in enumerate(names))
    return replace(launch, ranks=ranks, min_hosts=len(names))


class LaunchedTrainer(RankTrainer):
    """exogym's trainer of one process of a launch. It tells which clips each round has counted."""

    def __init__(self, spec: RunSpec, work: Any, tell: Tell):
        super().__init__(spec, work)
        self._tell = tell

    def _build_connection(self, rank: int) -> Comm:
        comm = join()
        comm.on_commit = self._committed
        return comm

    def _committed(self, kind: str, about: Mapping[str, Any]) -> None:
        if kind == ROUND:
            told = {"round": about["round"], "samples": about["samples"]}
            self._tell({"type": COMMITS[about["cut_short"]], **told})


class _Everything:
    """A collection that holds every name: audio that is not here will not come, as nobody sends any."""

    def __contains__(self, name: object) -> bool:
        return True


class Told:
    """Takes the events of all ranks: they are written to events.jsonl, and their lines are printed.

    A round is written as committed once all ranks have said so, as our launcher does.
    """

    def __init__(self, run_dir: Path, notify: str | None):
        log = EventLog(run_dir / "events.jsonl")
        self._notifier = Notifier(log, notify, run_dir.name) if notify else None
        self._log, self._view, self._screen = self._notifier or log, RunView(), PlainScreen()
        self._samples: dict[int, dict[str, Any]] = {}  # round: those of each rank that has committed it
        self._lock = threading.Lock()

    def __call__(self, event: dict[str, Any]) -> None:
        with self._lock:
            if event["type"] in COMMITS:
                number = event["round"]
                of_all = self._samples.setdefault(number, {})
                of_all[event["host"]] = event["samples"]
                if len(of_all) < world_size():
                    return
                event = {"type": event["type"], "round": number, "samples": self._samples.pop(number)}
            self._log(event)
            if read := event_of({"time": time.time(), **event}):
                self._view.take(read)
            for line in self._view.lines:
                self._screen.print(line)
            self._view.lines.clear()
            self._screen.update(self._view)

    def close(self) -> None:
        """Wait until the user has been told of the end, as `notify` says."""
        if self._notifier:
            self._notifier.close()


class Letters:
    """Carries the events of the other ranks to rank 0, each under a numbered key of the store where all meet."""

    def __init__(self, store: dist.Store):
        self._store, self._sent, self._lock = store, 0, threading.Lock()
        self._awaited = dict.fromkeys(range(1, world_size()), 0)  # rank: the number of its next one

    def send(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._store.set(f"{rank()}/{self._sent}", json.dumps(event))
            self._sent += 1

    @contextmanager
    def read(self, tell: Tell) -> Iterator[None]:
        """Tell what comes, in a thread; at the end wait for each rank's last word."""
        ended = threading.Event()

        def listen() -> None:
            while self._take(tell) and not ended.wait(LISTEN_EVERY_S):
                pass
            self._take(tell)  # what a rank has said just before it was lost

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield
            thread.join(LAST_WORDS_S)
        finally:
            ended.set()
            thread.join(LAST_WORDS_S)

    def _take(self, tell: Tell) -> bool:
        """Tell all that has come. Returns whether more will come."""
        for sender in list(self._awaited):
            while sender in self._awaited and self._store.check([key := f"{sender}/{self._awaited[sender]}"]):
                event = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._awaited[sender] += 1
                if event["type"] == LEFT:
                    del self._awaited[sender]
                else:
                    tell(event)
        return bool(self._awaited)
