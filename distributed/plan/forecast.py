"""How long a run takes, from the command to the model: the one forecast, which `plan`, `train` and the wizard tell.

It goes by a few steps that were measured on each host, and by what an earlier run on the same hosts took.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.hosts.paths import PROJECT, STORE
from distributed.run_dir.summary import PARTS
from distributed.ssh.host import Host, Hosts
from exogym.strategy import AllReduceConfig, DiLoCoConfig
from whisper_tuner.data.steps import steps_in_epoch
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.files import hash_of

from .automatic import Conditions, Measured, chosen
from .job import Job

FORWARD = 1 / 3  # of a step: validation computes no gradients
# Of this machine's transcribing, still to come: on a host, torch and the model take half as long to load.
WORTH_S = 20.0
LIKELY = 0.5, 2.0  # times what was expected; beyond these one of the two was measured on a busy machine
RATIOS, HEARD = "times of a run 1", "test set with a base model 1"  # kinds of facts
FACTS = FactStore(PROJECT / STORE / CACHE)
HERE = Hosts(master=Host(address="this machine"), workers=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of one machine; `clips_s` is None where it could not be measured, and `problem` says why.

    sizes: (clips, mean seconds) of steps. errors, words: of the untouched model, in a few test clips. See
    distributed/worker/speed.py.
    """

    host: str
    clips_s: float | None = None
    step_s: float | None = None
    sizes: Sequence[list[float]] = ()
    trainable: int = 0
    start_s: float = 0.0
    clip_s: float = 0.0
    errors: int = 0
    words: int = 0
    problem: str = ""

    @property
    def costs(self) -> tuple[float, float]:
        """Return the seconds of a step beside its clips, and those of each clip."""
        return self.costs_near(max(self.sizes)[0])

    def costs_near(self, clips: float) -> tuple[float, float]:
        """Return these for a step of about so many clips.

        Where larger steps take more for each clip, as where memory is short, the size that was measured nearest counts.
        """
        (few, short), (many, long) = min(self.sizes), max(self.sizes)
        each = (long - short) / (many - few) if many > few else 0.0
        if each > 0 and (beside := short - each * few) > 0:
            return beside, each
        size, seconds = min(self.sizes, key=lambda measured: abs(measured[0] - clips))
        return 0.0, seconds / size


def step_seconds(speeds: Sequence[Speed], clips: float) -> float:
    """Return the seconds of a step of all hosts together, its clips divided so that all end at the same time."""
    costs = [speed.costs_near(clips / len(speeds)) for speed in speeds]
    together = (clips + sum(beside / each for beside, each in costs)) / sum(1 / each for _, each in costs)
    return max(together, *(beside for beside, _ in costs))


def step_of_all(speeds: Sequence[Speed], clips: float) -> float | None:
    """Return the seconds of a step, a host that was not measured taken to be like the others; None if none was."""
    known = [speed for speed in speeds if speed.sizes]
    return step_seconds(known, clips * len(known) / len(speeds)) if known else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """The seconds of each of PARTS, as an earlier run has corrected them, and `measured` without that.

    step_s: of the hosts' steps. waiting_s: of the training, for the network. exchange_bytes, sent: of a host in one
    exchange, and of all in the run.
    """

    hosts: tuple[str, ...]
    strategy: str
    parts: Mapping[str, float]
    measured: Mapping[str, float]
    step_s: float
    waiting_s: float = 0.0
    exchange_bytes: float = 0.0
    sent: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(map(round, self.parts.values()))  # as they are shown

    def kept(self, key: str, entered: float) -> dict[str, Any]:
        """Return what a run keeps of it. entered: when its command was."""
        return {"parts": dict(self.parts), "measured": dict(self.measured), "key": key, "entered": entered}

    def held_back_by(self, alone: Forecast, link: str, slowest: str) -> str:
        """Name what costs most, of several hosts beyond their part of what the fastest alone takes.

        link: the slowest one. slowest: the host whose step takes longest.
        """
        hosts = len(self.hosts)
        beyond = {part: self.parts[part] - (alone.parts[part] / hosts if hosts > 1 else 0.0) for part in PARTS}
        start, training, evaluation = (beyond[part] for part in PARTS)
        costs = {
            "starting": start,
            f"the link {link}": self.waiting_s,
            f"{slowest}'s {self.step_s:.2f} s a step": training - self.waiting_s,
            f"evaluation on {self.hosts[0]}": evaluation,
        }
        return max(costs, key=lambda name: costs[name])


def forecast(
    job: Job,
    clips: Mapping[str, int],
    speeds: Sequence[Speed],
    *,
    bytes_s: float | None = None,
    spare_bytes: float | None = None,
    before_s: float = 0.0,
    ratios: Mapping[str, float] | None = None,
) -> Forecast:
    """Add up a run on the hosts of `speeds`, the master first.

    clips: of each kind. bytes_s: of the slowest link. before_s: until workers are started. ratios: what parts took, by
    what was expected of them. Early stopping is left out, and that shares of unequal hosts settle in some steps.
    """
    profile, hosts = job.profile, len(speeds)
    in_epoch = steps_in_epoch(clips["train"], hosts, profile.batch_size, job.dealt_over if hosts > 1 else 1)
    steps = min(in_epoch * profile.epochs, profile.max_steps or sys.maxsize)
    step_s = step_seconds(speeds, clips["train"] / in_epoch)
    waiting_s = exchange_bytes = sent = 0.0
    if hosts > 1:
        known = Measured(bytes_s=bytes_s, step_s=step_s, spare_bytes=spare_bytes)
        conditions = Conditions(parameters=speeds[0].trainable, hosts=hosts, steps=steps, measured=known)
        job, _ = chosen(job, conditions)
        config, rounds, round_s = job.strategy_config(steps), steps, step_s + conditions.exchange_s()
        exchange_bytes = conditions.round_bytes()
        if isinstance(config, DiLoCoConfig):
            rounds, round_s = math.ceil(steps / config.H), conditions.round_s(config)
            exchange_bytes = conditions.mean_round_bytes(config)
        waiting_s = rounds * round_s - rounds * config.steps_in_round * step_s
        sent = rounds * exchange_bytes * hosts
    validations = clips.get("validation", 0) / clips["train"] * FORWARD * steps
    models = 1 if FACTS.known(HEARD, {_heard(job): ""}) else 2
    texts = models * clips.get("test", 0) + 2 * clips.get("kept", 0)
    values = (
        before_s + max(speed.start_s for speed in speeds),
        (steps + validations) * step_s + waiting_s,
        speeds[0].start_s + _transcribing(texts, speeds) if texts else 0.0,
    )
    measured = dict(zip(PARTS, values, strict=True))
    return Forecast(
        hosts=tuple(speed.host for speed in speeds),
        strategy=job.distribution.strategy if hosts > 1 else "",
        parts={part: seconds * (ratios or {}).get(part, 1.0) for part, seconds in measured.items()},
        measured=measured,
        step_s=step_s,
        waiting_s=waiting_s,
        exchange_bytes=exchange_bytes,
        sent=sent,
    )


def can_forecast(job: Job, speeds: Sequence[Speed]) -> bool:
    """Tell whether all is known that the whole time of a run needs."""
    is_known = isinstance(job.strategy_config(1), DiLoCoConfig | AllReduceConfig) and bool(speeds)
    hears = job.profile.test or job.keeps
    return is_known and all(speed.sizes for speed in speeds) and bool(speeds[0].clip_s or not hears)


def _transcribing(texts: int, speeds: Sequence[Speed]) -> float:
    """Return the seconds for so many texts: hosts help the master, as much faster or slower as they train."""
    master, *others = speeds
    alone = texts * master.clip_s
    if alone <= WORTH_S or not others:
        return alone
    rates = [master.costs[1] / other.costs[1] for other in others]
    loading = sum(other.start_s * rate for other, rate in zip(others, rates, strict=True))
    return min(alone, (alone + loading) / (1 + sum(rates)))


# What an earlier run took, on the same hosts with the same model.


def key_of(job: Job, hosts: Sequence[Host]) -> str:
    """Name the runs whose times say something of each other's. The first host is this machine, whatever its name."""
    names = [("", hosts[0].device), *((host.address, host.device) for host in hosts[1:])]
    about = [names, job.profile.base_model, job.profile.method, job.distribution.strategy if len(hosts) > 1 else ""]
    return hash_of(json.dumps([*about, job.profile.device]).encode()).hex()


def ratios_of(key: str) -> dict[str, float]:
    found = FACTS.known(RATIOS, {key: ""}).get(key)
    return found if isinstance(found, dict) else {}


def learn(kept: Mapping[str, Any], took: Sequence[float], model: str, test: str | None) -> None:
    """Remember what the parts of a run that has ended took, by what was expected of them."""
    measured = kept["measured"]
    ratios = {part: seconds / measured[part] for part, seconds in zip(PARTS, took, strict=True) if measured[part] > 0}
    likely = {part: ratio for part, ratio in ratios.items() if LIKELY[0] <= ratio <= LIKELY[1]}
    FACTS.keep(RATIOS, {kept["key"]: ""}, {kept["key"]: ratios_of(kept["key"]) | likely})
    heard = f"{model} {test}"
    FACTS.keep(HEARD, {heard: ""}, {heard: True})


def _heard(job: Job) -> str:
    return f"{job.profile.base_model} {job.profile.test}"
