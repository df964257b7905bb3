"""A model in parts, as one that no rank could hold: rank r has stage r, and activations go from stage to stage."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate as running_sum
from typing import Any

import torch
from torch import Tensor, nn

from exogym import device as devices
from exogym.comm.comm import Comm
from exogym.comm.stage_link import BEFORE, NEXT, StageLink
from exogym.errors import NodeFailed, PeerLost, SettingError, StageLost
from exogym.logger import Events
from exogym.micro_batches import Forward, StepWork, loss_of
from exogym.samplers.batches import Batch, BatchSource, DatasetSamples, count_samples, sample_ids
from exogym.samplers.elastic import SharedSampler
from exogym.settings import FitSettings
from exogym.state.state_sync import receive_state, send_state
from exogym.strategy.pipeline import PipelineStrategy
from exogym.strategy.strategy import Strategy
from exogym.train_node import TrainNode, TrainResult
from exogym.trainer import DataSource, LaunchedTrainer, LocalTrainer, Trainer

WIRES = {"bf16": torch.bfloat16, "float32": torch.float32}
PASSES = 4  # micro-batches of a step for each stage, so that a fifth of the time at most is waiting (1811.06965)
SENT_AHEAD = 4  # activations that wait for the next stage in a validation
RESUME = "a pipeline ends with any of its stages, and can be resumed from the newest step that all of them have saved"


class StageForward(Forward):
    """A rank's stage between the one before, whose activation it receives, and the next, to which it sends its own."""

    def __init__(self, stage: nn.Module, device: torch.device, precision: str, link: StageLink):
        super().__init__(stage, device, precision)
        self.link, self._sent = link, 0

    def compute(self, batch: Batch) -> tuple[Tensor | None, Any]:
        """Return what came from the stage before, and what this one makes of it: the loss, if it is the last."""
        came = None if self.link.is_first else self.link.receive(BEFORE).tensor
        batch = self.on_device(batch)
        with devices.autocast(self._device, self._precision):
            made = self._model(batch) if came is None else self._model(came, batch)
        if not self.link.stages_after:
            return came, loss_of(made)
        if not isinstance(made, Tensor):
            raise SettingError(f"a stage returned {type(made).__name__}: what goes to the next is one tensor")
        return came, made

    def __call__(self, batch: Batch) -> tuple[Tensor, float, int]:
        """Return (mean loss, weight, samples) of a validation; all but the last stage have a weight of 0."""
        samples = count_samples(batch)
        _, made = self.compute(batch)
        if not self.link.stages_after:
            loss, weight = made
            return loss, float(samples if weight is None else weight), samples
        self.link.send(NEXT, made)
        self._sent += 1
        if self._sent % SENT_AHEAD == 0:
            self.link.flush()
        return torch.zeros(()), 0.0, samples


class StageNode(TrainNode):
    """Trains one stage of a model, as rank `comm.rank` of as many as there are stages.

    The first stage is called as `stage(batch)`, others as `stage(activation, batch)`. Each returns an activation, a
    float tensor [...], and the last one the loss as TrainNode's model does. All ranks read the same batches, and rank 0
    tells of them. A lost rank ends the run with StageLost.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        strategy: Strategy,
        train: BatchSource,
        settings: Any,
        *,
        gather: Callable[[Comm], None] = lambda comm: None,
        **about: Any,
    ):
        """gather: called on all ranks at the end, to bring together what they have trained."""
        if not isinstance(strategy, PipelineStrategy):
            raise SettingError(f"a model in stages is trained by PipelineStrategy, not by {type(strategy).__name__}")
        self.stages = strategy.stages = comm.world_size
        self._gather = gather
        super().__init__(model, comm, strategy, train, settings, **about)
        self.link = StageLink(comm, WIRES[strategy.config.wire], self.device)
        self.stage = StageForward(model, self.device, settings.precision, self.link)
        self.forward = self.validation.forward = self.stage

    def run(self) -> TrainResult:
        try:
            return super().run()
        except PeerLost as error:
            raise StageLost(f"{RESUME} ({error})") from error
        finally:
            self.link.close()

    def sync_state(self) -> tuple[int, bool]:
        if self.state.has_synced or self.comm.world_size != self.stages:
            if not self.state.has_synced and self.should_stop():
                raise StageLost("stopped before all stages of the model were here: nothing has been trained since")
            raise StageLost(f"{RESUME} ({self.comm.world_size} of {self.stages} are here)")
        return super().sync_state()

    def _train(self) -> bool:
        stopped, state = super()._train(), self.state
        if not stopped and self.settings.keep_best and state.best_weights is not None:
            self.strategy.parameters.write(state.best_weights)
        self.link.flush()
        self._gather(self.comm)
        return stopped

    def accumulate(self, batches: list[Batch]) -> StepWork:
        """Bring a step's micro-batches through all stages: one forward and one backward in turn (1F1B, 1806.03377).

        A stage is ahead of its first gradient by as many micro-batches as there are stages after it, and so keeps the
        activations of no more than that and one.
        """
        work, open_passes = StepWork(), deque[tuple[Batch, Tensor | None, Any]]()
        for number, batch in enumerate(batches):
            came, made = self.stage.compute(batch)
            if self.link.stages_after:
                self.link.send(NEXT, made)
            open_passes.append((batch, came, made))
            if number >= self.link.stages_after:
                self._backward(*open_passes.popleft(), work)
        while open_passes:
            self._backward(*open_passes.popleft(), work)
        self.link.flush()
        self.strategy.parameters.check()
        return work

    def _backward(self, batch: Batch, came: Tensor | None, made: Any, work: StepWork) -> None:
        samples, ids = count_samples(batch), sample_ids(batch)
        if self.link.stages_after:
            gradient, value, weight = self.link.receive(NEXT)
            if gradient is not None:
                made.backward(gradient.to(made.dtype))
        else:
            loss, tokens = made
            weight = float(samples if tokens is None else tokens)
            value = loss.item() if weight > 0 else 0.0  # a mean over no token at all is NaN
            if weight > 0 and math.isfinite(value):
                (loss * weight).backward()
        if not self.link.is_first:
            assert came is not None
            self.link.send(BEFORE, came.grad, loss=value, weight=weight)
            return
        work.ids += ids
        if not math.isfinite(value):
            work.not_finite += ids if work.not_finite else [f"the loss is {value}", *ids]
            return
        work.samples += samples
        if weight > 0:
            work.loss.add(value * weight, weight)


class _StagedTrainer(Trainer):
    _sampler = SharedSampler

    @property
    def _node_class(self) -> Callable[..., TrainNode]:
        return StageNode

    def _choose_minibatch(
        self,
        train: DatasetSamples | BatchSource,
        val: DatasetSamples | BatchSource | None,
        comm: Comm,
        settings: FitSettings,
        device: torch.device,
        events: Events,
    ) -> None:
        """Cut a step into enough micro-batches that stages seldom wait, unless somebody has said how many."""
        if settings.max_memory_usage is not None:
            raise SettingError("a pipeline does not measure memory: give minibatch_size in place of max_memory_usage")
        for samples in (train, val):
            if isinstance(samples, DatasetSamples) and not settings.samples_at_once:
                samples.minibatch_size = max(1, settings.batch_size // (PASSES * comm.world_size))


class PipelineTrainer(_StagedTrainer, LocalTrainer):
    """A LocalTrainer of a model in stages, one for each process: `fit` has one batch_size for all of them.

    stages: modules, see StageNode, that share no parameter; `split` makes them of an nn.Sequential. After `fit` these
    very modules have the new weights.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        train_dataset: DataSource,
        val_dataset: DataSource | None = None,
        **settings: Any,
    ):
        super().__init__(nn.ModuleList(stages), train_dataset, val_dataset, **settings)
        owners = [{id(p) for p in stage.parameters()} for stage in stages]
        if not owners or sum(map(len, owners)) > len(set().union(*owners)):
            raise SettingError("give at least one stage, and no parameter to two of them: each rank trains its own")

    def fit(self, strategy: Strategy | None = None, **settings: Any) -> nn.Module:
        """Train, and return an nn.ModuleList of the stages. Takes what LocalTrainer's `fit` does but num_nodes."""
        count = len(self.model)  # type: ignore[arg-type]  # an nn.ModuleList
        if settings.setdefault("num_nodes", count) != count:
            raise SettingError(f"num_nodes = {settings['num_nodes']}, but there are {count} stages")
        try:
            return super().fit(strategy or PipelineStrategy(), **settings)
        except NodeFailed as error:
            if not settings.get("save_dir"):
                raise
            raise NodeFailed(f"{error}\nA{RESUME[1:]}: fit(..., resume=True)") from error

    def run_rank(self, rank: int, settings: FitSettings, **about: Any) -> TrainResult:
        self._stages, self.model = self.model, self.model[rank]  # type: ignore[index]
        try:
            return super().run_rank(rank, settings, **about)
        finally:
            self.model = self._stages

    @property
    def _node_class(self) -> Callable[..., TrainNode]:
        return partial(StageNode, gather=self._gather)

    def _gather(self, comm: Comm) -> None:
        if comm.rank:
            send_state(comm, dict(self.model.state_dict()), 0)
        else:
            for rank in range(1, comm.world_size):
                self._stages[rank].load_state_dict(receive_state(comm, rank))  # type: ignore[index]


class LaunchedPipelineTrainer(_StagedTrainer, LaunchedTrainer):
    """A LaunchedTrainer whose processes have a stage each. `stages` may be functions, of which each calls its own.

    `fit` trains and returns the stage of this process.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Callable[[], nn.Module]],
        train_dataset: DataSource,
        val_dataset: DataSource | None = None,
        **settings: Any,
    ):
        from exogym.launch import rank, world_size

        if len(stages) != world_size():
            raise SettingError(f"there are {len(stages)} stages, but {world_size()} processes were launched")
        own = stages[rank()]
        super().__init__(own if isinstance(own, nn.Module) else own(), train_dataset, val_dataset, **settings)


class _Part(nn.Module):
    """Some layers of an nn.Sequential as a stage."""

    def __init__(self, layers: Sequence[nn.Module], inputs: Callable[[Batch], Tensor] | None, loss: Any):
        super().__init__()
        self.layers, self.inputs, self.loss = nn.Sequential(*layers), inputs, loss

    def forward(self, *given: Any) -> Any:
        batch = given[-1]
        made = self.layers(self.inputs(batch) if self.inputs else given[0])
        return self.loss(made, batch) if self.loss else made


def first(batch: Batch) -> Tensor:
    """Return the inputs of a batch that is (inputs, targets)."""
    inputs: Tensor = batch[0]
    return inputs


def split(
    layers: nn.Sequential,
    loss: Callable[[Tensor, Batch], Any],
    *,
    shares: Sequence[float] = (1, 1),
    inputs: Callable[[Batch], Tensor] = first,
) -> list[nn.Module]:
    """Cut layers into stages, each with about its share of the parameters: in proportion to memory, or to speed.

    loss(output, batch) returns what a model does. inputs(batch) returns what the first layer takes.
    """
    if not 1 <= len(shares) <= len(layers) or min(shares) <= 0:
        raise SettingError(f"{len(layers)} layers cannot be cut into shares of {list(shares)}")
    sizes = [1 + sum(p.numel() for p in layer.parameters()) for layer in layers]
    ends = [*running_sum(sizes)]
    cuts = [0]
    for stage, wanted in enumerate([*running_sum(shares)][:-1], start=1):
        nearest = min(range(len(ends)), key=lambda n: abs(ends[n] - ends[-1] * wanted / sum(shares))) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(layers) - len(shares) + stage))
    cuts.append(len(layers))
    last = len(shares) - 1
    return [
        _Part([*layers][cuts[n] : cuts[n + 1]], None if n else inputs, loss if n == last else None)
        for n in range(len(shares))
    ]
