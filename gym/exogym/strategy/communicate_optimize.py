"""Ranks that make steps of their own, and any composition of ways to bring their weights together."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from exogym.errors import SettingError
from exogym.flat import Weights, digest, put, unshared
from exogym.strategy.communication_module import CommunicationModule, Draft, Exchanged
from exogym.strategy.optim import clip
from exogym.strategy.strategy import StepResult, Strategy
from exogym.strategy.strategy_settings import StrategyConfig

# Steps in which the learning rate of an inner optimizer without moments rises. Measured on the bundled model, of two
# ranks one new in mid-run: without, the loss was 0.03 to 0.06 higher for six rounds, and hardly at all with it.
RAMP_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class CommunicateOptimizeConfig(StrategyConfig):
    communication_modules: tuple[CommunicationModule, ...] | list[CommunicationModule] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.communication_modules, (tuple, list)) or not self.communication_modules:
            raise SettingError("communication_modules must be a list of one at least, as [AveragingCommunicator()]")
        for module in self.communication_modules:
            if not isinstance(module, CommunicationModule):
                raise SettingError(f"communication_modules must hold objects of CommunicationModule, not {module!r}")

    @property
    def steps_in_round(self) -> int:
        return min(module.interval for module in self.communication_modules)


class Trained(NamedTuple):
    """The samples that a rank has trained, and the steps in which it had any."""

    samples: int = 0
    steps: int = 0


class Outcome(NamedTuple):
    """The outcome of a round's end. by_module: (number of a module, what its collectives gave)."""

    draft: Draft
    by_module: list[tuple[int, Exchanged]]
    stop: bool
    skipped: str


class CommunicateOptimizeStrategy(Strategy):
    """An inner optimizer on each rank's device; after its steps the modules that are due communicate, in their order.

    A module counts its interval from its last exchange. Where one is due after which all ranks agree, the others rest.
    All that are due make one joint action; what is left open at the end of the work is exchanged then. A rank that is
    asked to stop ends its round at once, and waits for the others, who learn of it at their own round's end.
    What it had trained by then is not lost to a resumed run, which goes on inside the round as if nothing had happened.
    Holds on the CPU one flat of weights that ranks share, and what the modules need.
    An inner optimizer that starts anew in the middle of a run, on a host that has just come, has its own short warm-up.
    """

    Config: type[StrategyConfig] = CommunicateOptimizeConfig

    def _modules(self) -> list[CommunicationModule]:
        assert isinstance(self.config, CommunicateOptimizeConfig)
        return [copy.copy(module) for module in self.config.communication_modules]

    def _start(self, flat: Any) -> None:
        self._common = flat
        self.modules = self._modules()
        agreeing = [module for module in self.modules if module.agrees]
        # Of several that agree, one alone changes the common weights: between its turns ranks have others.
        self.differs = len(self.modules) > 1 or not agreeing
        for module in self.modules:
            module.optimizer = self.optimizer
            module.setup(self.comm, self.parameters, flat, keeps_common=not agreeing or module is agreeing[-1])
        self._is_exact = all(module.is_exact for module in self.modules)
        self.drifts = (*(("weights",) if self.differs else ()), *(() if self._is_exact else ("modules",)))
        self._last = [0] * len(self.modules)  # the step of each one's last exchange
        self.rounds = self._agreements = self._agreed_steps = 0
        self._is_new, self._ramp_left = True, 0
        self._trained = [Trained()] * len(self.modules)  # since each one's last exchange
        self._agreed_trained = list(self._trained)
        self._before_stop: dict[str, dict[str, Any]] | None = None
        self._room: Weights | None = None  # for weights that are read, where an earlier exchange left some

    # A step of a rank by itself.

    def local_step(self, weight: float, samples: int) -> StepResult:
        lr, factor = self.schedule.set(self.steps), self._rate_factor(samples)
        if self._ramp_left:
            factor *= 1 - self._ramp_left / (RAMP_STEPS + 1)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        self.steps += 1
        norm = self._inner_step(weight, self._step_weight(weight, samples)) if weight > 0 else None
        self.optimizer.zero_grad()  # an exchange needs the memory
        skipped = "" if norm is None or math.isfinite(norm) else f"the gradient is {norm}"
        counted, worked = 0 if skipped else samples, int(samples > 0)
        self._trained = [Trained(since.samples + counted, since.steps + worked) for since in self._trained]
        return StepResult(lr=lr * factor, grad_norm=norm, skipped=skipped)

    def _rate_factor(self, samples: int) -> float:
        """Return the factor of the learning rate in a step of so many samples."""
        return 1.0

    def _step_weight(self, weight: float, samples: int) -> float:
        """Return what the gradient of a step counts for; 1 is usual. Called once for each step that has work."""
        return 1.0

    def _inner_step(self, weight: float, counts_for: float) -> float:
        """Make a step along `counts_for` times the mean gradient; return the norm of the mean gradient.

        The limit of the norm grows with sqrt(counts_for): noise in a sum grows no faster.
        """
        max_norm = self.config.max_norm and self.config.max_norm * math.sqrt(counts_for)
        norm = clip(self.parameters.parameters, max_norm, scale=counts_for / weight)
        if math.isfinite(norm):
            self.optimizer.step()
            self._is_new, self._ramp_left = False, max(0, self._ramp_left - 1)
        return norm / counts_for

    # When ranks meet. It follows from what they have in common alone: a rank that stops early knows what is due later.

    @property
    def round_end(self) -> int:
        return min(last + module.interval for last, module in zip(self._last, self.modules, strict=True))

    @property
    def is_round_due(self) -> bool:
        return self.steps >= self.round_end

    @property
    def has_open_round(self) -> bool:
        return self.steps > self._agreed_steps or bool(self._left_open())

    def _left_open(self) -> list[int]:
        """Return the modules, by number, that have to bring all to the same weights once the work is at its end."""
        return [n for n, m in enumerate(self.modules) if m.agrees and m.keeps_common and self._last[n] < self.steps]

    def _due(self) -> list[int]:
        """Return the modules, by number, whose interval ends with the next exchange."""
        if self.steps == self._agreed_steps:
            return self._left_open()
        due_at = self.round_end
        return [n for n, module in enumerate(self.modules) if self._last[n] + module.interval == due_at]

    def _taking_part(self) -> list[int]:
        """Return the modules, by number, that run in the next exchange: one after which all agree, or all due."""
        due = self._due()
        return [n for n in due if self.modules[n].agrees][-1:] or due

    @property
    def _is_stretched(self) -> bool:
        """Tell whether a change counts for this rank's steps without work, too.

        With several modules it does not: what another module brings is no step of this rank's own.
        """
        return self.stretches and len(self.modules) == 1

    def _prepare_modules(self) -> list[CommunicationModule]:
        """Return the modules that take part in the next exchange, once they know where in the work they are."""
        taking_part = self._taking_part()
        for n in taking_part:
            # Where the round should end, not where this rank is: one that stops makes fewer steps.
            module, worked = self.modules[n], self._trained[n].steps
            module.is_last = self.round_end >= self.schedule.end
            module.stretch = (self.steps - self._last[n]) / worked if worked and self._is_stretched else 1.0
        return [self.modules[n] for n in taking_part]

    def exchange(self, stopping: bool) -> Outcome:
        for module in self._prepare_modules():
            module.begin()
        return self._exchange(Draft(self.parameters), self._trained, stopping)

    def _exchange(self, draft: Draft, trained: list[Trained], stopping: bool) -> Outcome:
        outcomes = []
        for n in self._taking_part():
            exchanged = self.modules[n].exchange(draft, trained[n].samples, stopping)
            outcomes.append((n, exchanged))
        stop = any(exchanged.stop for _, exchanged in outcomes)
        return Outcome(draft, outcomes, stop, next((e.skipped for _, e in outcomes if e.skipped), ""))

    def about(self, exchanged: Outcome) -> dict[str, Any]:
        return {"round": self._agreements + 1, "cut_short": exchanged.stop}

    def apply(self, exchanged: Outcome, local: StepResult) -> StepResult:
        if exchanged.stop:  # the state in the middle of the round, copied where its forced end will change it
            agreed, own = self.agreed_state(), self.own_state()
            agreed |= {key: copy.deepcopy(agreed[key]) for key in ("last", "modules", "common")}
            weights = agreed["weights"]  # of a list the tensors are not changed any more
            agreed["weights"] = [*weights] if isinstance(weights, list) else copy.deepcopy(weights)
            own["modules"], self._room = copy.deepcopy(own["modules"]), None  # what it had room for is in `own` now
            self._before_stop = {"agreed": agreed, "own": own}
        due, ran = self._due(), [self.modules[n] for n, _ in exchanged.by_module]
        for n, outcome in exchanged.by_module:
            self.modules[n].apply(outcome.result, exchanged.draft)
        steps, trained = self._take_on(exchanged)
        for n in due:
            since, then = self._trained[n], trained[n]
            self._last[n], self._trained[n] = steps, Trained(since.samples - then.samples, since.steps - then.steps)
        self._agreements += 1
        self._agreed_steps = steps
        self._agreed_trained = [Trained() if n in due else since for n, since in enumerate(trained)]
        result = replace(local, agreed=True, stop=exchanged.stop, skipped=local.skipped or exchanged.skipped)
        if any(module.is_round for module in ran):
            self.rounds += 1
            result = replace(result, round=self.rounds)
        keeper = next((module for module in ran if module.agrees and module.keeps_common), None)
        if keeper and self._is_exact:
            known = keeper.common_digest
            result = replace(result, digest=digest(self._common) if known is None else known)
        return result

    def _take_on(self, exchanged: Outcome) -> tuple[int, list[Trained]]:
        """Write the new weights; return the step at which the round ended, and what this rank had trained by then."""
        exchanged.draft.write()
        return self.steps, list(self._trained)

    # What they have in common.

    @property
    def agreements(self) -> int:
        return int(self._before_stop["agreed"]["agreements"]) if self._before_stop else self._agreements

    @property
    def cut_short(self) -> bool:
        return self._before_stop is not None

    def state_dict(self) -> dict[str, Any]:
        """Return agreed_state and own_state; after a stop, as they were before the ranks were made to agree."""
        return self._before_stop or super().state_dict()

    def agreed_state(self) -> dict[str, Any]:
        """Return what all ranks had in common when they last agreed.

        It reads nothing from the device, unless ranks differ: another thread may ask for it.
        """
        if self._before_stop:
            return self._before_stop["agreed"]
        return {
            "steps": self._agreed_steps,
            "rounds": self.rounds,
            "agreements": self._agreements,
            "last": self._last,
            "schedule": self.schedule.state_dict(),
            "modules": [module.state_dict() for module in self.modules],
            "weights": self.agreed_weights(),
            "common": self._common if self.differs else None,
        }

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        self.steps = self._agreed_steps = state["steps"]
        self.rounds, self._agreements, self._last = state["rounds"], state["agreements"], list(state["last"])
        self._ramp_left = RAMP_STEPS if self._is_new and self.steps else self._ramp_left
        self.schedule.load_state_dict(state["schedule"])
        self._take(state["common"] if self.differs else state["weights"])
        for module, kept in zip(self.modules, state["modules"], strict=True):
            module.load_state_dict(kept)
        self.parameters.write(state["weights"])
        self._trained = list(self._agreed_trained)
        self._before_stop = None

    def _take(self, weights: Weights) -> None:
        """Make these the common weights."""
        put(weights, [self._common] if isinstance(self._common, Tensor) else self._common)

    def agreed_weights(self) -> Any:
        """Return the common weights; of ranks that differ, this one's as they are now.

        A copy of what they were when the ranks last agreed would take as much memory again.
        """
        return unshared(self.parameters.read()) if self.differs else self._common

    def consensus(self) -> Tensor:
        if not self._is_exact:
            return super().consensus()
        # Changes, not values: the mean of N equal values is not always that value, that of N zeros is.
        change = self.parameters.read(self.parameters.empty(extra=1))
        change[:-1].sub_(self._common)
        total, count = self._sum_of_finite(change)
        return total.mul_(1 / max(count, 1)).add_(self._common)

    def is_drift_check_due(self, *, at_least: bool) -> bool:
        """Tell whether ranks should compare weights: only where an outer optimizer may compute differently on each."""
        return not self.differs and not self._is_exact

    def load_weights(self, flat: Tensor) -> None:
        if not self.differs:
            self._take(flat)
        self.parameters.write(flat)

    # What is a rank's own.

    def own_state(self) -> dict[str, Any]:
        inside = None  # what this rank has made since the last agreement
        if self.steps != self._agreed_steps:
            weights = None if self.differs else self._read(self._room)
            inside = {"weights": weights, "steps": self.steps - self._agreed_steps, "trained": [*self._trained]}
        return {
            "optimizer": self.optimizer.state_dict(),
            "ramp_left": self._ramp_left,
            "trained": self._agreed_trained,
            "modules": [module.own_state() for module in self.modules],
            "inside": inside,
        }

    def load_own_state(self, state: dict[str, Any], *, inside: bool) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._is_new, self._ramp_left = False, state["ramp_left"]
        self._agreed_trained = [Trained(*since) for since in state["trained"]]
        self._trained = list(self._agreed_trained)
        for module, kept in zip(self.modules, state["modules"], strict=True):
            module.load_own_state(kept)
        if inside and (part := state["inside"]):
            if part["weights"] is not None:
                self.parameters.write(part["weights"])
            self.steps += part["steps"]
            self._trained = [Trained(*since) for since in part["trained"]]
