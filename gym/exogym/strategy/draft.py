"""The flat that a rank sends, and the weights that come of an exchange until it counts."""

from __future__ import annotations

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.flat import FlatParameters


class Payload:
    """A flat that is sent again and again; a fresh one in each generation of `comm`.

    A peer of an older generation may still write into the one that it had.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        self._flat: Tensor | None = None
        self._generation: int | None = None

    def flat(self, size: int) -> Tensor:
        """Return float32 [size]: zeros, or what was sent last."""
        if self._flat is None or self._generation != self._comm.generation or self._flat.numel() != size:
            self._flat, self._generation = torch.zeros(size), self._comm.generation
        return self._flat


class Draft:
    """The weights as they will be if what ranks are exchanging counts; the model stays as it is until `write`."""

    def __init__(self, parameters: FlatParameters, flat: Tensor | None = None):
        """flat: weights to begin with, instead of those that the model has now; not to be changed."""
        self._parameters = parameters
        self._flat = flat
        self._at: tuple[Tensor, Tensor] | None = None

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

    def read_at(self, indices: Tensor) -> Tensor:
        """Return the weights at sorted int64 indices, float32 on the CPU."""
        if self._at:
            self.set(self.read())
        return self._parameters.read_at(indices) if self._flat is None else self._flat[indices]

    def set(self, flat: Tensor) -> None:
        self._flat, self._at = flat, None

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
