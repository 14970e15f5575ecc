"""The chunked head loss against float64 autograd."""

import pytest
import torch

from drafttrain.data.errors import RecipeError
from drafttrain.losses.head_loss import head_cross_entropy
from drafttrain.losses.weights import decay_weights, resolve_gamma


def reference(hidden, head, labels, weights):
    hidden = hidden.detach().double().requires_grad_()
    log_q = (hidden @ head.double().T).log_softmax(-1)
    loss = -(weights.double() * log_q.gather(1, labels[:, None]).squeeze(1)).sum()
    loss.backward()
    return loss.item(), hidden.grad


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_loss_and_gradient_equal_float64(rows, chunk):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 12, generator=generator).requires_grad_()
    head = torch.randn(37, 12, generator=generator)
    labels = torch.randint(0, 37, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    loss, predicted = head_cross_entropy(hidden, head, labels, weights, chunk)
    (3.0 * loss).backward()
    expected, grad = reference(hidden, head, labels, weights)
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert torch.allclose(hidden.grad.double(), 3.0 * grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(predicted, (hidden @ head.T).argmax(-1))


def test_bfloat16_head_stays_within_rounding():
    """(fault kind 51, the cross-entropy part)"""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(101, 32, generator=generator).bfloat16()
    labels = torch.randint(0, 101, (64,), generator=generator)
    weights = torch.rand(64, generator=generator)
    loss, _ = head_cross_entropy(hidden, head, labels, weights)
    loss.backward()
    expected, grad = reference(hidden, head, labels, weights)
    assert loss.item() == pytest.approx(expected, rel=1e-2)
    assert (hidden.grad.double() - grad).norm() / grad.norm() < 0.02


def test_decay_weights_by_hand():
    supervised = torch.tensor([[True, True, False], [False, False, False]])
    weights = decay_weights(supervised, gamma=2.0)
    assert weights.tolist() == [[1.0, pytest.approx(0.606531, abs=1e-6), 0.0], [0.0, 0.0, 0.0]]
    assert resolve_gamma(None, 16) == 7.0 and resolve_gamma(None, 8) == 4.0
    assert resolve_gamma(3.5, 12) == 3.5
    with pytest.raises(RecipeError, match="block size 12"):
        resolve_gamma(None, 12)
