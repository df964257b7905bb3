"""What a training loop sees of any way to combine the work of several ranks, and the plainest such way."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.comm.comm import Comm
from exogym.config import check_keys
from exogym.errors import SettingError
from exogym.flat import FlatParameters, is_finite, unshared
from exogym.strategy.communication_module import Payload
from exogym.strategy.optim import Schedule, clip, inner_optimizer, named
from exogym.strategy.sharded import ShardedOptimizer
from exogym.strategy.strategy_settings import StrategyConfig
from exogym.strategy.upstream import ALIASES, of_upstream, strategy_settings


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A report of one optimizer step, or of a round's end. `bytes` and `seconds_communicating` are its own.

    agreed: all ranks have made the same exchange, and nothing of it is open: a point to validate or save at. They hold
    the same weights then, unless the strategy `differs`.
    stop: some rank asked to stop and all know it.
    digest: hash of the agreed weights, where ranks are to compare it.
    seconds_travelling: of an exchange that travelled while this rank made steps, waited for or not.
    skipped: why nothing of this rank's counted in this step (a gradient that is not finite); "" if it did.
    """

    lr: float = 0.0
    round: int | None = None
    digest: int | None = None
    bytes: int = 0
    seconds_communicating: float = 0.0
    seconds_travelling: float | None = None
    grad_norm: float | None = None
    agreed: bool = False
    stop: bool = False
    skipped: str = ""


class Strategy:
    """A way to turn the gradients in a model's `.grad` into the next weights, together with the other ranks.

    As it is, it averages gradients at every step. For one of your own, override some of

        _init_node(model, rank, num_nodes)   once, on each rank; may set self.optimizer
        communicate_gradients()              every step; `.grad` is the mean gradient of this rank's samples
        update_parameters()                  every step, once all ranks have communicated

    with the functions of exogym.strategy.communicate. If a rank is lost in communicate_gradients, the others call it
    again from the same gradients: so it must change nothing but `.grad`. A strategy may override `step()` instead, call
    both in it and `super().step()` for the learning rate; then a lost rank ends the run. What is kept from step to step
    belongs into `own_state` (each rank's own) or `agreed_state` (the same on all), or a resumed run lacks it.
    Settings are the fields of `Config`, and no others. Picklable until `setup`.

    The methods below `step` are what the loop calls, for strategies with rounds of several steps. Every rank calls
    `local_step` once for each optimizer step, also one without work (weight 0). When `is_round_due`, at the end of the
    work and when a rank wants to stop, all ranks end their round: they run `exchange` as one joint action
    (Comm.commit_together), and once it counts `apply` what it gave.

    differs: ranks may have other weights after an exchange; then their mean is everybody's at the end of a run.
    divides_model: each rank has another part of the model, so nobody has what another one lacks.
    drifts: the parts of agreed_state that may differ from rank to rank: because each has its own, or computes it with
    arithmetic that differs from machine to machine in the last bit. They are handed to newcomers, and are not compared.
    stretches: ranks with less to do make fewer, larger steps. Where the strategy can tell, their change in a round then
    counts as that of as many steps as the others make.
    samples_in_step: about how many all ranks have together in a step; 0 where it is not known.
    sharded: makes the optimizer's steps where ranks have divided its state among them; None where each has all of it.
    passes_change_weights: a forward or backward pass has changed a parameter, which most leave to the optimizer.
    """

    Config: type[StrategyConfig] = StrategyConfig
    differs: bool = True
    divides_model: bool = False
    stretches: bool = False
    samples_in_step: float = 0.0
    passes_change_weights: bool = False
    sharded: ShardedOptimizer | None = None
    optimizer: Optimizer  # from `setup` on
    drifts: tuple[str, ...] = ("optimizer", "weights")

    def __init__(self, **settings: Any):
        who, known = type(self).__name__, [f.name for f in fields(self.Config)]
        settings = {key: named(value) for key, value in strategy_settings(who, settings, known).items()}
        check_keys(who, settings, known, also=ALIASES)
        self.config = self.Config(**self.Config.usual(settings) | settings)
        self.steps = 0

    def setup(self, model: nn.Module, comm: Comm, total_steps: int) -> None:
        """Take on the model, already on its device. The caller sees to it that ranks start alike (state_sync.py)."""
        self.model, self.comm = model, comm
        self.parameters = FlatParameters(model)
        if not self.parameters.num_parameters and not self.divides_model:
            raise SettingError("the model has no trainable parameters")
        self.optimizer = None  # type: ignore[assignment]  # until one is made: here, or below
        self._init_node(model, comm.rank, comm.world_size)
        if self.optimizer is None:
            self.optimizer = self._make_optimizer()
        self.schedule = Schedule(self.config.schedule_spec(), self.optimizer, total_steps)
        self._sent = Payload(comm)
        self._start(self._read())

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare a rank; `model` is on its device. Where hosts come and go, self.rank and self.num_nodes change."""

    def _make_optimizer(self) -> Optimizer:
        return inner_optimizer(self.config, self.parameters.parameters)

    def _start(self, flat: Tensor) -> None:
        """Keep what the strategy needs of the common first weights [numel]; `flat` is the strategy's own."""
        self._own_grads: Tensor | None = None
        self._norm: float | None = None

    def _read(self, room: Any = None, *, buffers: Tensor | None = None) -> Any:
        """Return a copy of the weights, in `room` if it is given, as the strategy keeps them: a flat, or copies.

        buffers: see FlatParameters.read.
        """
        return self.parameters.read(room, buffers=buffers)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def num_nodes(self) -> int:
        return self.comm.world_size

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients only add up: for all micro-batches of a step but the last."""
        return nullcontext()

    def communicate_gradients(self) -> None:
        """Make `.grad` the mean gradient over all ranks, weighted as the loss is (by target tokens, as a rule)."""
        payload = self._sent.flat(self.parameters.numel + 1)
        self.parameters.read_grads(payload).mul_(self.weight)
        payload[-1] = self.weight
        self.comm.all_reduce_(payload)
        self.parameters.write_grads(payload.mul_(1 / max(payload[-1].item(), 1e-30)))

    def update_parameters(self) -> None:
        """Make one step of the optimizer, unless the gradient is not finite."""
        self._norm = clip(self.parameters.parameters, self.config.max_norm)
        if math.isfinite(self._norm):
            self.optimizer.step()

    def step(self) -> None:
        """Count an optimizer step, and go on to the next learning rate."""
        self.steps += 1
        self.schedule.set(self.steps)

    # What the loop calls.

    def close(self) -> None:
        """Let go of what the run needed, also if it failed. May be called twice."""

    def local_step(self, weight: float, samples: int) -> StepResult:
        """Do what a rank does by itself in an optimizer step. `.grad` holds the sum of weight * d(loss) of its batches.

        weight: the sum of those weights (target tokens, as a rule). samples: how many there were, 0 without work.
        Gradients that are not finite are left out, see StepResult.skipped.
        """
        self.weight, self.samples, self._own_grads = weight, samples, None
        scale, grads = 1 / weight if weight else 0.0, []
        for p in self.parameters.parameters:  # all ranks must make the same calls, whoever has a gradient
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads.append(p.grad)
        torch._foreach_mul_(grads, scale)
        return StepResult(lr=self.schedule.set(self.steps))

    @property
    def is_round_due(self) -> bool:
        """Tell whether the step just made is the last one of a round."""
        return True

    @property
    def has_open_round(self) -> bool:
        """Tell whether there is something left to exchange since the last round's end."""
        return False

    def exchange(self, stopping: bool) -> Any:
        """Run the collectives of a round's end. It changes nothing that it needs again: ranks may have to repeat it.

        stopping: this rank wants to stop; see StepResult.stop for when all do. Raises PeerLost.
        """
        if not self._communicates_in_step:
            if self._own_grads is None:
                self._own_grads = self.parameters.read_grads()
            else:
                self.parameters.write_grads(self._own_grads)
            self.communicate_gradients()
        flag = torch.tensor([float(stopping)])
        self.comm.all_reduce_(flag)
        return flag.item() > 0

    # Where a round's exchange may travel while ranks go on (rounds/round.py).

    @property
    def overlap_steps(self) -> int:
        """The steps that a rank makes meanwhile; 0 where ranks wait for it."""
        return 0

    def begin_exchange(self, arrived: Callable[[Any], None]) -> None:
        """End the round here, and begin its exchange in another thread.

        `exchange` then waits for that one, and `apply` keeps what this rank has trained since. arrived: called in that
        thread with the outcome.
        """
        raise NotImplementedError(f"{type(self).__name__} has overlap_steps, but begins no exchange")

    @property
    def exchange_has_failed(self) -> bool:
        """Tell whether the exchange that was begun is known to have failed."""
        return False

    @property
    def round_end(self) -> int:
        """The step at whose end the present round is due to end."""
        return self.steps + 1

    def about(self, exchanged: Any) -> dict[str, Any]:
        """Return what goes with this rank's vote: the number of the `round`, and whether a stop has `cut_short` it."""
        return {"round": self.steps + 1, "cut_short": False}

    def apply(self, exchanged: Any, local: StepResult) -> StepResult:
        """Take on what the ranks have agreed on. local: of the step that ended the round."""
        self._norm = None
        if self._communicates_in_step:
            before = self.steps
            self.step()
            if self.steps != before + 1:
                raise SettingError(f"{type(self).__name__}.step() must call super().step(), once")
        else:
            self.update_parameters()
            Strategy.step(self)
        finite = self._norm is None or math.isfinite(self._norm)
        skipped = "" if finite else f"the gradient is {self._norm}"
        return StepResult(lr=local.lr, grad_norm=self._norm, agreed=True, stop=exchanged, skipped=skipped)

    @property
    def _communicates_in_step(self) -> bool:
        return type(self).step is not Strategy.step

    def is_drift_check_due(self, *, at_least: bool) -> bool:
        """Tell, after an agreement, whether ranks should compare their weights. at_least: they are needed now."""
        return False

    def consensus(self) -> Tensor:
        """Return the mean of the ranks' weights [numel], the same on all; a joint action. Nothing changes yet."""
        total, count = self._sum_of_finite(self.parameters.read(self.parameters.empty(extra=1)))
        return total.div_(count)

    def _sum_of_finite(self, flat: Tensor) -> tuple[Tensor, float]:
        """Return the sum of `flat` [numel + 1] over the ranks where it is finite, without its last value, which counts
        them, and how many they are.
        """
        if is_finite(flat):
            flat[-1] = 1.0
        else:
            flat.zero_()
        self.comm.all_reduce_(flat)
        return flat[:-1], flat[-1].item()

    def load_weights(self, flat: Tensor) -> None:
        """Take on the agreed weights of another rank, [numel] on the CPU, after an agreement; all else stays."""
        self.parameters.write(flat)

    @property
    def agreements(self) -> int:
        """How often the ranks had agreed at state_dict(): rounds, or steps for a strategy without rounds."""
        return self.steps

    @property
    def cut_short(self) -> bool:
        """Tell whether state_dict() lies inside a round, since a stop made the ranks agree before its end."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return agreed_state and own_state. With them another process goes on bit for bit.

        After a stop it is the state before the ranks were made to agree ahead of time: see `cut_short`.
        """
        return {"agreed": self.agreed_state(), "own": self.own_state()}

    def agreed_state(self) -> dict[str, Any]:
        """Return what all ranks had in common when they last agreed, not copied: enough for a new rank to join.

        "weights" must be in it, a flat or copies: `runs recover` reads them.
        """
        return {
            "steps": self.steps,
            "schedule": self.schedule.state_dict(),
            "optimizer": (self.sharded or self.optimizer).state_dict(),
            "weights": self.agreed_weights(),
        }

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        """Go on from agreed_state, after `setup`. This rank's own state stays, but for its open round: that is void."""
        self.steps = state["steps"]
        self.schedule.load_state_dict(state["schedule"])
        (self.sharded or self.optimizer).load_state_dict(state["optimizer"])
        self.load_weights(state["weights"])

    def own_state(self) -> dict[str, Any]:
        """Return what this rank needs besides, at the same moment, to go on bit for bit."""
        return {}

    def load_own_state(self, state: dict[str, Any], *, inside: bool) -> None:
        """Go on from own_state, after load_agreed_state, on the same rank. inside: also from the part of a round."""

    def agreed_weights(self) -> Tensor:
        """Return the agreed weights [numel] on the CPU, not to be changed."""
        return unshared(self.parameters.read())


class EveryStepStrategy(Strategy):
    """All ranks move equal weights by what all of them have sent.

    Each makes the step on its own device, and devices of another make round differently. So ranks compare their
    weights every `check_interval` steps, before checkpoints and at the end, and take on rank 0's where they differ.
    """

    differs = False
    check_interval: int  # steps from one comparison of weights to the next; 0: only where it has to be

    def _start(self, flat: Tensor) -> None:
        self._agreed_buffers = flat[self.parameters.num_parameters :].clone()

    def is_drift_check_due(self, *, at_least: bool) -> bool:
        return at_least or bool(self.check_interval and self.steps % self.check_interval == 0)

    def load_weights(self, flat: Tensor) -> None:
        self.parameters.write(flat)
        self._agreed_buffers = self.parameters.read_buffers()

    def agreed_weights(self) -> Tensor:
        """Return the agreed weights [numel]. A forward pass that has not counted yet may have changed the buffers."""
        flat = self.parameters.read()
        flat[self.parameters.num_parameters :].copy_(self._agreed_buffers)
        return unshared(flat)


def __getattr__(name: str) -> Any:
    return of_upstream(__name__, name)
