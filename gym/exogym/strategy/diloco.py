"""DiLoCo: ranks train alone for H steps, then step together along the average change (Douillard et al., 2311.08105)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from exogym.config import DiLoCoConfig
from exogym.flat import CHUNK, digest, is_finite
from exogym.strategy.exact import ExactAdam, ExactSGD
from exogym.strategy.optim import clip, outer_optimizer, scale_grads
from exogym.strategy.strategy import StepResult, Strategy

# Steps in which the learning rate of an inner optimizer without moments rises. Measured on the bundled model, of two
# ranks one new in mid-run: without, the loss was 0.03 to 0.06 higher for six rounds, and hardly at all with it.
RAMP_STEPS = 20


class DiLoCoStrategy(Strategy):
    """An inner optimizer on each rank's device, an outer one on the CPU, the same on all ranks.

    Rounds end after optimizer steps H, 2H, ...; the last one may be shorter. The pseudo-gradient is the mean of the
    ranks' changes, weighted by the samples that each trained in the round; buffers take the mean itself. A rank that is
    asked to stop ends its round at once and waits for the others, who learn of it at their own round's end.
    What it had trained by then is not lost to a resumed run, which goes on inside the round as if nothing had happened.
    Holds on the CPU: master weights, payload [change | samples | stopping], and the outer optimizer's own (none, unless
    it has momentum). The outer optimizer sees the master weights as pieces of 64 MB, not as the model's tensors.
    An inner optimizer that starts anew in the middle of a run, on a host that has just come, has its own short warm-up.
    Outer optimizers that are given by name take the same steps on every CPU (exact.py). With one of another kind ranks
    compare their weights after each round, and take on rank 0's where they differ.
    """

    Config = DiLoCoConfig
    config: DiLoCoConfig

    def _start(self, flat: Tensor) -> None:
        self._master = flat
        self._pieces = [nn.Parameter(piece) for piece in flat[: self.parameters.num_parameters].split(CHUNK)]
        self.outer = outer_optimizer(self.config, self._pieces)
        self._is_exact = isinstance(self.outer, (ExactSGD, ExactAdam))
        self.drifts = () if self._is_exact else ("outer",)
        self.rounds = self._agreed_steps = 0
        self._is_new, self._ramp_left = True, 0
        self._samples_in_round = 0
        self._before_stop: dict[str, Any] | None = None

    def local_step(self, weight: float, samples: int) -> StepResult:
        lr = self._set_rate()
        self.steps += 1
        norm = self._inner_step(weight) if weight > 0 else None
        skipped = "" if norm is None or math.isfinite(norm) else f"the gradient is {norm}"
        self._samples_in_round += 0 if skipped else samples
        return StepResult(lr=lr, grad_norm=norm, skipped=skipped)

    @property
    def _steps_in_round(self) -> int:
        return self.steps - self._agreed_steps

    @property
    def is_round_due(self) -> bool:
        return self._steps_in_round >= self.config.H

    @property
    def has_open_round(self) -> bool:
        return self._steps_in_round > 0

    def _set_rate(self) -> float:
        lr = self.schedule.set(self.steps)
        if self._ramp_left:
            factor = 1 - self._ramp_left / (RAMP_STEPS + 1)
            for group in self.optimizer.param_groups:
                group["lr"] *= factor
            return lr * factor
        return lr

    def _inner_step(self, weight: float) -> float:
        scale_grads(self.parameters.parameters, 1 / weight)
        norm = clip(self.parameters.parameters, self.config.max_norm)
        if math.isfinite(norm):
            self.optimizer.step()
            self._is_new, self._ramp_left = False, max(0, self._ramp_left - 1)
        return norm

    def about(self, exchanged: tuple[Tensor, float, bool]) -> dict[str, Any]:
        *_, stop = exchanged
        return {"round": self.rounds + 1, "cut_short": stop}

    def apply(self, exchanged: tuple[Tensor, float, bool], local: StepResult) -> StepResult:
        change, total, stop = exchanged
        if stop:
            self._before_stop = self._inside_round()
        self.rounds += 1
        if total > 0:
            self._outer_step(change)
        self.parameters.write(self._master)
        self._agreed_steps, self._samples_in_round = self.steps, 0
        skipped, value = local.skipped or self._skipped, digest(self._master)
        return replace(local, round=self.rounds, digest=value, agreed=True, stop=stop, skipped=skipped)

    def exchange(self, stopping: bool) -> tuple[Tensor, float, bool]:
        """(the ranks' mean change of the weights since the last round [numel], total samples, stop)"""
        payload = self._payload(extra=2)
        change, tail = payload.split([self.parameters.numel, 2])
        samples, self._skipped = self._samples_in_round, ""
        if samples:
            # Changes, not values: the mean of N equal values is not always that value, that of N zeros is.
            self.parameters.read(change).sub_(self._master).mul_(samples)
            if not is_finite(change):
                samples, self._skipped = 0, "the weights were not finite at the end of the round"
        if not samples:
            change.zero_()
        tail.copy_(torch.tensor([samples, stopping]))
        self.comm.all_reduce_(payload)
        total, stop = tail.tolist()
        if total > 0:
            change.mul_(1 / total)
        return change, total, stop > 0

    @torch.no_grad()
    def _outer_step(self, change: Tensor) -> None:
        n = self.parameters.num_parameters
        self._master[n:].add_(change[n:])
        pseudo_gradient = change[:n].neg_()
        for piece, grad in zip(self._pieces, pseudo_gradient.split(CHUNK), strict=True):
            piece.grad = grad
        self.outer.step()

    @property
    def agreements(self) -> int:
        return self._before_stop["agreed"]["rounds"] if self._before_stop else self.rounds

    @property
    def cut_short(self) -> bool:
        return self._before_stop is not None

    def state_dict(self) -> dict[str, Any]:
        return self._before_stop or super().state_dict()

    def agreed_state(self) -> dict[str, Any]:
        return {
            "steps": self._agreed_steps,
            "rounds": self.rounds,
            "schedule": self.schedule.state_dict(),
            "outer": self.outer.state_dict(),
            "master": self._master,
        }

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        self.steps, self.rounds = state["steps"], state["rounds"]
        self._agreed_steps = self.steps
        self._ramp_left = RAMP_STEPS if self._is_new and self.steps else self._ramp_left
        self.schedule.load_state_dict(state["schedule"])
        self._master.copy_(state["master"])
        self.outer.load_state_dict(state["outer"])
        self.parameters.write(self._master)
        self._samples_in_round = 0
        self._before_stop = None

    def agreed_weights(self) -> Tensor:
        return self._master

    def is_drift_check_due(self, *, at_least: bool) -> bool:
        return not self._is_exact

    def load_weights(self, flat: Tensor) -> None:
        self._master.copy_(flat)
        self.parameters.write(self._master)

    def own_state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "ramp_left": self._ramp_left, "inside": None}

    def load_own_state(self, state: dict[str, Any], *, inside: bool) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._is_new, self._ramp_left = False, state["ramp_left"]
        if inside and (part := state["inside"]):
            self.parameters.write(part["weights"])
            self.steps += part["steps"]
            self._samples_in_round = part["samples"]

    def _inside_round(self) -> dict[str, Any]:
        """The state in the middle of a round, copied where its forced end will change it."""
        agreed, own = self.agreed_state(), self.own_state()
        inside = {"weights": self.parameters.read(), "steps": self._steps_in_round, "samples": self._samples_in_round}
        copies = {"master": agreed["master"].clone(), "outer": copy.deepcopy(agreed["outer"])}
        return {"agreed": agreed | copies, "own": own | {"inside": inside}}
