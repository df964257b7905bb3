"""DeMo: each rank sends the largest frequencies of its own momentum (Peng, Quesnelle and Kingma, 2411.19870)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from exogym.flat import is_finite
from exogym.strategy.dct import chunk_batches
from exogym.strategy.demo_settings import DeMoConfig
from exogym.strategy.optim import clip
from exogym.strategy.strategy import EveryStepStrategy, StepResult

DEFAULT_LR = 1e-3


class DeMoStrategy(EveryStepStrategy):
    """Momentum on each rank, of which the largest frequencies are sent at every step, and a step of sign-SGD.

    A rank's residual is what it has not sent: residual = decay * residual + lr * gradient, kept as the DCT of chunks of
    at most [c, c]. Of each chunk the `topk` largest coefficients are sent and taken out, all of a smaller one. Weights
    move by lr along the sign of the ranks' mean, weighted as the loss is (the paper's code takes the mean over those
    ranks that sent a coefficient). A rank without work, or with a gradient that is not finite, sends nothing and keeps
    its residual: what it could send would have the weight of no tokens.

    Of a full chunk each of N ranks sends (N-1) * topk * (4 + 1, 2 or 4 for an index) bytes; with AllReduce it is
    2 * (N-1) / N * 4 * c * c. With c = 64, topk = 32 and N = 4 that is 576 bytes, and 24,576: 43 times as much.
    Where devices round differently a sign may turn.
    Holds on the device the residual, and the one of the step that ranks have not voted on yet.
    """

    Config = DeMoConfig
    config: DeMoConfig
    drifts = ()

    def _make_optimizer(self) -> Optimizer:
        """Return an optimizer that never steps: the schedule sets its learning rate, which is DeMo's."""
        return SGD(self.parameters.parameters, lr=DEFAULT_LR if self.config.lr is None else self.config.lr)

    def _start(self, flat: Tensor) -> None:
        super()._start(flat)
        params, config = self.parameters, self.config
        self.check_interval = config.check_interval
        self._batches = chunk_batches(params.parameters, config.compression_chunk)
        self._counts = [min(batch.values, config.compression_topk) for batch in self._batches]  # of a chunk
        self._residuals = [batch.zeros() for batch in self._batches]
        self._next = [batch.zeros() for batch in self._batches]
        self._weight, self._lr = 0.0, 0.0
        self._message: _Message | None = None

    def local_step(self, weight: float, samples: int) -> StepResult:
        self._weight, self._lr, self._message = weight, self.schedule.set(self.steps), None
        if not weight:
            return StepResult(lr=self._lr)
        norm = clip(self.parameters.parameters, self.config.max_norm, scale=1 / weight)
        skipped = "" if math.isfinite(norm) else f"the gradient is {norm}"
        if not skipped and not is_finite(self.parameters.read_buffers()):
            skipped = "a buffer is not finite"
        self._weight = 0.0 if skipped else weight
        return StepResult(lr=self._lr, grad_norm=norm, skipped=skipped)

    def exchange(self, stopping: bool) -> list[_Message]:
        """Return the messages of all ranks. This rank's own, and its next residual, are made once in a step."""
        if self._message is None:
            self._message = self._compress() if self._weight else self._empty_message()
        self._message.head[1] = stopping
        return [self._message.unpacked(data) for data in self.comm.all_gather(self._message.packed())]

    def apply(self, exchanged: list[_Message], local: StepResult) -> StepResult:
        self.steps += 1
        if self._weight:
            self._residuals, self._next = self._next, self._residuals
        total = sum(message.weight for message in exchanged)
        if total > 0:
            shares = [message.weight / total for message in exchanged]
            if len(exchanged) == 1:
                self._agreed_buffers = self.parameters.read_buffers()
            else:
                for message, share in zip(exchanged, shares, strict=True):
                    self._agreed_buffers.add_(message.buffers, alpha=share)
            self._move(exchanged, shares)
        self.parameters.write_buffers(self._agreed_buffers)  # a forward pass has changed the model's
        self._message = None
        return replace(local, agreed=True, stop=any(message.is_stopping for message in exchanged))

    @torch.no_grad()
    def _compress(self) -> _Message:
        """Return this rank's message, and make the residual that it keeps if the step counts."""
        params = self.parameters
        grads = [p.grad for p in params.parameters]
        chosen = [self._choose(number, grads) for number in range(len(self._batches))]
        head = torch.tensor([self._weight, 0.0], dtype=torch.float64)
        # Changes, not values: the mean of N equal values is not always that value, that of N zeros is.
        buffers = params.read_buffers().sub_(self._agreed_buffers)
        has_grad = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8)
        values, indices = zip(*chosen, strict=True)
        return _Message([head, buffers, *values, *indices, has_grad])

    def _choose(self, number: int, grads: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the k largest coefficients of each chunk of a batch: values and indices [chunks, k] on the CPU.

        The next residual becomes residual * decay + lr * DCT(gradient), without what is sent. Of equally large
        coefficients another device may choose others: that does not matter, since each rank chooses its own. A
        parameter without gradient sends zeros and keeps its residual, as a rank without work does.
        """
        batch, residual, following = self._batches[number], self._residuals[number], self._next[number]
        torch.mul(residual, self.config.compression_decay, out=following).add_(batch.encode(grads), alpha=self._lr)
        indices = following.abs().topk(self._counts[number], sorted=False).indices
        values = following.gather(1, indices)
        following.scatter_(1, indices, 0.0)
        for piece in batch.pieces:
            if grads[piece.tensor] is None:
                values[piece.chunks] = 0.0
                following[piece.chunks] = residual[piece.chunks]
        return values.cpu(), indices.cpu().to(_index_type(batch.values))

    def _empty_message(self) -> _Message:
        """Return the message of a rank without work: as long as the others', and all zeros."""
        batches = list(zip(self._batches, self._counts, strict=True))
        values = [torch.zeros(batch.size, count) for batch, count in batches]
        indices = [torch.zeros(batch.size, count, dtype=_index_type(batch.values)) for batch, count in batches]
        has_grad = torch.zeros(len(self.parameters.parameters), dtype=torch.uint8)
        head, buffers = torch.zeros(2, dtype=torch.float64), torch.zeros_like(self._agreed_buffers)
        return _Message([head, buffers, *values, *indices, has_grad])

    @torch.no_grad()
    def _move(self, messages: Sequence[_Message], shares: Sequence[float]) -> None:
        """Step along the sign of the mean. A parameter without gradient on any rank stays; it does not even decay."""
        params = self.parameters.parameters
        used = torch.stack([message.has_grad for message in messages]).any(0).tolist()
        decaying: list[Tensor] = [p for p, is_used in zip(params, used, strict=True) if is_used and p.ndim >= 2]
        if self.config.weight_decay and decaying:
            torch._foreach_mul_(decaying, 1 - self._lr * self.config.weight_decay)
        for number, batch in enumerate(self._batches):
            signs = batch.decode(self._mean(number, messages, shares)).sign_()
            for part, sign in batch.parts(signs, params):
                part.sub_(sign, alpha=self._lr)

    def _mean(self, number: int, messages: Sequence[_Message], shares: Sequence[float]) -> Tensor:
        """Return the ranks' mean coefficients [chunks, values] of batch `number`, added up in the order of ranks."""
        batch = self._batches[number]
        mean = batch.zeros()
        for message, share in zip(messages, shares, strict=True):
            if share:
                indices = message.indices[number].to(batch.device, torch.int64)
                mean.scatter_add_(1, indices, message.values[number].to(batch.device) * share)
        return mean

    def agreed_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "schedule": self.schedule.state_dict(), "weights": self.agreed_weights()}

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        self.steps, self._weight, self._message = state["steps"], 0.0, None
        self.schedule.load_state_dict(state["schedule"])
        self.load_weights(state["weights"])

    def own_state(self) -> dict[str, Any]:
        return {"residuals": self._residuals}

    def load_own_state(self, state: dict[str, Any], *, inside: bool) -> None:
        for residual, saved in zip(self._residuals, state["residuals"], strict=True):
            residual.copy_(saved)


class _Message:
    """The tensors that one rank sends in a step. Their sizes depend on the model and the settings alone.

    head: float64 [weight, stopping]. buffers: their change, float32 [buffers]. values, indices: the coefficients of
    each batch, float32 and the smallest integers that do [chunks, k]. has_grad: uint8 [parameters].
    """

    def __init__(self, tensors: list[Tensor]):
        self._tensors = tensors  # the widest types first: then each begins where its type may
        self.head, self.buffers, *coefficients, self.has_grad = tensors
        half = len(coefficients) // 2
        self.values, self.indices = coefficients[:half], coefficients[half:]

    @property
    def weight(self) -> float:
        return self.head[0].item()

    @property
    def is_stopping(self) -> bool:
        return self.head[1].item() > 0

    def packed(self) -> Tensor:
        """Return all of it as bytes, uint8 [bytes]."""
        return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in self._tensors])

    def unpacked(self, data: Tensor) -> _Message:
        """Return another rank's message, from its bytes."""
        parts = zip(data.split([own.nbytes for own in self._tensors]), self._tensors, strict=True)
        return _Message([part.view(own.dtype).view(own.shape) for part, own in parts])


def _index_type(count: int) -> torch.dtype:
    """Return the smallest integer type for numbers below `count`."""
    return next(kind for kind in (torch.uint8, torch.int16, torch.int32) if count - 1 <= torch.iinfo(kind).max)
