"""Gradients averaged at every step: N ranks train as one process with N times the batch."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from exogym.flat import FlatParameters, is_finite
from exogym.strategy.all_reduce_settings import AllReduceConfig
from exogym.strategy.communication_module import Payload
from exogym.strategy.optim import clip, clip_gradients
from exogym.strategy.sharded import ShardedOptimizer
from exogym.strategy.strategy import EveryStepStrategy, StepResult

NOT_FINITE = "the gradient is not finite"
MB = 1 << 20
FIRST_BYTES = MB  # of the first bucket at most, so that sending begins early
# What is computed last cannot be hidden: so buckets are to be small. But each costs some round trips between the ranks.
MOST_BUCKETS, LEAST_BYTES, MOST_BYTES = 16, MB, 25 * MB
VALUE_BYTES = 4  # float32


class Sums(NamedTuple):
    """The sums over all ranks: each part is a view of the payload."""

    gradients: Tensor  # [num_parameters]
    buffers: Tensor  # their change [numel - num_parameters]
    present: Tensor  # how many ranks have a gradient of each parameter [parameters]
    weight: float
    stop: bool
    norm: float | None = None  # with shard_optimizer: of the mean gradient, before clipping


class AllReduceStrategy(EveryStepStrategy):
    """The ranks take the mean gradient over all their tokens, clip it, and each makes the same optimizer step.

    Gradients are sent in buckets, all else that ranks have to know with the last one. With `overlap` the others are
    sent while the backward pass still runs; their order and the sums are the same without. What a rank has sent may
    turn out to be wrong, as when a gradient in a later bucket is not finite: then all ranks repeat the exchange.
    A gradient that is None on some ranks counts as zeros there; None on all stays None.
    With `shard_optimizer` each makes it for its part of the weights only, and they hand each other what comes of it.
    Holds one CPU flat: the payload [who has a gradient | change of buffers | weight, stopping, repeat | gradients].
    """

    Config = AllReduceConfig
    config: AllReduceConfig
    drifts = ("optimizer",)

    def _start(self, flat: Tensor) -> None:
        super()._start(flat)
        params = self.parameters.parameters
        self.check_interval = self.config.check_interval
        self._weight, self._stopping, self._skipped = 0.0, False, ""
        if self.config.shard_optimizer:
            self.sharded = ShardedOptimizer(self.optimizer, self.parameters, self.comm)
        self._buckets = divide([p.numel() for p in params], self.config.bucket_mb)
        self._staging: Staging | None = None
        self._background = self.comm.background()
        self._more_to_come = False  # of this step's micro-batches
        watched = params if self.config.overlap and len(self._buckets) > 1 else []
        came = partial(_gradient_came, weakref.ref(self))  # weak: the model may outlive the run, and must not keep it
        self._hooks = [p.register_post_accumulate_grad_hook(partial(came, n)) for n, p in enumerate(watched)]

    def local_step(self, weight: float, samples: int) -> StepResult:
        self._weight = weight
        return StepResult()

    def exchange(self, stopping: bool) -> Sums | None:
        """Sum over all ranks what they have in `.grad`; the model stays as it is. None for a rank alone."""
        self._stopping, self._skipped = stopping, ""
        staging, self._staging = self._staging, None
        if self.comm.world_size == 1:
            return None
        if staging is None or staging.generation != self.comm.generation:
            staging = self._new_staging()
        sums, repeat = self._sum(staging)
        if staging.has_changed:  # as where a checkpointed part of the model is used twice: so it will in each step
            self._stop_overlap()
        sums = self._sum(self._new_staging())[0] if repeat else sums
        return self._step_ahead(self.sharded, sums) if self.sharded else sums

    def _sum(self, staging: Staging) -> tuple[Sums, bool]:
        """Send the buckets that have not been sent; return the sums, and whether some rank has sent what was wrong."""
        params, weight = self.parameters, self._weight
        staging.read_rest()
        # Changes, not values: the mean of N equal values is not always that value, that of N zeros is.
        staging.buffers.copy_(params.read_buffers().sub_(self._agreed_buffers).mul_(weight))
        staging.present.copy_(torch.tensor([p.grad is not None for p in params.parameters]))
        if not is_finite(staging.buffers):
            staging.not_finite()
        if not staging.is_finite:
            self._skipped, weight = NOT_FINITE, 0.0
            for bucket in staging.rest:
                staging.part(bucket).zero_()
        staging.tail.copy_(torch.tensor([weight, self._stopping, staging.is_void]))
        if staging.sent:
            self._background.wait()
        for bucket in staging.rest:
            self.comm.all_reduce_(staging.part(bucket))
        total, stop, repeat = staging.tail.tolist()
        return Sums(staging.gradients, staging.buffers, staging.present, total, stop > 0), repeat > 0

    def _step_ahead(self, sharded: ShardedOptimizer, sums: Sums) -> Sums:
        """Make the step from the sums, and exchange the weights it leads to; the model and the moments stay."""
        if not sums.weight:
            return sums
        self.schedule.set(self.steps)
        sizes, has_gradient = [p.numel() for p in self.parameters.parameters], sums.present.tolist()
        parts = sums.gradients.mul_(1 / sums.weight).split(sizes)
        norm = clip_gradients([g for g, count in zip(parts, has_gradient, strict=True) if count], self.config.max_norm)
        if math.isfinite(norm):
            sharded.gather_ahead(sums.gradients, has_gradient)
        return sums._replace(norm=norm)

    def apply(self, exchanged: Sums | None, local: StepResult) -> StepResult:
        self.steps += 1
        params = self.parameters
        total, stop = (exchanged.weight, exchanged.stop) if exchanged else (self._weight, self._stopping)
        lr, norm = self.schedule.set(self.steps - 1), None
        if exchanged and total > 0:  # from sums to means
            params.write_buffers(self._agreed_buffers.add_(exchanged.buffers.mul_(1 / total)))
            norm = exchanged.norm if self.sharded else self._write_grads(exchanged)
        elif total > 0:  # alone there is no copy on the CPU, and gradients are divided as they are clipped
            norm = clip(params.parameters, self.config.max_norm, scale=1 / total)
        if norm is not None and math.isfinite(norm):
            if self.sharded and exchanged:
                self.sharded.step(exchanged.gradients, exchanged.present.tolist())
            else:
                (self.sharded or self.optimizer).step()
            if not exchanged:
                self._agreed_buffers = params.read_buffers()
        else:
            self._skipped = self._skipped if norm is None else NOT_FINITE
            params.write_buffers(self._agreed_buffers)  # a forward pass that does not count changed them
        return StepResult(lr=lr, grad_norm=norm, agreed=True, stop=stop, skipped=self._skipped)

    def _write_grads(self, sums: Sums) -> float:
        """Make `.grad` the clipped mean, and return its norm before that."""
        params = self.parameters
        params.write_grads(sums.gradients.mul_(1 / sums.weight))
        for p, count in zip(params.parameters, sums.present.tolist(), strict=True):
            p.grad = p.grad if count else None
        return clip(params.parameters, self.config.max_norm)

    # Buckets that leave while the backward pass still runs.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._more_to_come = True
        try:
            yield
        finally:
            self._more_to_come = False

    def gradient_came(self, number: int) -> None:
        """Note that the backward pass has added to the gradient of parameter `number`; send what is complete now."""
        if self._more_to_come or self.comm.world_size == 1:
            return
        if self._staging is None or self._staging.generation != self.comm.generation:
            self._staging = self._new_staging()
        for bucket in self._staging.gradient_came(number):
            self._background.put(partial(self.comm.all_reduce_, self._staging.part(bucket)))

    def _new_staging(self) -> Staging:
        return Staging(self.parameters, self._buckets, self._sent, self.comm.generation)

    def _stop_overlap(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        self._stop_overlap()
        self._background.close()


def _gradient_came(strategy: weakref.ref[AllReduceStrategy], number: int, _: Tensor) -> None:
    if alive := strategy():
        alive.gradient_came(number)


@dataclass(frozen=True)
class Bucket:
    """Some consecutive parameters, and where their values are in a flat: they are sent in one piece."""

    parameters: slice
    values: slice


def divide(sizes: Sequence[int], most_mb: float | None = None) -> list[Bucket]:
    """Put parameters of so many values into buckets, from the last to the first: about the order of backward.

    A parameter is never cut: one that is larger than `most_mb` has a bucket of its own.
    """
    chosen = min(max(sum(sizes) * VALUE_BYTES / MOST_BUCKETS, LEAST_BYTES), MOST_BYTES)
    most_bytes = chosen if most_mb is None else most_mb * MB
    buckets: list[Bucket] = []
    first = last = len(sizes)
    low = high = sum(sizes)
    limit = min(FIRST_BYTES, most_bytes)
    for number in reversed(range(len(sizes))):
        if first < last and (high - low + sizes[number]) * VALUE_BYTES > limit:
            buckets.append(Bucket(slice(first, last), slice(low, high)))
            last, high, limit = first, low, most_bytes
        first, low = number, low - sizes[number]
    return [*buckets, Bucket(slice(first, last), slice(low, high))]


class Staging:
    """The gradients of one step on their way into the payload, bucket by bucket.

    While the backward pass runs, a bucket is read and sent once it and those before it are complete; but never the last
    one. `read_rest` reads what is left afterwards. From the first value on that is not finite, all that is read is
    zeros.

    sent: how many buckets have been sent. is_finite: whether all values were, until now.
    has_changed: a gradient did, after it had been sent. is_void: what was sent must not be used.
    """

    def __init__(self, parameters: FlatParameters, buckets: list[Bucket], sent: Payload, generation: int):
        self._parameters, self._buckets, self.generation = parameters, buckets, generation
        count, numel = len(parameters.parameters), parameters.num_parameters
        sizes = [count, parameters.numel - numel, 3, numel]
        self._payload = sent.flat(sum(sizes))
        # Who has a gradient; the change of buffers; (weight, stopping, repeat).
        self.present, self.buffers, self.tail, self.gradients = self._payload.split(sizes)
        self._missing = [set(range(b.parameters.start, b.parameters.stop)) for b in buckets]
        self._bucket_of = {number: at for at, numbers in enumerate(self._missing) for number in numbers}
        self.sent = 0
        self.is_finite, self.has_changed, self.is_void = True, False, False

    @property
    def rest(self) -> list[Bucket]:
        return self._buckets[self.sent :]

    def part(self, bucket: Bucket) -> Tensor:
        """Return what is sent in a bucket: with the last one, that of the first parameter, all else."""
        head = self._payload.numel() - self.gradients.numel()
        first = 0 if bucket is self._buckets[-1] else head + bucket.values.start
        return self._payload[first : head + bucket.values.stop]

    def gradient_came(self, number: int) -> Iterator[Bucket]:
        """Note that the gradient of parameter `number` has grown; yield each bucket that is to be sent now."""
        at = self._bucket_of[number]
        if at < self.sent:
            self.has_changed = self.is_void = True
            return
        self._missing[at].discard(number)
        while self.sent < len(self._buckets) - 1 and not self._missing[self.sent]:
            bucket = self._buckets[self.sent]
            self._read(bucket.parameters, bucket.values)
            self.sent += 1
            yield bucket

    def read_rest(self) -> None:
        first = self.rest[0]
        self._read(slice(0, first.parameters.stop), slice(0, first.values.stop))

    def not_finite(self) -> None:
        """Note that something that belongs to these gradients is not finite."""
        self.is_void |= self.is_finite and self.sent > 0
        self.is_finite = False

    def _read(self, parameters: slice, values: slice) -> None:
        part = self.gradients[values]
        if self.is_finite:
            self._parameters.read_grads(part, parameters)
            if is_finite(part):
                return
            self.not_finite()
        part.zero_()


SimpleReduceStrategy = AllReduceStrategy
