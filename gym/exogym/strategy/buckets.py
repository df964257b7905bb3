"""Gradients in buckets: each is sent in one piece, if possible while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from exogym.flat import FlatParameters, is_finite

MB = 1 << 20
FIRST_BYTES = MB  # of the first bucket at most, so that sending begins early
# What is computed last cannot be hidden: so buckets are to be small. But each costs some round trips between the ranks.
MOST_BUCKETS, LEAST_BYTES, MOST_BYTES = 16, MB, 25 * MB
VALUE_BYTES = 4  # float32


@dataclass(frozen=True)
class Bucket:
    """Some consecutive parameters, and where their values are in a flat."""

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
    """The gradients of one step on their way into `flat` [num_parameters], bucket by bucket.

    While the backward pass runs, a bucket is read and sent, send(bucket), once it and those before it are complete;
    but never the last one. `read_rest` reads what is left afterwards, which its caller sends. From the first value on
    that is not finite, all that is read is zeros.

    sent: how many buckets have been sent. is_finite: whether all values were, until now.
    has_changed: a gradient did, after it had been sent. is_void: what was sent must not be used.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        buckets: list[Bucket],
        flat: Tensor,
        send: Callable[[Bucket], None],
        generation: int,
    ):
        self._parameters, self._buckets, self._flat, self._send = parameters, buckets, flat, send
        self.generation = generation
        self._missing = [set(range(b.parameters.start, b.parameters.stop)) for b in buckets]
        self._bucket_of = {number: at for at, numbers in enumerate(self._missing) for number in numbers}
        self.sent = 0
        self.is_finite, self.has_changed, self.is_void = True, False, False

    @property
    def rest(self) -> list[Bucket]:
        return self._buckets[self.sent :]

    def gradient_came(self, number: int) -> None:
        """Note that the backward pass has added to the gradient of parameter `number`, and send what is complete."""
        at = self._bucket_of[number]
        if at < self.sent:
            self.has_changed = self.is_void = True
            return
        self._missing[at].discard(number)
        while self.sent < len(self._buckets) - 1 and not self._missing[self.sent]:
            bucket = self._buckets[self.sent]
            self._read(bucket.parameters, bucket.values)
            self._send(bucket)
            self.sent += 1

    def read_rest(self) -> None:
        first = self.rest[0]
        self._read(slice(0, first.parameters.stop), slice(0, first.values.stop))

    def not_finite(self) -> None:
        """Note that something that belongs to these gradients is not finite."""
        self.is_void |= self.is_finite and self.sent > 0
        self.is_finite = False

    def _read(self, parameters: slice, values: slice) -> None:
        part = self._flat[values]
        if self.is_finite:
            self._parameters.read_grads(part, parameters)
            if is_finite(part):
                return
            self.not_finite()
        part.zero_()
