"""Tensors of any shape as chunks, and the chunks' discrete cosine transform (DCT-II, orthonormal)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BATCH = 4 * 1024 * 1024  # values: 16 MB, the most that is transformed at once, so that copies made on the way are small


def basis(size: int, device: torch.device) -> Tensor:
    """Return [size, size] float32: `basis @ x` is the DCT of x. It is made in float64 on the CPU: mps has none."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * torch.outer(k, k + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


def matrix_shape(shape: Sequence[int], chunk: int) -> tuple[int, int]:
    """Return the rows and columns of the matrix that a tensor is seen as: its first edge by all the others.

    Edges of 1 do not count. A vector becomes rows of at most `chunk` values, the last one filled up with zeros.
    """
    edges = [edge for edge in shape if edge != 1]
    if len(edges) > 1:
        return edges[0], math.prod(edges[1:])
    size = math.prod(edges)
    columns = chunk_edge(size, chunk)
    return math.ceil(size / columns), columns


def chunk_edge(length: int, chunk: int) -> int:
    """Return the edge of as few equal chunks as cover `length`, at most `chunk`; the last is filled up with zeros.

    The paper's code takes the largest divisor of `length`, which is 1 for a prime one.
    """
    return math.ceil(length / math.ceil(length / chunk))


@dataclass(frozen=True)
class Piece:
    """Rows of tensor number `tensor`, a matrix of `shape`, and the chunks of a batch that hold them."""

    tensor: int
    rows: slice
    shape: tuple[int, int]
    chunks: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of the tensor itself, a view. Only tensors with several dimensions are divided."""
        tensor = tensor.squeeze()
        return tensor[self.rows] if tensor.ndim > 1 else tensor


class ChunkBatch:
    """Chunks of one shape [height, width], of many tensors: they are transformed together."""

    def __init__(self, edges: tuple[int, int], pieces: list[Piece], device: torch.device):
        self.height, self.width = edges
        self.pieces, self.device = pieces, device
        self.size = pieces[-1].chunks.stop
        self._left, self._right = basis(self.height, device), basis(self.width, device)

    @property
    def values(self) -> int:
        """The number of values in a chunk."""
        return self.height * self.width

    def zeros(self) -> Tensor:
        """Return coefficients that are all zero, float32 [chunks, values]."""
        return torch.zeros(self.size, self.values, device=self.device)

    def encode(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the coefficients [chunks, values] of the tensors; None counts as zeros."""
        chunks = self.zeros().view(-1, self.height, self.width)
        for piece in self.pieces:
            if (tensor := tensors[piece.tensor]) is not None:
                # The piece's matrix, filled up with zeros to whole chunks.
                part, (rows, columns), (down, across) = piece.of(tensor), piece.shape, self._grid(piece)
                matrix = pad(part.reshape(-1).float(), (0, rows * columns - part.numel())).view(rows, columns)
                whole = pad(matrix, (0, across * self.width - columns, 0, down * self.height - rows))
                self._blocks(chunks, piece).copy_(whole.view(down, self.height, across, self.width))
        return (self._left @ chunks @ self._right.T).flatten(1)

    def decode(self, coefficients: Tensor) -> Tensor:
        """Return the chunks [chunks, height, width] of which `encode` gives these coefficients, for `parts`."""
        return self._left.T @ coefficients.view(-1, self.height, self.width) @ self._right

    def parts(self, chunks: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of a tensor, a view, and what the chunks hold for it, in the same shape."""
        for piece in self.pieces:
            part, (rows, columns) = piece.of(tensors[piece.tensor]), piece.shape
            whole = self._blocks(chunks, piece).flatten(2).flatten(0, 1)[:rows, :columns]
            yield part, whole.reshape(-1)[: part.numel()].view(part.shape)

    def _grid(self, piece: Piece) -> tuple[int, int]:
        return math.ceil(piece.shape[0] / self.height), math.ceil(piece.shape[1] / self.width)

    def _blocks(self, chunks: Tensor, piece: Piece) -> Tensor:
        """Return the piece's chunks where they lie in its matrix: a view [down, height, across, width]."""
        return chunks[piece.chunks].view(*self._grid(piece), self.height, self.width).transpose(1, 2)


def chunk_batches(tensors: Sequence[Tensor], chunk: int) -> list[ChunkBatch]:
    """Return all tensors in chunks of at most [chunk, chunk], the largest chunks first, in batches of at most BATCH."""
    groups: dict[tuple[int, int, torch.device], list[list[Piece]]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        rows, columns = matrix_shape(tensor.shape, chunk)
        height, width = chunk_edge(rows, chunk), chunk_edge(columns, chunk)
        across = math.ceil(columns / width)
        most = max(1, BATCH // (across * width * height)) * height if tensor.squeeze().ndim > 1 else rows
        batches = groups[height, width, tensor.device]
        for start in range(0, rows, most):
            shape = (min(most, rows - start), columns)
            count = math.ceil(shape[0] / height) * across
            first = batches[-1][-1].chunks.stop if batches else 0
            if not batches or (first + count) * height * width > BATCH:
                batches.append([])
                first = 0
            batches[-1].append(Piece(number, slice(start, start + shape[0]), shape, slice(first, first + count)))
    largest_first = sorted(groups.items(), key=lambda group: -group[0][0] * group[0][1])
    return [ChunkBatch((h, w), pieces, device) for (h, w, device), batches in largest_first for pieces in batches]
