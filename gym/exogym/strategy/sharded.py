"""The steps of an optimizer divided among the ranks: ZeRO's first stage (Rajbhandari et al., 1910.02054).

torch's ZeroRedundancyOptimizer is for a process group that stays as it is, and updates weights as it steps, before
ranks have voted. Here groups change, and a step that a lost rank has spoilt is made again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.comm.comm import Comm
from exogym.errors import SettingError
from exogym.flat import FlatParameters, gather

LINE = 16  # float32 values of a cache line: kernels compute the rest of a tensor in another way
BLOCKS, MOST = 64, 1 << 22  # into which parameters are divided at least, if they are many; values in one at most


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of a parameter that lies in a block.

    number: of the parameter. weights: a view of it [n]. of_parameter, of_flat: where it is. group: the number of its
    group in the optimizer.
    """

    parameter: nn.Parameter
    number: int
    weights: Tensor
    of_parameter: slice
    of_flat: slice
    group: int


class ShardedOptimizer:
    """Makes the steps of `optimizer`, block by block; a block is a part of the flat parameters.

    Of N ranks each has consecutive blocks for its own, and keeps the optimizer's state of these. Blocks do not depend
    on N: where ranks come or go, the state of some of them is handed on (state_sync.py), and what only a lost rank had
    begins anew, at zero. The optimizer must treat each value by itself, as Adam and SGD do.

    held: the blocks of which this rank has the state: its own, and until all have come to one state others too.
    lost: the part of the parameters whose state nobody had when the group was formed.
    """

    def __init__(self, optimizer: Optimizer, parameters: FlatParameters, comm: Comm):
        self.optimizer, self._comm = optimizer, comm
        self.held: set[int] = set()
        self.lost = 0.0
        count = parameters.num_parameters
        self._size = LINE * max(1, math.ceil(min(count / BLOCKS, MOST) / LINE))
        self._blocks: list[list[Piece]] = [[] for _ in range(math.ceil(count / self._size))]
        groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        first = 0
        for number, (name, p) in enumerate(zip(parameters.names, parameters.parameters, strict=False)):
            if not p.is_contiguous():
                what = f"shard_optimizer = true needs parameters that are contiguous in memory, and {name} is not"
                raise SettingError(f"{what}: make it so, or set shard_optimizer = false")
            flat, last, at = p.detach().view(-1), first + p.numel(), first
            while at < last:
                block = at // self._size
                end = min(last, (block + 1) * self._size)
                inside = slice(at - first, end - first)
                self._blocks[block].append(Piece(p, number, flat[inside], inside, slice(at, end), groups[p]))
                at = end
            first = last
        self._let_go()

    def __len__(self) -> int:
        return len(self._blocks)

    def owner(self, block: int) -> int:
        return next(rank for rank in range(self._comm.world_size) if block in self._of(rank))

    def _of(self, rank: int) -> range:
        ranks = self._comm.world_size
        return range(rank * len(self) // ranks, (rank + 1) * len(self) // ranks)

    @torch.no_grad()
    def gather_ahead(self, flat: Tensor, has_gradient: list[float]) -> None:
        """Replace in `flat`, the gradients that all ranks have, what is of others' blocks by the weights they come to.

        It changes nothing else: `step` makes this rank's own steps once they count.
        """
        own = self._of(self._comm.rank)
        for turn in range(max(len(self._of(rank)) for rank in range(self._comm.world_size))):
            ahead = torch.zeros(self._size)
            if turn < len(own):
                gather(self._step(own[turn], flat, has_gradient, ahead=True), ahead)
            for rank, theirs in enumerate(self._comm.all_gather(ahead)):
                if rank != self._comm.rank and turn < len(self._of(rank)):
                    place = flat[self._of(rank)[turn] * self._size :][: self._size]
                    place.copy_(theirs[: place.numel()])

    @torch.no_grad()
    def step(self, flat: Tensor | None = None, has_gradient: list[float] | None = None) -> None:
        """Step in this rank's blocks, and take on the weights of the others from `flat`, as gather_ahead left it.

        Without it the gradients are those in `.grad`, for a rank alone.
        """
        own = self._of(self._comm.rank)
        for block, pieces in enumerate(self._blocks):
            if block in own:
                self._step(block, flat, has_gradient, ahead=False)
            elif flat is not None:
                for piece in pieces:
                    piece.weights.copy_(flat[piece.of_flat])
        self.keep_own()
        self.held.update(own)

    def _step(self, block: int, flat: Tensor | None, has_gradient: list[float] | None, *, ahead: bool) -> list[Tensor]:
        """Make the optimizer's step in a block, on copies if it is `ahead`; return the weights of its pieces."""
        state, stepped = self.optimizer.state, []
        for piece in self._blocks[block]:
            weights = piece.weights
            if ahead:
                weights = weights.clone()
                state[weights] = {k: v.clone() for k, v in state.get(piece.weights, {}).items() if v is not None}
            if flat is None or has_gradient is None:
                grad = piece.parameter.grad
                weights.grad = None if grad is None else grad.reshape(-1)[piece.of_parameter]
            else:
                weights.grad = flat[piece.of_flat].to(weights) if has_gradient[piece.number] else None
            self.optimizer.param_groups[piece.group]["params"].append(weights)
            stepped.append(weights)
        self.optimizer.step()
        for weights in stepped:
            weights.grad = None
            if ahead:
                del state[weights]
        self._let_go()
        return stepped

    def _let_go(self) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = []

    # What is kept of a block.

    def block_state(self, block: int) -> list[dict[str, Any]]:
        return [dict(self.optimizer.state.get(piece.weights, {})) for piece in self._blocks[block]]

    def load_block(self, block: int, kept: list[dict[str, Any]]) -> None:
        for piece, values in zip(self._blocks[block], kept, strict=True):
            is_fused = self.optimizer.param_groups[piece.group].get("fused")
            self.optimizer.state[piece.weights] = {  # a step's number stays on the CPU, unless the kernel needs it
                key: value.to(piece.weights.device) if value is not None and (value.ndim or is_fused) else value
                for key, value in values.items()
            }
        self.held.add(block)

    def keep_own(self) -> None:
        """Let go of the state of blocks that are another rank's now."""
        for block in self.held - {*self._of(self._comm.rank)}:
            for piece in self._blocks[block]:
                self.optimizer.state.pop(piece.weights, None)
            self.held.discard(block)

    def state_dict(self) -> dict[int, Any]:
        return {block: self.block_state(block) for block in sorted(self.held)}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        self.optimizer.state.clear()
        self.held = set()
        for block, kept in state.items():
            self.load_block(block, kept)
