"""What a DiLoCo run does where its profile leaves it open: by the payload, the slowest link, and the time of a step."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

from exogym.strategy import (
    AllReduceConfig,
    DiLoCoConfig,
    FedAvgConfig,
    ParameterServerConfig,
    PipelineConfig,
    SPARTADiLoCoConfig,
    StrategyConfig,
)
from whisper_tuner.data.steps import worked_part
from whisper_tuner.text import counted, size

from .job import Job

WIRE_BYTES = {"float32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}  # of a value
HOME_NETWORK = 12.5e6  # bytes a second, which is 100 Mbit/s; assumed where nothing was measured
STEP_S = 0.5  # assumed likewise
SMALL = 0.01  # of a round: an exchange that takes less need be neither smaller nor hidden
SPARE = 1.25  # an exchange is given the steps that it takes by the measured rate, and a quarter more
# Of a round's steps, beside which an exchange may travel: what is older is worth less. Rounds get longer beyond it.
HIDDEN = Fraction(7, 10)
FEWEST_ROUNDS = 20  # of a run whose rounds are made longer
TOLD_WAITING = 0.1  # of the time
# Rounds in which each second moment is sent once, at first and later; and how many are sent at once at first. They are
# those of exogym/strategy/moments.py, which needs torch.
OFTEN, EVERY, FEW = 4, 16, 2**20
BY_THE_STEP = ("share_moments", "scale_lr", "weigh_steps")  # switches, whatever links and steps are like
# Memory that strategies take beside what DiLoCo takes for plain averaging, which whisper_tuner.model.memory counts.
# Of a trained parameter in a checkpoint: the common value and this rank's, AdamW's moments, the strategy's own.
CHECKPOINT_BYTES = 28
# Bytes for each trained parameter, from peaks of two ranks with a random whisper-tiny that saved after each exchange.
# Plain averaging and SPARTA took 37 of them, outer momentum 45, Adam 53; the server with momentum 55, with Adam 66;
# islands 42, SPARTA-DiLoCo with outer momentum 50. Two bare ranks with the decoder of whisper-tiny took 38 to 43 for
# plain averaging. Two bare ranks of 38 linear layers took 40 to 46 for plain averaging, 39 to 50 with share_moments, 47
# to 60 with overlap_steps, 50 to 61 with both, 65 to 73 with wire = int8 as well; 54 to 63 with int8 or bf16 alone.
OUTER_STATE = 8  # a number of the outer optimizer, and its copy while a checkpoint is written
SERVER = 10  # new weights and new numbers of its outer optimizer, until they count
ROUNDED = 20  # what was not sent yet, its copy in a checkpoint, and room for both with the sum of the next exchange
# A rank's weights at the end of a round, while its exchange travels beside the steps' gradients, whose room stays; and
# what it has made since with a copy, while a checkpoint is written.
IN_FLIGHT = 16
MOMENTS = 8  # own and mean second moments, a quarter of them, while they are summed, and what they leave in the heap
DRAFT = 5  # own weights beside those that ranks share
ALONE = -17  # nothing is kept to be sent, and checkpoints are far apart: 8 of the optimizer and 12 of a copy, and gaps
# AllReduce has one flat of gradients; DiLoCo lets go of gradients before an exchange, and of what it has sent after it.
# By `memory_choices.py` they took 31 and 33, tiny and base.
ALL_REDUCE, AVERAGING = -10, -8
# Gradients in bf16 are 2, and there are flats of 8 or, alone, 4 while a checkpoint is written; by `memory_choices.py`.
LOW_MEMORY, LOW_MEMORY_ALONE = -31, -38
# DiLoCo with plain averaging exchanges such weights in pieces: common weights are 2, and so are gradients or, when
# those are gone, the new weights. What is left unsent stays in float32, with room for sums; a snapshot is in bf16.
IN_PIECES, ROUNDED_PIECES, IN_FLIGHT_PIECES = -37, 12, 6
# With shard_optimizer checkpoints are written without a copy, before the next gradient; ADAM is divided by the ranks.
SHARDED, ADAM = -34, 8
PLAIN = DiLoCoConfig()  # it sends a float of each parameter, as AllReduce does in each step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a run's hosts; None where something is not known.

    bytes_s: of the slowest link. step_s: seconds of a step, the same for all. spare_bytes: of memory, beyond what
    the profile as it is written takes, on the host that has least. room_bytes: all that `device` has for one machine
    that trains alone.
    """

    device: str = "cpu"
    room_bytes: float | None = None
    bytes_s: float | None = None
    step_s: float | None = None
    spare_bytes: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """parameters: that are trained. steps: of each host, in the whole run."""

    parameters: int
    hosts: int
    steps: int
    measured: Measured

    @property
    def bytes_s(self) -> float:
        return self.measured.bytes_s or HOME_NETWORK

    @property
    def step_s(self) -> float:
        return self.measured.step_s or STEP_S

    def of_worked_steps(self, job: Job) -> Conditions:
        """Return the conditions with the mean time of a step, where hosts have no clips in some: these take no time."""
        if not self.measured.step_s:
            return self
        part = worked_part(self.hosts, job.profile.batch_size, job.dealt_over)
        measured = dataclasses.replace(self.measured, step_s=part * self.measured.step_s)
        return dataclasses.replace(self, measured=measured)

    def round_bytes(self, config: DiLoCoConfig = PLAIN, *, moments_in: int = EVERY) -> float:
        """Return the bytes that each host sends in a round; they do not grow with the number of hosts.

        moments_in: exchanges in which each second moment is sent once, fewer in the first rounds.
        """
        a_parameter = WIRE_BYTES[config.wire] + (1 / moments_in if config.share_moments else 0.0)
        return 2 * (self.hosts - 1) / self.hosts * self.parameters * a_parameter

    def mean_round_bytes(self, config: DiLoCoConfig) -> float:
        """Return the mean over the rounds of a run: second moments are sent oftener in the first ones."""
        rounds = max(1, math.ceil(self.steps / config.H))
        first = min(rounds, EVERY) * self.round_bytes(config, moments_in=self._moments_at_first)
        return (first + max(0, rounds - EVERY) * self.round_bytes(config)) / rounds

    @property
    def _moments_at_first(self) -> int:
        return min(OFTEN, max(1, math.ceil(self.parameters / FEW)))

    def exchange_s(self, config: DiLoCoConfig = PLAIN) -> float:
        return self.round_bytes(config) / self.bytes_s

    def longest_s(self, config: DiLoCoConfig) -> float:
        return self.round_bytes(config, moments_in=self._moments_at_first) / self.bytes_s

    def waiting(self, config: DiLoCoConfig) -> float:
        """Return the part of the time that hosts wait for the link."""
        return 1 - config.H * self.step_s / self.round_s(config)

    def round_s(self, config: DiLoCoConfig) -> float:
        """Return the seconds of a round, with what hosts wait for the link."""
        return config.H * self.step_s + max(0.0, self.exchange_s(config) - config.overlap_steps * self.step_s)


def chosen(job: Job, conditions: Conditions) -> tuple[Job, str]:
    """Return the job with what was open in it, and a line that says what its rounds are like; '' if it has none.

    What the profile sets stays.
    """
    if job.distribution.strategy != "diloco" or conditions.hosts == 1:
        return job, ""
    config = job.strategy_config(conditions.steps)
    assert isinstance(config, DiLoCoConfig)
    conditions = conditions.of_worked_steps(job)
    step_s, spare = conditions.step_s, conditions.measured.spare_bytes
    counted = more_bytes(config, conditions.hosts)  # in what is spare

    def takes(**settings: Any) -> None:
        """Set what is open, if the memory is there."""
        nonlocal config
        names = {"H": "communication_interval"}
        free = {key: value for key, value in settings.items() if names.get(key, key) in open_settings(job)}
        wanted = dataclasses.replace(config, **free)
        more = (more_bytes(wanted, conditions.hosts) - counted) * conditions.parameters
        if spare is None or more <= max(0, spare):
            config = wanted

    def is_small() -> bool:
        return conditions.longest_s(config) <= SMALL * config.H * step_s

    def steps_in(seconds: float) -> int:
        """Return how many steps are made while an exchange takes so long."""
        return math.ceil(SPARE * seconds / step_s) + 1

    takes(weigh_steps=True)  # docs/strategies.md has what was measured
    if config.inner_optim in ("adam", "adamw"):
        takes(share_moments=True)
        takes(scale_lr=True)
    if not is_small():
        takes(wire="int8")
    if not is_small():
        if math.ceil(steps_in(conditions.longest_s(config)) / HIDDEN) > config.H:
            takes(wire="int4")
        usual = steps_in(conditions.exchange_s(config))
        takes(H=max(config.H, min(math.ceil(usual / HIDDEN), conditions.steps // FEWEST_ROUNDS)))
        takes(overlap_steps=min(usual, config.H - 1))
    found = {name: str(getattr(config, name)).lower() for name in BY_THE_STEP}
    found |= {"wire": config.wire, "overlap_steps": str(config.overlap_steps)} | job.strategy_settings
    distribution = dataclasses.replace(job.distribution, communication_interval=config.H)
    job = dataclasses.replace(job, distribution=distribution, strategy_settings=found)
    return job, _told(config, conditions)


def open_settings(job: Job) -> set[str]:
    """Return the keys that are chosen when the job starts on several hosts."""
    if job.distribution.strategy != "diloco":
        return set()
    return {"communication_interval", "wire", "overlap_steps", *BY_THE_STEP} - set(job.origin)


def may_choose(job: Job, hosts: int) -> bool:
    """Tell whether the time of a step would decide anything."""
    return hosts > 1 and bool(open_settings(job) - set(BY_THE_STEP))


def _told(config: DiLoCoConfig, conditions: Conditions) -> str:
    measured, exchange_s = conditions.measured, conditions.exchange_s(config)
    round_s = f"{config.H * conditions.step_s:.1f} s{'' if measured.step_s else ' (assumed)'}"
    rate = f"{conditions.bytes_s * 8e-6:.0f} Mbit/s{'' if measured.bytes_s else ' (assumed)'}"
    bytes_sent = size(conditions.mean_round_bytes(config))
    sent = f"in each a host sends {bytes_sent} as {config.wire}, {exchange_s:.1f} s at {rate}"
    parts = [f"rounds of {counted(config.H, 'step')}, {round_s}; {sent}"]
    if config.overlap_steps:
        parts[0] += f", during {counted(config.overlap_steps, 'step')} of training"
    if config.share_moments:
        parts.append("hosts share Adam's second moments")
    if config.scale_lr:
        parts.append("the less of a batch a host has, the larger its learning rate (scale_lr)")
    if config.weigh_steps:
        parts.append("a step counts by how much text it has (weigh_steps)")
    if (waiting := conditions.waiting(config)) > TOLD_WAITING:
        parts.append(f"they wait {100 * waiting:.0f} % of the time for the link: method = lora sends less")
    return "; ".join(parts)


def more_bytes(config: StrategyConfig, ranks: int) -> int:
    """Return the bytes for each trained parameter at the peak, beyond TRAINED_BYTES; below 0 where it takes less."""
    is_low = config.inner_optim == "low_memory"
    if isinstance(config, PipelineConfig) or (ranks == 1 and isinstance(config, AllReduceConfig)):
        return LOW_MEMORY_ALONE if is_low else ALONE
    if isinstance(config, AllReduceConfig) and config.shard_optimizer:
        return SHARDED + math.ceil(ADAM / ranks)
    if isinstance(config, AllReduceConfig) and not is_low:
        return ALL_REDUCE
    averages = isinstance(config, DiLoCoConfig) and type(config) is DiLoCoConfig and config.is_plain
    in_pieces = is_low and averages
    found = IN_PIECES if in_pieces else LOW_MEMORY if is_low else 0
    if isinstance(config, DiLoCoConfig):
        states = 2  # numbers of each parameter: Adam's; another may keep fewer
        if config.outer_optim == "sgd":
            states = int(bool(config.outer_momentum))
        if states:
            found += OUTER_STATE * states + (SERVER if isinstance(config, ParameterServerConfig) else 0)
        if config.wire != "float32":
            found += ROUNDED_PIECES if in_pieces else ROUNDED
        if config.overlap_steps and ranks > 1:
            found += IN_FLIGHT_PIECES if in_pieces else IN_FLIGHT
        if config.share_moments and ranks > 1:
            found += MOMENTS
        if averages and not found:
            found = AVERAGING
    in_islands = isinstance(config, FedAvgConfig) and config.island_size is not None
    return found + (DRAFT if in_islands or isinstance(config, SPARTADiLoCoConfig) else 0)
