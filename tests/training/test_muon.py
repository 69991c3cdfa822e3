"""Muon against torch's own, and its direction against a singular value decomposition."""

import pytest
import torch
from torch import nn

from stepcredit.training.muon import Muon, orthogonalised


def weights():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in [(6, 6), (12, 5), (5, 12)]]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(*shape, generator=generator) for shape in [(6, 6), (12, 5), (5, 12)]]


def test_in_bfloat16_it_gives_the_bits_of_torch():
    ours, theirs = weights(), weights()
    mine = Muon(ours, lr=0.03, weight_decay=0.01, dtype=torch.bfloat16)
    torchs = torch.optim.Muon(theirs, lr=0.03, weight_decay=0.01, adjust_lr_fn="original")
    for step in range(4):
        for weight, other, gradient in zip(ours, theirs, gradients(step), strict=True):
            weight.grad, other.grad = gradient.clone(), gradient.clone()
        mine.step()
        torchs.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(8, 8), (16, 6), (6, 16)])
def test_singular_vectors_stay_and_singular_values_come_to_about_one(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalised(matrix, torch.float64) @ vh.T
    values = found.diagonal()
    torch.testing.assert_close(found, values.diag(), atol=1e-9, rtol=0)
    assert bool((values > 0.5).all() and (values < 1.3).all())
    # and the values themselves: the quintic, five times, by hand
    x = s / s.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    torch.testing.assert_close(values, x, atol=1e-9, rtol=0)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="matrices"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1, weight_decay=0.0)


def test_a_weight_without_a_gradient_stays():
    weight = nn.Parameter(torch.ones(2, 2))
    Muon([weight], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(weight, torch.ones(2, 2))
