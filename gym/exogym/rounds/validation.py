"""What ranks measure together: the loss on data that are not trained on, and how alike their weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor, nn

from exogym.comm.comm import Comm
from exogym.flat import FlatParameters
from exogym.logger.event import Mean
from exogym.membership import VALIDATION
from exogym.micro_batches import Forward
from exogym.rounds.progress import Progress
from exogym.samplers.batches import BatchSource
from exogym.samplers.elastic import sampler_of
from exogym.state.node_state import NodeState
from exogym.state.state_sync import common_weights

MOST_COMPARED = 1_000_000  # weights: 4 MB that each rank sends to each other; the correlation's error is about 1/1000


class Validation:
    """Measures the loss on validation data; does nothing without them."""

    def __init__(
        self,
        source: BatchSource | None,
        model: nn.Module,
        forward: Forward,
        comm: Comm,
        state: NodeState,
        progress: Progress,
        *,
        keep_best: bool = False,
    ):
        self._sampler = None if source is None else sampler_of(source, comm.members)
        self._model, self._forward = model, forward
        self._comm, self._state, self._progress = comm, state, progress
        self._keep_best = keep_best

    def follow(self) -> None:
        """Share the data among the present members."""
        if self._sampler:
            self._sampler.follow(self._comm.members)

    def run(self) -> None:
        """Validate, and tell the loss.

        Where ranks differ it is that of the mean of their weights, and `local_loss` is the mean of their own losses.
        """
        if not self._sampler:
            return
        state, parameters = self._state, self._state.strategy.parameters
        loss, local, mean = self._agreed(self._sums), {}, None
        if state.strategy.differs:
            own = parameters.read()
            if (mean := common_weights(self._comm, state, own)) is not None:
                loss, local = self._loss_of(mean, own), {"local_loss": loss}
        best = state.now.best_loss
        is_first = best is None or (self._keep_best and state.best_weights is None)
        is_best = loss is not None and (is_first or loss < best)
        kept = None
        if is_best and self._keep_best:  # the weights that were validated, the same on all ranks to the last bit
            kept = mean
            if kept is None:  # machines may round differently
                own = parameters.read()
                common = common_weights(self._comm, state, own)
                kept = own if common is None else common
        state.validated(loss, is_best=is_best, weights=kept)
        self._progress.emit("validation", loss=loss, **local)

    def _agreed(self, sums: Callable[[], Tensor]) -> float | None:
        return Mean(*self._comm.commit_together(VALIDATION, sums).tolist()).value()

    def _loss_of(self, mean: Tensor, own: Tensor) -> float | None:
        """Return the loss of weights `mean` [numel]; the model then has its `own` again."""
        strategy = self._state.strategy

        def sums() -> Tensor:
            """Put the model's own weights back before ranks that have lost one meet anew."""
            try:
                strategy.parameters.write(mean)
                return self._sums()
            finally:
                strategy.parameters.write(own)

        return self._agreed(sums)

    def _sums(self) -> Tensor:
        """Return the sum of the losses over all ranks, and of their weights [2 float64]."""
        self.follow()
        mean = Mean()
        with modes_kept(self._model), torch.no_grad():
            self._model.eval()
            for batches in self._sampler.epoch(0):
                self._comm.alive()
                for batch in batches:
                    loss, weight, _ = self._forward(batch)
                    if weight > 0 and isfinite(value := loss.item()):
                        mean.add(value * weight, weight)
        sums = torch.tensor([mean.total, mean.weight], dtype=torch.float64)
        self._comm.all_reduce_(sums)
        return sums


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module back into train or eval mode as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def mean_correlation(comm: Comm, parameters: FlatParameters) -> float | None:
    """Return the mean over all pairs of ranks of the Pearson correlation of their trained weights. All ranks call it.

    Of a larger model the same MOST_COMPARED weights, drawn at random once and for all, are gathered and compared;
    buffers are left out. None for one rank, and where a rank's weights are all equal or not finite. Raises PeerLost.
    """
    if comm.world_size == 1 or parameters.num_parameters < 2:
        return None
    vectors = torch.stack(comm.all_gather(sample(parameters.read()[: parameters.num_parameters]))).double()
    among = torch.corrcoef(vectors)[*torch.triu_indices(comm.world_size, comm.world_size, offset=1)]
    mean = among.mean().item()
    return mean if among.isfinite().all() else None


def sample(flat: Tensor) -> Tensor:
    """Return `flat` [n], or MOST_COMPARED of its values, the same ones each time."""
    if flat.numel() <= MOST_COMPARED:
        return flat.contiguous()
    generator = torch.Generator().manual_seed(0)
    return flat[torch.randint(flat.numel(), (MOST_COMPARED,), generator=generator)]
