"""One run of faults.py: what is to happen to its hosts, and a run of the bundled model in a lab, with all that."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab import Lab, faults, remains
from lab.hosts import user_home
from lab.mischief import SKEWS_S, Aim, Fault, Mischief

from benchmarks.base import BUNDLED_DATA, BUNDLED_MODEL, PROJECT, config_text, current_commit, profile_of
from distributed.run_dir.log import read_events

MASTER = "h1"
RECORD = "record.json"
HOME = "hosts-in-trouble"  # on the lab's hosts, below their home, where this repository may lie too
DISK = "192m"  # holds the project, the run and some checkpoints
START_S, RUN_S, LEFT_S = 180.0, 900.0, 25.0
BATCH, ROUND_STEPS = 4, 5
STRATEGIES = ("diloco", "hidden", "diloco", "allreduce")  # hidden: DiLoCo whose exchanges travel beside its steps
SHORT_S, LONG_S = (2.0, 9.0), (16.0, 28.0)  # a host comes back before it is given up, or after
FIRST_S, GAP_S, REST_S = 3.0, (4.0, 12.0), 2.0


# What is to happen, drawn by a seed.


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run and what happens to it. After each leg but the last the launcher is killed, and a checkpoint damaged.

    clocks are wrong during the whole run; a host of a `disk` fault has a small one.
    """

    number: int
    hosts: tuple[str, ...]
    strategy: str
    seed: int
    epochs: int
    legs: tuple[tuple[Fault, ...], ...] = ((),)
    damages: tuple[Fault, ...] = ()
    clocks: tuple[Fault, ...] = ()
    round_steps: int = ROUND_STEPS
    batch: int = BATCH

    def to_json(self) -> dict:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def round_samples(self) -> int:
        """Return the samples of a round, of all hosts together; each host makes every step."""
        return max(self.batch, len(self.hosts)) * (1 if self.strategy == "allreduce" else self.round_steps)

    @property
    def vain_rounds(self) -> int:
        """Return how many rounds of training a fault may undo: the one under way, and one whose exchange travels."""
        return 2 if self.strategy == "hidden" else 1


def plan(seed: int, number: int, kinds: Sequence[str], count: int, epochs: dict[str, int]) -> Plan:
    """Draw run `number`. Kinds come from a deck that is dealt out over all runs, so that each comes as often."""
    rng = random.Random(f"{seed} {number}")
    decks = [random.Random(f"{seed} deck {n}").sample(kinds, len(kinds)) for n in range((number + 1) * count)]
    mine = [kind for deck in decks for kind in deck][number * count : (number + 1) * count]
    hosts = tuple(f"h{n}" for n in range(1, rng.choice((3, 4)) + 1))
    strategy = STRATEGIES[number % len(STRATEGIES)]
    legs, damages, clocks = [[]], [], []
    at, free = FIRST_S, dict.fromkeys(hosts, 0.0)
    for kind in mine:
        host, own_seed = rng.choice(hosts), rng.randrange(1 << 32)
        if kind == "clock":
            host = rng.choice([h for h in hosts if h not in {clock.host for clock in clocks}])
            clocks.append(Fault(at=0, host=host, kind=kind, seconds=0, seed=own_seed))
        elif kind == "damage":
            damages.append(Fault(at=0, host=host, kind=kind, seconds=0, seed=own_seed))
            legs.append([])
            at, free = FIRST_S, dict.fromkeys(hosts, 0.0)
        else:
            host = rng.choice([h for h in hosts if free[h] <= at] or [min(hosts, key=free.get)])
            at = max(at, free[host])
            lasts = 0.0 if kind == "kill" else rng.uniform(*rng.choice((SHORT_S, LONG_S)))
            legs[-1].append(Fault(at=at, host=host, kind=kind, seconds=lasts, seed=own_seed))
            free[host] = at + lasts + REST_S
            at += rng.uniform(*GAP_S)
    return Plan(
        number=number, hosts=hosts, strategy=strategy, seed=seed + number, epochs=epochs[strategy],
        legs=tuple(map(tuple, legs)), damages=tuple(damages), clocks=tuple(clocks),
    )  # fmt: skip


# A run.


class Course:
    """One run in a lab that is up: started, troubled, waited for, looked at. Its files go to `folder`."""

    def __init__(self, lab: Lab, plan: Plan, folder: Path):
        self.lab, self.plan, self.folder = lab, plan, folder
        self.home = lab[MASTER].path(HOME)
        self.faults: list[dict] = []
        self.missed: list[str] = []  # there was nothing to hit
        self.troubles: list[str] = []  # that are no fault's
        self._env = {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"}
        self._ahead = 0.0  # of the master's clock
        self._known = set(self.home.glob("runs/*"))

    def run(self) -> dict:
        """Return all that is to be known of it; also write that to `folder`, with the run's events and log."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with ExitStack() as undo:
            self._prepare(undo)
            damage = None
            for number, leg in enumerate(self.plan.legs):
                damage = self._leg(number, leg, damage, undo)
                if damage is None:
                    break
            for fault in self.faults:
                fault["undone"] = fault["undone"] or time.time()
            left_s = self._wait_until_nothing_is_left()
            final = self._look_at_model()
            self._keep()
        record = {"plan": self.plan.to_json(), "commit": current_commit(), "faults": self.faults, "missed": self.missed}
        record |= {"troubles": self.troubles, "left_s": left_s, "final": final, "ahead": self._ahead}
        record |= {"addresses": {host.address: host.name for host in self.lab.hosts.values()}}
        (self.folder / RECORD).write_text(json.dumps(record, indent=1))
        return record

    def _prepare(self, undo: ExitStack) -> None:
        plan = self.plan
        self.home.mkdir(exist_ok=True)
        (self.home / "config.ini").write_text(config_text(sections_of(plan)))
        workers = [{"host": self.lab[n].address, "project_path": f"~/project-{n}"} for n in plan.hosts[1:]]
        settings = {"master": self.lab[MASTER].address, "workers": workers, "python_env": str(Path(sys.prefix))}
        (self.home / "hosts.json").write_text(json.dumps(settings))
        for host in {fault.host for leg in plan.legs for fault in leg if fault.kind == "disk"}:
            undo.enter_context(faults.small_disk(self.lab[host], disk_of(host), DISK))
        for fault in plan.clocks:
            seconds = random.Random(fault.seed).choice(SKEWS_S)
            undo.enter_context(faults.skewed(self.lab[fault.host], seconds))
            if fault.host == MASTER:
                self._ahead, self._env = seconds, self._env | faults.clock(self.lab[MASTER], seconds)
            self._note(fault, time.time(), f"{seconds:+.0f} s")

    def _leg(self, number: int, leg: Sequence[Fault], damage: dict | None, undo: ExitStack) -> dict | None:
        """Go from a start to the end of the run; or of its launcher, then return what was damaged, for it to resume."""
        front = self._start(bool(number))
        if damage:
            damage["undone"] = time.time()
        if not self._wait(front, START_S, lambda: self._all_train(number + 1)):
            self.troubles.append(f"not every host had made a step after {START_S:.0f} s")
        elif not self._all_train(number + 1):
            said = (self.folder / "console.txt").read_text().splitlines()[-1:]
            self.troubles.append(f"it ended before every host had made a step: {''.join(said)}")
        last, done = number + 1 == len(self.plan.legs), None
        calm = time.monotonic() + max((fault.at + fault.seconds for fault in leg), default=0) + REST_S
        if front.poll() is None:
            with ExitStack() as mischief:
                doing = [mischief.enter_context(Mischief(self.lab, group, aim)) for aim, group in by_aim(leg)]
                victim = "" if last else self.plan.damages[number].host
                self._wait(
                    front, RUN_S, lambda: not last and time.monotonic() > calm and len(self._indices(victim)) > 1
                )
            for one in doing:
                self._take_deeds(one)
            if not last and front.poll() is None:
                done = self._damage(self.plan.damages[number], front, undo)
        if front.poll() is None:
            self.troubles.append(f"it had not ended after {RUN_S:.0f} s")
            for host in self.plan.hosts:
                self.lab.kill(host, "distributed")
            front.wait()
        return done

    def _start(self, resume: bool) -> subprocess.Popen:
        what = ["--resume", str(self.run_dir)] if resume else [self.plan.strategy, "--hosts", "hosts.json"]
        command = [sys.executable, str(PROJECT / "cli_typer.py"), "distributed-train", *what, "--config", "config.ini"]
        with (self.folder / "console.txt").open("a") as console:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": subprocess.STDOUT}
            return self.lab.popen(MASTER, command, cwd=str(user_home() / HOME), env=self._env, **quiet)

    def _damage(self, fault: Fault, front: subprocess.Popen, undo: ExitStack) -> dict:
        """Kill the launcher, and hurt the newest checkpoint of a host once all workers are gone."""
        began, rng = time.time(), random.Random(fault.seed)
        faults.kill(self.lab[MASTER], "distributed.launcher.main")
        self._wait(front, LEFT_S)
        if not wait(lambda: not remains.processes(self.lab), LEFT_S):
            self.troubles += [f"{LEFT_S:.0f} s after the launcher: {each}" for each in remains.processes(self.lab)]
        index = max(self._indices(fault.host), key=lambda path: path.parent.name)
        path = rng.choice([index, index.with_suffix(".safetensors")])
        words = undo.enter_context(faults.damaged(path, seed=fault.seed, cut=rng.random() < 0.5))
        return self._note(fault, began, f"launcher killed; {path.parent.name}/{words}")

    def _indices(self, host: str) -> list[Path]:
        """List the indices of the checkpoints that are whole."""
        return list(self.lab[host].path(runs_of(host)).glob("*/checkpoints/*/*.json"))

    def _note(self, fault: Fault, began: float, words: str, undone: float | None = None) -> dict:
        done = {"kind": fault.kind, "host": fault.host, "words": words, "began": began, "undone": undone}
        self.faults.append(done)
        return done

    def _take_deeds(self, mischief: Mischief) -> None:
        undone = {deed.fault: deed.wall + deed.took for deed in mischief.deeds if deed.done == "undone"}
        for deed in mischief.deeds:
            if deed.done == "begun":
                self._note(deed.fault, deed.wall, deed.words, undone.get(deed.fault, deed.wall))
            elif deed.done == "missed":
                self.missed.append(f"{deed.fault.kind} of {deed.fault.host}: {deed.words}")

    @property
    def run_dir(self) -> Path | None:
        """Return the folder of the run as the master knows it."""
        new = set(self.home.glob("runs/*")) - self._known
        return user_home() / HOME / "runs" / new.pop().name if new else None

    def events(self) -> list[dict]:
        return read_events(self.lab[MASTER].path(self.run_dir) / "events.jsonl")[0] if self.run_dir else []

    def _all_train(self, launchers: int) -> bool:
        """Tell whether every host has made a step since the last of so many launchers started."""
        stepped: set[str] = set()
        for event in self.events():
            if event["type"] == "phase" and "hosts" in event:
                stepped, launchers = set(), launchers - 1
            elif event["type"] == "step":
                stepped.add(event["host"])
        return len(stepped) == len(self.plan.hosts) and launchers == 0

    def _wait(self, front: subprocess.Popen, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the command ends or `until` comes true, and return whether one of these has happened."""
        wait(lambda: front.poll() is not None or until(), seconds)
        return until() or front.poll() is not None

    def _wait_until_nothing_is_left(self) -> float:
        """Return the seconds that it took."""
        folders = [f"{HOME}/runs", *(f"project-{name}" for name in self.plan.hosts[1:])]
        begin = time.monotonic()
        if not wait(lambda: not remains.everything(self.lab, *folders), LEFT_S):
            self.troubles += [f"left after {LEFT_S:.0f} s: {each}" for each in remains.everything(self.lab, *folders)]
        return round(time.monotonic() - begin, 1)

    def _look_at_model(self) -> dict:
        """Load final/ with plain transformers, and hash its weights as ranks do."""
        import torch
        from transformers import WhisperForConditionalGeneration, WhisperProcessor
        from transformers.utils import logging

        from exogym.flat import FlatParameters, digest
        from whisper_tuner.config import Profile
        from whisper_tuner.model.base_model import prepare

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        folder = self.lab[MASTER].path(self.run_dir or "nowhere") / "final"
        if not folder.is_dir():
            return {"wrong": "there is none", "digest": None}
        try:
            model, about = WhisperForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
            processor = WhisperProcessor.from_pretrained(folder)
            features = processor([0.0] * 16000, sampling_rate=16000, return_tensors="pt").input_features
            model.generate(features, max_new_tokens=2)
            finite = all(torch.isfinite(weight).all() for weight in model.parameters())
            wrong = "" if finite and not any(about.values()) else f"weights are not finite, or {about}"
            trained = prepare(model, Profile(base_model=str(folder), train=folder))
            return {"wrong": wrong, "digest": digest(FlatParameters(trained).read())}
        except (OSError, ValueError, RuntimeError) as error:
            return {"wrong": f"{type(error).__name__}: {error}", "digest": None}

    def _keep(self) -> None:
        for name in ("events.jsonl", "launcher.log", "train.csv"):
            path = self.lab[MASTER].path(self.run_dir or "nowhere") / name
            if path.exists():
                shutil.copyfile(path, self.folder / name)


def sections_of(plan: Plan) -> dict[str, dict[str, object]]:
    """Make the profile of a run, and a distribution for its strategy."""
    profile = profile_of(
        BUNDLED_MODEL,
        BUNDLED_DATA,
        num_threads=1,
        device="cpu",
        epochs=plan.epochs,
        batch_size=plan.batch,
        learning_rate=1.5e-3,
        seed=plan.seed,
        checkpoint_interval=1,
        runs_dir="runs",
    )
    rounds = {"base_profile": "bench", "shares": "fixed", "communication_interval": plan.round_steps}
    return {
        "profile:bench": profile,
        "distributed:diloco": {**rounds, "wire": "float32", "overlap_steps": 0},
        "distributed:hidden": {**rounds, "wire": "int8", "overlap_steps": 3, "checkpoint_interval": 3},
        "distributed:allreduce": {"base_profile": "bench", "shares": "fixed", "strategy": "allreduce"},
    }


def wait(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (now := true()) and time.monotonic() < end:
        time.sleep(0.2)
    return bool(now)


def runs_of(host: str) -> str:
    return f"{HOME}/runs" if host == MASTER else f"project-{host}/runs"


def disk_of(host: str) -> str:
    return f"{HOME}/runs" if host == MASTER else f"project-{host}"


def by_aim(leg: Sequence[Fault]) -> list[tuple[Aim, list[Fault]]]:
    """Sort the faults of a leg by what they hit: garbage also hits the launcher, which is not to be killed."""

    def aim(fault: Fault) -> Aim:
        process = "distributed." if fault.kind == "garbage" else "distributed.worker.main"
        return Aim(process=process, disk=disk_of(fault.host) if fault.kind == "disk" else "")

    groups: dict[Aim, list[Fault]] = {}
    for fault in leg:
        groups.setdefault(aim(fault), []).append(fault)
    return list(groups.items())
