import math

import pytest
import torch

from exogym.strategy import dct
from exogym.strategy.dct import basis, chunk_batches, chunk_edge, matrix_shape

CPU = torch.device("cpu")
SHAPES = [(), (1,), (7,), (97,), (130,), (67, 71), (1, 97), (5, 3, 3), (1, 1, 40, 9), (24, 10, 3), (8, 3, 5, 5), (0, 4)]


def tensors_of(shapes):
    chance = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=chance) for shape in shapes]


@pytest.mark.parametrize("size", [1, 2, 61, 64])
def test_the_basis_is_orthonormal_and_that_of_the_formula(size):
    matrix = basis(size, CPU)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=1e-6, rtol=0)
    for k, n in [(0, 0), (size - 1, 0), (size // 2, size - 1)]:
        scale = math.sqrt((1 if k == 0 else 2) / size)
        assert matrix[k, n].item() == pytest.approx(scale * math.cos(math.pi * (2 * n + 1) * k / (2 * size)), abs=1e-7)


def test_coefficients_by_hand():
    [batch] = chunk_batches([torch.zeros(2, 4)], 2)
    root = math.sqrt(2)
    coefficients = batch.encode([torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])])
    torch.testing.assert_close(coefficients, torch.tensor([[2.0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]]))
    one_row = chunk_batches([torch.zeros(2)], 2)[0].encode([torch.tensor([3.0, 1.0])])
    torch.testing.assert_close(one_row, torch.tensor([[4 / root, 2 / root]]))


@pytest.mark.parametrize(("chunk", "most"), [(1, 100), (5, 1), (5, 100), (64, 100), (64, dct.BATCH)])
def test_there_and_back_again(chunk, most, monkeypatch):
    """Also where what is transformed at once is less than a tensor."""
    monkeypatch.setattr(dct, "BATCH", most)
    tensors = tensors_of(SHAPES)
    tensors.append(torch.randn(6, 5, 4).transpose(0, 2))  # not contiguous
    tensors.append(torch.randn(3, 8, 4, 4).contiguous(memory_format=torch.channels_last).half())
    batches, found = chunk_batches(tensors, chunk), [torch.full_like(t, math.nan) for t in tensors]
    for batch in batches:
        coefficients = batch.encode(tensors)
        assert coefficients.shape == (batch.size, batch.values) and batch.values <= chunk * chunk
        assert len(batch.pieces) == 1 or batch.size * batch.values <= most
        for part, values in batch.parts(batch.decode(coefficients), found):
            part.copy_(values)
    for tensor, back in zip(tensors, found, strict=True):
        torch.testing.assert_close(back, tensor, atol=1e-5, rtol=1e-5)
    energy = sum(batch.encode(tensors).square().sum().item() for batch in batches)
    assert energy == pytest.approx(sum(t.float().square().sum().item() for t in tensors), rel=1e-5)


def test_none_counts_as_zeros_and_chunks_belong_to_one_tensor():
    tensors = tensors_of([(8, 8), (8, 8), (16, 8)])
    [batch] = chunk_batches(tensors, 8)
    coefficients = batch.encode([tensors[0], None, tensors[2]])
    assert [piece.chunks for piece in batch.pieces] == [slice(0, 1), slice(1, 2), slice(2, 4)]
    assert not coefficients[1].any() and coefficients[[0, 2, 3]].all()


def test_edges():
    """As few chunks as the largest edge allows, all equal."""
    assert [chunk_edge(length, 64) for length in (1, 10, 64, 65, 67, 80, 127, 128, 1500)] == [
        *(1, 10, 64, 33, 34, 40, 64, 64, 63)
    ]
    assert matrix_shape((384, 80, 3), 64) == (384, 240) and matrix_shape((1, 1, 9, 4), 64) == (9, 4)
    assert (
        matrix_shape((), 64) == (1, 1) and matrix_shape((768,), 64) == (12, 64) and matrix_shape((100,), 64) == (2, 50)
    )


def test_the_largest_chunks_come_first_whatever_the_order_of_the_tensors():
    batches = chunk_batches(tensors_of([(3,), (64, 64), (10, 10), (128, 64)]), 64)
    assert [(batch.height, batch.width) for batch in batches] == [(64, 64), (10, 10), (1, 3)]
    assert batches[0].size == 3
