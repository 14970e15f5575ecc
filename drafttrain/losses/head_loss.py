"""Weighted cross-entropy through the frozen LM head, without ever holding [N, V] logits.

    loss = sum_i w_i * (logsumexp(W h_i) - (W h_i)[y_i])

Rows are taken in chunks; each chunk's gradient with respect to h is computed in the forward pass
(the head is frozen, so nothing else needs one), so the backward pass is one multiplication and
nothing is recomputed. Softmax and loss are float32 whatever the head's dtype.
Peak extra memory: chunk * V float32 twice, plus one copy of h.
"""

from typing import Any

import torch
from torch import Tensor


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(hidden)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        predicted = torch.empty_like(labels)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part] @ head.T).float()
            predicted[part] = logits.argmax(-1)
            log_norm = logits.logsumexp(-1)
            of_label = logits.gather(1, labels[part, None]).squeeze(1)
            loss += (weights[part] * (log_norm - of_label)).sum()
            residual = logits.sub_(log_norm[:, None]).exp_()
            residual.scatter_add_(1, labels[part, None], -torch.ones_like(log_norm)[:, None])
            grad[part] = residual.mul_(weights[part, None]).to(head.dtype) @ head
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(predicted)
        return loss, predicted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None, None


def head_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies of slot states through the LM head.

    Args:
        hidden: [N, d] slot states (only supervised rows), requires grad.
        head: [V, d] frozen LM head in the same dtype.
        labels: [N] int64.
        weights: [N] float32.
        chunk: rows per pass.

    Returns:
        (loss, predicted): the float32 sum (not normalised) and the argmax of each row [N] int64.
    """
    return _HeadCrossEntropy.apply(hidden, head, labels, weights, chunk)
