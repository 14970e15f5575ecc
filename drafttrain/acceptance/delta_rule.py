"""The gated delta rule over a draft tree: q, k, v, decay of N nodes -> outputs, any node's state.

Along a path the recurrence of a Gated DeltaNet head is, with g <= 0 the log decay,

    u_i = beta_i (v_i - (e^{g_i} S_p)^T k_i),   S_i = e^{g_i} S_p + k_i u_i^T,   o_i = S_i^T q_i

where p is the parent of node i and the root's parent is the committed state S. Nodes are many, but
what a node sees is its ancestors, so with A[i, j] = "j is i or an ancestor of i", G = A g and
D = exp(G_i - G_j) where A, else 0, one unit-triangular system gives every u at once:

    (I + L) U = beta (V - e^G K S),     L = beta (K K^T) D on strict ancestors
    O = e^G Q S + ((Q K^T) D) U
    S_i = e^{G_i} S + sum over i's ancestors j of e^{G_i - G_j} k_j u_j^T

(the one-chunk form of the gated delta rule, Yang et al. 2024, "Gated Delta Networks", with the
causal triangle replaced by A and the cumulative sum by A g). Guarantee: exact, in float64 to 1e-10
against the recurrence; no state per node is ever made. The masked exponent is never positive, so
nothing overflows, whatever siblings decay by. Cost: O(N^2) per head and one solve; memory N rows.

Heads: H value heads share H_k key heads, H / H_k consecutive ones each.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6
"""Of the key and query normalisation, under the root, as the reference kernels have it."""


def conv_rows(parents: np.ndarray, kernel: int) -> np.ndarray:
    """Rows that each node's causal convolution reads, oldest first.

    Args:
        parents: int64 [N]; parent of every node, -1 for the root (node 0), parents before children.
        kernel: taps K of the convolution.

    Returns:
        int64 [N, K] rows of the K - 1 last committed inputs followed by the N nodes' inputs.
    """
    history = kernel - 1
    # One row further up a path: the parent, then the committed inputs backwards.
    up = np.concatenate([np.arange(history) - 1, np.asarray(parents) + history])
    rows = np.empty((len(parents), kernel), dtype=np.int64)
    rows[:, -1] = np.arange(len(parents)) + history
    for tap in range(kernel - 2, -1, -1):
        rows[:, tap] = up[rows[:, tap + 1]]
    return rows


def tree_conv(inputs: Tensor, history: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """Depthwise causal convolution along every path, then SiLU.

    Args:
        inputs: [N, C] of the nodes.
        history: [K-1, C], the last committed inputs, oldest first.
        weight: [C, K].
        rows: int64 [N, K] from ``conv_rows``.

    Returns:
        [N, C] in the dtype of ``inputs``.
    """
    taps = torch.cat([history, inputs])[rows]
    summed = (taps.to(_wide(inputs)) * weight.T.to(_wide(inputs))).sum(1)
    return F.silu(summed.to(inputs.dtype))


def unit_heads(heads: Tensor) -> Tensor:
    """Heads [..., d] divided by their length, in float32, or float64 for float64."""
    wide = heads.to(_wide(heads))
    return wide * (wide.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def tree_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    ancestors: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs and corrections of all nodes.

    Args:
        query: [N, H_k, D_k], normalised and scaled.
        key: [N, H_k, D_k], normalised.
        value: [N, H, D_v].
        decay: float64 [N, H], log decay summed along each node's path, its own included (G).
            Its differences are what counts: in float32 a strong decay early on a path would cost
            the differences behind it their last digits.
        beta: [N, H].
        ancestors: bool [N, N], A above.
        state: [H, D_k, D_v], committed.

    Returns:
        (outputs [N, H, D_v], corrections U [N, H, D_v]) in float32, or float64 if ``state`` is.
    """
    wide = _wide(state)
    groups, heads = key.shape[1], value.shape[1]
    shape = (groups, heads // groups)
    q, k = (part.to(wide).transpose(0, 1).unsqueeze(1) for part in (query, key))
    v = value.to(wide).transpose(0, 1).unflatten(0, shape)
    total, b = (part.T.unflatten(0, shape).unsqueeze(-1) for part in (decay, beta.to(wide)))
    committed = state.to(wide).unflatten(0, shape)
    # [groups, heads per group, N, N]; masked before the exponential: siblings would overflow it.
    gap = (total - total.mT).masked_fill(~ancestors, -torch.inf).to(wide).exp()
    grown = total.to(wide).exp()
    system = b * (k @ k.mT) * gap
    known = b * (v - grown * (k @ committed))
    # Reads what lies below the diagonal only; there, A is the strict ancestors.
    u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    out = grown * (q @ committed) + ((q @ k.mT) * gap) @ u
    return out.flatten(0, 1).transpose(0, 1), u.flatten(0, 1).transpose(0, 1)


def commit_state(state: Tensor, key: Tensor, corrections: Tensor, decay: Tensor) -> None:
    """Advance states in place along one path; any number of layers at once.

    Args:
        state: [layers, H, D_k, D_v], contiguous.
        key: [layers, P, H_k, D_k] of the nodes on the path, the root first.
        corrections: [layers, P, H, D_v], U of these nodes.
        decay: float64 [layers, P, H], G of these nodes.
    """
    wide = state.dtype
    heads, groups = state.shape[1], key.shape[2]
    last = decay[:, -1:]
    weight = (last - decay).to(wide).exp().mT.unsqueeze(-1)  # [layers, H, P, 1]
    k = key.to(wide).transpose(1, 2).repeat_interleave(heads // groups, dim=1) * weight
    u = corrections.to(wide).transpose(1, 2)
    state.mul_(last.to(wide).exp().mT.unsqueeze(-1))
    state.flatten(0, 1).baddbmm_(k.flatten(0, 1).mT, u.flatten(0, 1))


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)
