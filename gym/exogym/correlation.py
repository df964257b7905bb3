"""How alike the ranks' weights are."""

from __future__ import annotations

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.flat import FlatParameters

MOST = 1_000_000  # weights: 4 MB that each rank sends to each other; the correlation's error is about 1/1000


def mean_correlation(comm: Comm, parameters: FlatParameters) -> float | None:
    """The mean over all pairs of ranks of the Pearson correlation of their trained weights. All ranks call it.

    Of a larger model the same MOST weights, drawn at random once and for all, are gathered and compared; buffers are
    left out. None for one rank, and where a rank's weights are all equal or not finite. Raises PeerLost.
    """
    if comm.world_size == 1 or parameters.num_parameters < 2:
        return None
    vectors = torch.stack(comm.all_gather(sample(parameters.read()[: parameters.num_parameters]))).double()
    among = torch.corrcoef(vectors)[*torch.triu_indices(comm.world_size, comm.world_size, offset=1)]
    mean = among.mean().item()
    return mean if among.isfinite().all() else None


def sample(flat: Tensor) -> Tensor:
    """All of it, or MOST of its values, the same ones each time."""
    if flat.numel() <= MOST:
        return flat.contiguous()
    generator = torch.Generator().manual_seed(0)
    return flat[torch.randint(flat.numel(), (MOST,), generator=generator)]
