"""What one rank of a run trains, and exogym's trainer where each rank is a machine."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distributed.control.channel import ControlChannel
from distributed.control.messages import send_event
from distributed.hosts.interfaces import Route, route_to
from distributed.plan.run_spec import RunSpec
from exogym.comm.comm import Comm, SingleComm
from exogym.comm.elastic import ElasticComm
from exogym.comm.process_group import ProcessGroupComm
from exogym.comm.relayed_store import RelayedStore
from exogym.errors import PeerLost
from exogym.membership import Generation
from exogym.micro_batches import Memory
from exogym.settings import FitSettings
from exogym.train_node import TrainResult
from exogym.trainer import DataSource, Trainer
from whisper_tuner.errors import HostError

from .peer_probe import PeerProbe

JOIN_S = 120.0  # for the slowest host of a generation to come
COLLECTIVE_S = 3600.0  # gloo's own limit; the launcher knows sooner who is slow, and who is gone


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The work of a rank: what it trains, and how; save(folder, result) writes the trained model."""

    model: nn.Module
    train: DataSource
    validation: DataSource | None
    settings: FitSettings
    save: Callable[[Path, TrainResult], None]


class RankTrainer(Trainer):
    """The trainer of one worker: its ranks are the machines that the launcher calls together."""

    def __init__(
        self,
        spec: RunSpec,
        channel: ControlChannel,
        model: nn.Module,
        train_dataset: DataSource,
        val_dataset: DataSource | None = None,
    ):
        super().__init__(model, train_dataset, val_dataset)
        self.spec, self.channel = spec, channel

    def _build_connection(self, rank: int) -> Comm:
        """One generation of ranks after another, as the launcher's coordinator calls them."""
        comm = ElasticComm(self.spec.name, self.spec.hosts, self.channel.coordinator, send_event, self._join)
        if self.spec.rendezvous:
            probe = PeerProbe(comm.wait, lambda: self._route().address, send_event)
            self.channel.meet = probe.meet
            probe.start()
        return comm

    def _memory(self, device: torch.device, usage: float) -> Memory:
        return Memory.of(device, usage=usage, sharing=self.spec.machine_workers)

    def _route(self) -> Route:
        """The way to the launcher. A Mac may wake in another network. Raises HostError."""
        return route_to(self.channel.meeting or self.spec.rendezvous.address, interface=self.spec.interface or None)

    def _join(self, generation: Generation, rank: int, interrupted: Callable[[], bool]) -> Comm:
        """Form a group with the others, over the interface that reaches the launcher. Raises PeerLost.

        The launcher tells them where each listens; then they prove to each other that they have the run's key.
        """
        if len(generation.members) == 1:
            return SingleComm()
        number, client = generation.number, self.channel.coordinator
        store = RelayedStore(
            lambda key, value: send_event({"type": "set", "generation": number, "key": key, "value": value}),
            lambda key: client.wait_for_told(number, key, JOIN_S),
        )
        key = hmac.digest(bytes.fromhex(self.spec.rendezvous.key), generation.prefix.encode(), "sha256")
        try:
            return ProcessGroupComm(
                store=store,
                address=self._route().address,
                rank=rank,
                world_size=len(generation.members),
                timeout=COLLECTIVE_S,
                key=key,
                interrupted=interrupted,
            )
        except (OSError, HostError) as error:
            raise PeerLost(f"cannot reach the others: {error}") from error

    def rescue(self) -> None:
        """The launcher is gone: keep what ranks last agreed on, for `runs recover`."""
        if self.node:
            self.node.save_agreed()
