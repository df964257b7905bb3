"""run(spec): one rank of a run, from its RunSpec to trained weights; alone, or as one of N processes or machines."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import torch

from distributed.control.channel import ControlChannel
from distributed.control.messages import send_event
from distributed.hosts.interfaces import Route, route_to
from distributed.plan.run_spec import CHECKPOINTS, SPEC, RunSpec
from exogym import device as devices
from exogym.comm.comm import Comm, SingleComm
from exogym.comm.elastic import ElasticComm
from exogym.comm.process_group import ProcessGroupComm
from exogym.comm.relayed_store import RelayedStore
from exogym.errors import PeerLost
from exogym.membership import Generation
from exogym.micro_batches import Memory
from exogym.pipeline import StageNode
from exogym.train_node import TrainNode, TrainResult
from exogym.trainer import Trainer
from whisper_tuner.errors import HostError
from whisper_tuner.files import write_atomically

from .load import Events, RankWork, load_bundle, load_whisper
from .micro_batch import RAN_OUT_REMEDY, REMEDY, out_of_memory_told
from .peer_probe import PeerProbe

SMALLER_BATCHES = "Train with smaller batches or a smaller model; close other programs there."
JOIN_S = 120.0  # for the slowest host of a generation to come
COLLECTIVE_S = 3600.0  # gloo's own limit; the launcher knows sooner who is slow, and who is gone


def run(spec: RunSpec, *, events: Events, channel: ControlChannel) -> Callable[[], object]:
    """Be one rank from beginning to end. Returns how to save the trained model, which one rank has to do."""

    def trainer_of(work: RankWork) -> WorkerTrainer:
        if spec.rendezvous and not spec.bundle:
            keep_spec(spec)
        trainer = WorkerTrainer(spec, work, channel)
        channel.rescue = trainer.rescue
        events({"type": "ready"})
        return trainer

    _, save = train(
        spec, events, trainer_of, unsent=channel.unsent, stopped=channel.stopping.is_set, local_rank=spec.rank
    )
    return save


def train(
    spec: RunSpec,
    events: Events,
    trainer_of: Callable[[RankWork], RankTrainer],
    *,
    unsent: Container[str],
    stopped: Callable[[], bool],
    local_rank: int,
) -> tuple[TrainResult, Callable[[], object]]:
    """Load what a rank trains, and train it. Returns the figures, and how to save the trained model.

    unsent: audio that will not come. local_rank: of those on this machine, by which a rank finds its card.
    """
    device = devices.choose(spec.wanted_device, local_rank=local_rank)
    if device.type == "cpu":
        devices.keep_freed_memory()
    if spec.bundle:
        work = load_bundle(spec)
    else:
        events({"type": "phase", "phase": "load"})
        devices.repeat_bits(device)  # not with a model of the user's own: it may have operations that cannot
        with out_of_memory_told(REMEDY, loading=True):
            work = load_whisper(spec, events, unsent, stopped=stopped)
    trainer = trainer_of(work)
    with out_of_memory_told(SMALLER_BATCHES if spec.bundle else RAN_OUT_REMEDY):
        result = trainer.run_rank(spec.rank, work.settings, events=events, should_stop=stopped)
    events(
        {
            "type": "done",
            "steps": result.steps,
            "seconds": result.seconds,
            "stopped": result.stopped,
            "digest": result.digest,
        }
    )
    return result, lambda: work.save(Path(spec.run_dir) / spec.final, result)


def keep_spec(spec: RunSpec) -> None:
    """Write the spec beside the checkpoints: `runs recover` needs it to make a model of them without the master.

    Without the run's key, which is in no file.
    """
    folder = Path(spec.run_dir) / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / f"{quote(spec.name, safe='')}{SPEC}", replace(spec, rendezvous=None).to_json())


class RankTrainer(Trainer):
    """exogym's trainer of one process of a run."""

    def __init__(self, spec: RunSpec, work: RankWork):
        super().__init__(work.model, work.train, work.validation)
        self.spec, self._gather, self._score = spec, work.gather, work.score

    @property
    def _node_class(self) -> Callable[..., TrainNode]:
        return partial(StageNode, gather=self._gather) if self._gather else partial(TrainNode, score=self._score)

    def _memory(self, device: torch.device, usage: float) -> Memory:
        return Memory.of(device, usage=usage, sharing=self.spec.machine_workers)


class WorkerTrainer(RankTrainer):
    """The trainer of a worker: its ranks are the machines that the launcher calls together."""

    def __init__(self, spec: RunSpec, work: RankWork, channel: ControlChannel):
        super().__init__(spec, work)
        self.channel = channel

    def _build_connection(self, rank: int) -> Comm:
        """Connect to one generation of ranks after another, as the launcher's coordinator calls them."""
        comm = ElasticComm(self.spec.name, self.spec.hosts, self.channel.coordinator, send_event, self._join)
        if self.spec.rendezvous:
            probe = PeerProbe(comm.wait, lambda: self._route().address, send_event)
            self.channel.meet = probe.meet
            probe.start()
        return comm

    def _route(self) -> Route:
        """Find the way to the launcher. A Mac may wake in another network. Raises HostError."""
        assert self.spec.rendezvous
        return route_to(self.channel.meeting or self.spec.rendezvous.address, interface=self.spec.interface or None)

    def _join(self, generation: Generation, rank: int, interrupted: Callable[[], bool]) -> Comm:
        """Form a group with the others, over the interface that reaches the launcher. Raises PeerLost.

        The launcher tells them where each listens; then they prove to each other that they have the run's key.
        """
        if len(generation.members) == 1:
            return SingleComm()
        assert self.spec.rendezvous
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
        """Keep what ranks last agreed on, for `runs recover`: the launcher is gone."""
        if self.node:
            self.node.save_agreed()
