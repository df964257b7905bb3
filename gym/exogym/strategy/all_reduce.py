"""Gradients averaged at every step: N ranks train as one process with N times the batch."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from exogym.flat import is_finite
from exogym.strategy.all_reduce_settings import AllReduceConfig
from exogym.strategy.buckets import Bucket, Staging, divide
from exogym.strategy.every_step import EveryStepStrategy
from exogym.strategy.optim import clip
from exogym.strategy.strategy import StepResult

NOT_FINITE = "the gradient is not finite"


class AllReduceStrategy(EveryStepStrategy):
    """The ranks take the mean gradient over all their tokens, clip it, and each makes the same optimizer step.

    Gradients are sent in buckets, all else that ranks have to know with the last one. With `overlap` the others are
    sent while the backward pass still runs; their order and the sums are the same without. What a rank has sent may
    turn out to be wrong, as when a gradient in a later bucket is not finite: then all ranks repeat the exchange.
    A gradient that is None on some ranks counts as zeros there; None on all stays None.
    Holds one CPU flat: the payload [who has a gradient | change of buffers | weight, stopping, repeat | gradients].
    """

    Config = AllReduceConfig
    config: AllReduceConfig
    drifts = ("optimizer",)

    def _start(self, flat: Tensor) -> None:
        super()._start(flat)
        params = self.parameters
        self._weight, self._stopping, self._skipped = 0.0, False, ""
        self._buckets = divide([p.numel() for p in params.parameters], self.config.bucket_mb)
        self._staging: Staging | None = None
        self._background = self.comm.background()
        self._more_to_come = False  # of this step's micro-batches
        watched = params.parameters if self.config.overlap and len(self._buckets) > 1 else []
        came = partial(_gradient_came, weakref.ref(self))  # weak: the model may outlive the run, and must not keep it
        self._hooks = [p.register_post_accumulate_grad_hook(partial(came, n)) for n, p in enumerate(watched)]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._more_to_come = True
        try:
            yield
        finally:
            self._more_to_come = False

    def close(self) -> None:
        self._stop_overlap()
        self._background.close()

    def _stop_overlap(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def local_step(self, weight: float, samples: int) -> StepResult:
        self._weight = weight
        return StepResult()

    def exchange(self, stopping: bool) -> tuple[Tensor, ...] | None:
        """Sum over all ranks what they have in `.grad`; the model stays as it is.

        Returns (gradients, change of buffers, how many ranks have each gradient, total weight, whether to stop), in the
        payload; None for a rank alone.
        """
        self._stopping, self._skipped = stopping, ""
        staging, self._staging = self._staging, None
        if self.comm.world_size == 1:
            return None
        if staging is None or staging.generation != self.comm.generation:
            staging = self._new_staging()
        *sums, (weight, stop, repeat) = self._sum(staging)
        if staging.has_changed:  # as where a checkpointed part of the model is used twice: so it will in each step
            self._stop_overlap()
        if repeat:
            *sums, (weight, stop, _) = self._sum(self._new_staging())
        return *sums, weight, stop > 0

    def apply(self, exchanged: tuple[Tensor, ...] | None, local: StepResult) -> StepResult:
        self.steps += 1
        if exchanged:
            *sums, total, stop = exchanged
            if total > 0:
                self._take_means(*sums, total)
        else:
            total, stop = self._weight, self._stopping
        lr, norm = self.schedule.set(self.steps - 1), None
        if total > 0:
            # Alone there is no copy on the CPU, and gradients are divided as they are clipped.
            scale = 1.0 if exchanged else 1 / total
            norm = clip(self.parameters.parameters, self.config.max_norm, scale=scale)
        if norm is not None and math.isfinite(norm):
            self.optimizer.step()
            if not exchanged:
                self._agreed_buffers = self.parameters.read_buffers()
        else:
            self._skipped = self._skipped if norm is None else NOT_FINITE
            self.parameters.write_buffers(self._agreed_buffers)  # a forward pass that does not count changed them
        return StepResult(lr=lr, grad_norm=norm, agreed=True, stop=stop, skipped=self._skipped)

    def gradient_came(self, number: int) -> None:
        """Note that the backward pass has added to the gradient of parameter `number`."""
        if self._more_to_come or self.comm.world_size == 1:
            return
        if self._staging is None or self._staging.generation != self.comm.generation:
            self._staging = self._new_staging()
        self._staging.gradient_came(number)

    def _new_staging(self) -> Staging:
        payload, *_, grads = self._fields()

        def send(bucket: Bucket) -> None:
            part = self._part(payload, bucket)
            self._background.put(lambda: self.comm.all_reduce_(part))

        return Staging(self.parameters, self._buckets, grads, send, self.comm.generation)

    def _sum(self, staging: Staging) -> tuple[Tensor, Tensor, Tensor, list[float]]:
        """Send the buckets that have not been sent; return gradients, buffers, who has a gradient, and the tail."""
        params, weight = self.parameters, self._weight
        payload, present, buffers, tail, grads = self._fields()
        staging.read_rest()
        # Changes, not values: the mean of N equal values is not always that value, that of N zeros is.
        buffers.copy_(params.read_buffers().sub_(self._agreed_buffers).mul_(weight))
        present.copy_(torch.tensor([p.grad is not None for p in params.parameters]))
        if not is_finite(buffers):
            staging.not_finite()
        if not staging.is_finite:
            self._skipped, weight = NOT_FINITE, 0.0
            payload[: payload.numel() - params.num_parameters + staging.rest[0].values.stop].zero_()
        tail.copy_(torch.tensor([weight, self._stopping, staging.is_void]))
        if staging.sent:
            self._background.wait()
        for bucket in staging.rest:
            self.comm.all_reduce_(self._part(payload, bucket))
        return grads, buffers, present, tail.tolist()

    def _part(self, payload: Tensor, bucket: Bucket) -> Tensor:
        """Return what is sent of `payload` in a bucket: with the last one, which has the first parameter, all else."""
        head = payload.numel() - self.parameters.num_parameters
        first = 0 if bucket is self._buckets[-1] else head + bucket.values.start
        return payload[first : head + bucket.values.stop]

    def _take_means(self, grads: Tensor, buffers: Tensor, present: Tensor, total: float) -> None:
        """Write the means over all ranks into `.grad` and into the buffers, from sums and the total weight."""
        params = self.parameters
        params.write_grads(grads.mul_(1 / total))
        params.write_buffers(self._agreed_buffers.add_(buffers.mul_(1 / total)))
        for p, count in zip(params.parameters, present.tolist(), strict=True):
            p.grad = p.grad if count else None

    def _fields(self) -> tuple[Tensor, ...]:
        """Return the payload and its parts: who has a gradient, buffers, (weight, stopping, repeat), gradients."""
        params = self.parameters
        sizes = [len(params.parameters), params.numel - params.num_parameters, 3, params.num_parameters]
        payload = self._payload(extra=len(params.parameters) + 3)
        return payload, *payload.split(sizes)


def _gradient_came(strategy: weakref.ref[AllReduceStrategy], number: int, _: Tensor) -> None:
    if alive := strategy():
        alive.gradient_came(number)


SimpleReduceStrategy = AllReduceStrategy
