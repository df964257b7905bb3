"""What the stages of a pipeline send each other: activations to the next one, and their gradients back."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from exogym.comm.comm import Background, Comm
from exogym.errors import PeerLost, SettingError
from exogym.flat import TRAINED

MOST_DIMENSIONS = 6
HEADER = 5 + MOST_DIMENSIONS  # float64: loss, weight, whether it is trained, dtype, dimensions, sizes
MOST_VALUES = 2**34
NEXT, BEFORE = 1, -1


class Message(NamedTuple):
    """An activation, or its gradient with the loss and weight of its micro-batch. tensor: None where none is needed."""

    tensor: Tensor | None
    loss: float = 0.0
    weight: float = 0.0


class StageLink:
    """Connects a rank with the stages NEXT to it and BEFORE it.

    `send` returns at once, one thread each way does the rest in order; only `receive` waits. So a stage computes while
    what it has sent travels, and stages that wait for each other never wait in a circle.
    What travels lies flat on the CPU, since gloo takes nothing from mps, and is copied there and back blocking.

    Before each tensor goes its shape, as micro-batches differ in length. torch.distributed.pipelining makes its buffers
    once, for the first micro-batch: with torch 2.13 a longer one aborted the process that received it (EnforceNotMet).
    """

    def __init__(self, comm: Comm, wire: torch.dtype, device: torch.device):
        if comm.device.type != "cpu":
            raise SettingError("a pipeline's stages send through the CPU: make the default group with gloo")
        self.comm, self._wire, self._device = comm, wire, device
        self._ways: dict[int, Background] = {}

    @property
    def is_first(self) -> bool:
        return self.comm.rank == 0

    @property
    def stages_after(self) -> int:
        return self.comm.world_size - self.comm.rank - 1

    def send(self, way: int, tensor: Tensor | None, *, loss: float = 0.0, weight: float = 0.0) -> None:
        about = [0, 0, -1]
        if tensor is not None:
            if tensor.dtype not in TRAINED or tensor.dim() > MOST_DIMENSIONS:
                what = f"{tensor.dtype} with {tensor.dim()} dimensions"
                raise SettingError(
                    f"a stage returned {what}: what goes to the next is float with {MOST_DIMENSIONS} at most"
                )
            about = [tensor.requires_grad, TRAINED.index(tensor.dtype), tensor.dim(), *tensor.shape]
        header = torch.zeros(HEADER, dtype=torch.float64)
        header[: 2 + len(about)] = torch.tensor([loss, weight, *about], dtype=torch.float64)
        flats = [header]
        if tensor is not None and tensor.numel():
            # A copy on the CPU in every case: the sender may go on to change its own.
            flat = tensor.detach().to(self._wire).cpu().reshape(-1).contiguous()
            flats.append((flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat).view(torch.uint8))
        sender = self._ways.setdefault(way, self.comm.background())
        for flat in flats:
            sender.put(partial(self.comm.send, flat, self.comm.rank + way))

    def receive(self, way: int) -> Message:
        """Wait for the next message from there; an activation asks for a gradient if its sender needs one."""
        source = self.comm.rank + way
        header = torch.zeros(HEADER, dtype=torch.float64)
        self.comm.recv(header, source)
        loss, weight, trained, kind, dimensions, *sizes = header.tolist()
        if dimensions < 0:
            return Message(None, loss, weight)
        shape = torch.Size([int(size) for size in sizes[: int(dimensions)]])
        if min(shape, default=0) < 0 or shape.numel() > MOST_VALUES or not 0 <= kind < len(TRAINED):
            raise PeerLost(f"rank {source} sent a tensor of an impossible shape, {list(shape)}")
        flat = torch.empty(shape.numel(), dtype=self._wire)
        if flat.numel():
            self.comm.recv(flat.view(torch.uint8), source)
        tensor = flat.view(shape).to(self._device).to(TRAINED[int(kind)])
        return Message(tensor.requires_grad_(bool(trained)), loss, weight)

    def flush(self) -> None:
        """Wait until all has been received. Raises PeerLost."""
        for sender in self._ways.values():
            sender.wait()

    def close(self) -> None:
        """End the threads, and give up what they are at. May be called twice."""
        for sender in self._ways.values():
            sender.close()
        self._ways.clear()
