"""A way to bring the ranks' weights together, and what comes of it until ranks have agreed that it counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from exogym.comm.comm import Comm
from exogym.config import check_whole
from exogym.flat import FlatParameters, Weights

NOT_FINITE = "the weights were not finite at the end of the round"


class Exchanged(NamedTuple):
    """The outcome of a module's collectives.

    stop: some rank asked to stop. skipped: why this rank's part did not count.
    """

    result: Any
    stop: bool
    skipped: str = ""


@dataclass(kw_only=True, eq=False)
class CommunicationModule(ABC):
    """One way to bring the ranks' weights together, every `interval` optimizer steps.

    Its fields are its settings; what it keeps is its state.

    agrees: all ranks have the same weights after it; then `apply` writes them to `common`. is_round: its exchanges are
    counted as rounds. is_exact: its state is the same on all ranks, to the bit. is_last: no exchange is planned after
    the one to come.
    stretch: all steps of this rank since its last exchange / those in which it had samples, see Strategy.stretches.
    common_digest: the hash of `common`, where `apply` knows it. optimizer: of this rank's steps, set before `setup`.
    """

    interval: int = 1

    agrees = False
    is_round = True
    is_exact = True
    is_last = False
    stretch = 1.0
    common_digest = cast("int | None", None)  # no annotations: these are no fields
    optimizer = cast("Optimizer | None", None)

    def __post_init__(self) -> None:
        check_whole("interval", self.interval, 1)

    def settings(self) -> dict[str, Any]:
        """Return what a checkpoint records of it: a run is not resumed with others."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def setup(self, comm: Comm, parameters: FlatParameters, common: Any, *, keeps_common: bool) -> None:
        """Begin a run. common: weights that all ranks share, at first those at the start: [numel], or copies.

        keeps_common: this module is the one that may change them, always to the same values on all ranks.
        """
        self.comm, self.parameters, self.common, self.keeps_common = comm, parameters, common, keeps_common

    def begin(self) -> None:  # noqa: B027
        """Read what this rank's next steps may change before the exchange, which may be repeated, is made.

        Another thread may call it while the rank computes its next gradient: so it may not read what that changes, as
        buffers.
        """

    @abstractmethod
    def exchange(self, draft: Draft, samples: int, stopping: bool) -> Exchanged:
        """Run the collectives. It may change nothing but `draft`: it may be repeated, by fewer ranks.

        samples: how many this rank has trained since the last round. stopping: this rank wants to stop.
        """

    def apply(self, result: Any, draft: Draft) -> None:  # noqa: B027
        """Change what the module keeps, now that the exchange counts."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the module keeps, besides `common`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        pass

    def own_state(self) -> dict[str, Any]:
        """Return what it keeps of this rank alone. It is not copied: later exchanges may write over it."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        pass


class Draft:
    """The weights as they will be if what ranks are exchanging counts; the model stays as it is until `write`."""

    def __init__(self, parameters: FlatParameters, weights: Weights | None = None):
        """weights: to begin with, instead of those that the model has now; not to be changed."""
        self._parameters = parameters
        self._flat: Any = weights
        self._at: tuple[Tensor, Tensor] | None = None  # some weights only: where, and which

    def read(self, out: Tensor | None = None) -> Tensor:
        """Return a copy of the weights [numel]."""
        if self._flat is not None:
            return self._flat.clone() if out is None else out.copy_(self._flat)
        out = self._parameters.read(out)
        if self._at:
            out[self._at[0]] = self._at[1]
        return out

    def look(self, room: Tensor) -> Tensor:
        """Return the weights [numel], not to be changed; in `room` if they are those that the model has now."""
        return self.read(room) if self._flat is None else self._flat

    def tensors(self) -> list[Tensor]:
        """Return the weights, each tensor as the model has it, not to be changed; of a draft that has no flat."""
        return self._parameters.tensors() if self._flat is None else self._flat

    def read_at(self, indices: Tensor) -> Tensor:
        """Return the weights at sorted int64 indices, float32 on the CPU."""
        if self._at:
            self.set(self.read())
        return self._parameters.read_at(indices) if self._flat is None else self._flat[indices]

    def set(self, weights: Weights) -> None:
        self._flat, self._at = weights, None

    def set_at(self, indices: Tensor, values: Tensor) -> None:
        if self._at:
            self.set(self.read())
        if self._flat is None:
            self._at = indices, values
        else:
            self._flat[indices] = values

    def write(self) -> None:
        if self._flat is not None:
            self._parameters.write(self._flat)
        elif self._at:
            self._parameters.write_at(*self._at)


class Payload:
    """Room for a flat that is sent again and again; a fresh one in each generation of `comm`.

    A peer of an older generation may still write into the one that it had.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        self._flat: Tensor | None = None
        self._generation: int | None = None

    def flat(self, size: int) -> Tensor:
        """Return float32 [size]: zeros, or what was sent last."""
        if self._flat is None or self._generation != self._comm.generation or self._flat.numel() < size:
            self._flat, self._generation = torch.zeros(size), self._comm.generation
        return self._flat[:size]

    def clear(self) -> None:
        """Let go of the memory until `flat` is called again."""
        self._flat = None
