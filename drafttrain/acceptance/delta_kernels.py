"""Fused kernels (Triton) for Gated DeltaNet layers over a draft tree: what ``mix_nodes`` computes.

    convolve   inputs [N, C], b, a [N, H] -> query, key [N, H_k, D_k], value [N, H, D_v], beta, step
    solve      these and the committed state [H, D_k, D_v] -> outputs, corrections [N, H, D_v]

``convolve`` gathers each node's convolution inputs along its path, applies SiLU and normalises the
heads. ``solve`` is forward substitution over blocks of nodes, one program per head and stretch of
D_v: earlier blocks enter as matrix products, and a diagonal block is inverted exactly by

    (I + L)^-1 = (I - L)(I + L^2)(I + L^4) ...

because a path has few nodes in a block, so that L vanishes at a small power. Guarantee: products
are exact to float32 (float32 inputs: plain float32; 16-bit inputs: three TF32 passes), sums are
float32. Cost: one launch each per layer; N^2 H (D_k + D_v) multiplications.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .delta_rule import L2_EPS

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without; the kernels are defined and never launched
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=None)

if TYPE_CHECKING:
    from .gated_delta import NodeMemory, TreeShape

FUSED = not isinstance(triton, SimpleNamespace)
"""Whether the kernels can run here (on CUDA tensors)."""


@triton.jit
def _convolve_kernel(
    inputs, conv, weight, rows, b, a, a_log, dt_bias,
    kept, query, key, value, beta, step,
    KERNEL: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One node and one head: its channels of the convolution, and its gates."""
    node, head = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * KEY_HEADS * D_K + HEADS * D_V
    is_value = head >= 2 * KEY_HEADS
    own = head - 2 * KEY_HEADS
    first = tl.where(is_value, 2 * KEY_HEADS * D_K + own * D_V, head * D_K)
    size = tl.where(is_value, D_V, D_K)
    lane = tl.arange(0, WIDTH)
    inside = lane < size
    channel = first + lane
    total = tl.zeros([WIDTH], tl.float32)
    for tap in tl.static_range(KERNEL):
        row = tl.load(rows + node * KERNEL + tap)
        # The first K-1 rows are committed inputs; the oldest of the K kept ones is not needed.
        old = tl.load(conv + channel * KERNEL + row + 1, inside & (row < KERNEL - 1), other=0.0)
        new = tl.load(
            inputs + (row - (KERNEL - 1)) * channels + channel,
            inside & (row >= KERNEL - 1),
            other=0.0,
        )
        x = tl.where(row < KERNEL - 1, old, new)
        if tap == KERNEL - 1:
            tl.store(kept + node * channels + channel, x, inside)
        w = tl.load(weight + channel * KERNEL + tap, inside, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)
    # Rounded where the layer itself rounds: after the sum and after the activation.
    total = total.to(inputs.dtype.element_ty).to(tl.float32)
    mixed = (total / (1.0 + tl.exp(-total))).to(inputs.dtype.element_ty).to(tl.float32)
    if is_value:
        tl.store(value + (node * HEADS + own) * D_V + lane, mixed, inside)
        place = node * HEADS + own
        gate = 1.0 / (1.0 + tl.exp(-tl.load(b + place).to(tl.float32)))
        tl.store(beta + place, gate)
        raw = tl.load(a + place).to(tl.float32) + tl.load(dt_bias + own).to(tl.float32)
        soft = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        tl.store(step + place, -tl.exp(tl.load(a_log + own).to(tl.float32)) * soft)
    else:
        unit = mixed * tl.rsqrt(tl.sum(tl.where(inside, mixed * mixed, 0.0)) + EPS)
        if head < KEY_HEADS:
            scaled = unit * (1.0 / tl.sqrt(D_K * 1.0))
            tl.store(query + (node * KEY_HEADS + head) * D_K + lane, scaled, inside)
        else:
            to = (node * KEY_HEADS + head - KEY_HEADS) * D_K + lane
            tl.store(key + to, unit, inside)


@triton.jit
def _gap(path, decay, at, to, nodes, HEADS: tl.constexpr, head):
    """exp(G_i - G_j) of two stretches of nodes where j is i or its ancestor, else 0."""
    seen = tl.load(
        path + at[:, None] * nodes + to[None, :],
        (at[:, None] < nodes) & (to[None, :] < nodes),
        other=0,
    )
    left = tl.load(decay + at * HEADS + head, at < nodes, other=0.0)
    right = tl.load(decay + to * HEADS + head, to < nodes, other=0.0)
    # The exponent is cut before exp: between siblings it may be positive and large.
    apart = (left[:, None] - right[None, :]).to(tl.float32)
    return tl.where(seen != 0, tl.exp(tl.minimum(apart, 0.0)), 0.0)


@triton.jit
def _solve_kernel(
    query, key, value, beta, path, decay, state, corrections, out, nodes,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    K_WIDTH: tl.constexpr, BLOCK: tl.constexpr, STRETCH: tl.constexpr, DOUBLINGS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One head and a stretch of its value channels: all nodes, block after block."""
    head, part = tl.program_id(0), tl.program_id(1)
    group = head // (HEADS // KEY_HEADS)
    d, e = tl.arange(0, K_WIDTH), part * STRETCH + tl.arange(0, STRETCH)
    in_d, in_e = d < D_K, e < D_V
    within = tl.arange(0, BLOCK)
    committed = tl.load(
        state + (head * D_K + d[:, None]) * D_V + e[None, :],
        in_d[:, None] & in_e[None, :],
        other=0.0,
    ).to(tl.float32)
    for start in range(0, nodes, BLOCK):
        at = start + within
        live = at < nodes
        k_at = key + (at[:, None] * KEY_HEADS + group) * D_K + d[None, :]
        k = tl.load(k_at, live[:, None] & in_d[None, :], other=0.0)
        q_at = query + (at[:, None] * KEY_HEADS + group) * D_K + d[None, :]
        q = tl.load(q_at, live[:, None] & in_d[None, :], other=0.0)
        e_at = (at[:, None] * HEADS + head) * D_V + e[None, :]
        in_block = live[:, None] & in_e[None, :]
        v = tl.load(value + e_at, in_block, other=0.0).to(tl.float32)
        gate = tl.load(beta + at * HEADS + head, live, other=0.0)[:, None]
        grown = tl.exp(tl.load(decay + at * HEADS + head, live, other=0.0).to(tl.float32))[:, None]
        u = v - grown * tl.dot(k.to(tl.float32), committed, input_precision=PRECISION)
        o = grown * tl.dot(q.to(tl.float32), committed, input_precision=PRECISION)
        for before in range(0, start, BLOCK):
            to = before + within
            gap = _gap(path, decay, at, to, nodes, HEADS, head)
            earlier = tl.load(
                key + (to[None, :] * KEY_HEADS + group) * D_K + d[:, None], in_d[:, None], other=0.0
            )
            known = tl.load(
                corrections + (to[:, None] * HEADS + head) * D_V + e[None, :],
                in_e[None, :],
                other=0.0,
            )
            near = tl.dot(k, earlier, input_precision=PRECISION) * gap
            u -= tl.dot(near, known, input_precision=PRECISION)
            seen = tl.dot(q, earlier, input_precision=PRECISION) * gap
            o += tl.dot(seen, known, input_precision=PRECISION)
        gap = _gap(path, decay, at, at, nodes, HEADS, head)
        across = tl.trans(k)
        strict = within[:, None] > within[None, :]
        power = tl.where(strict, gate * tl.dot(k, across, input_precision=PRECISION) * gap, 0.0)
        u = gate * u
        u -= tl.dot(power, u, input_precision=PRECISION)
        for _ in tl.static_range(DOUBLINGS - 1):
            power = tl.dot(power, power, input_precision=PRECISION)
            u += tl.dot(power, u, input_precision=PRECISION)
        o += tl.dot(
            tl.dot(q, across, input_precision=PRECISION) * gap, u, input_precision=PRECISION
        )
        tl.store(corrections + e_at, u, in_block)
        tl.store(out + e_at, o.to(out.dtype.element_ty), in_block)
        tl.debug_barrier()  # the next block reads these corrections


def convolve(
    layer: Any,
    projected: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    conv: Tensor,
    memory: "NodeMemory",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convolution, SiLU, head norms and gates of all nodes of one layer.

    Args:
        layer: the Gated DeltaNet module.
        projected: convolution inputs [N, C], b [N, H], a [N, H].
        rows: int64 [N, K], see ``delta_rule.conv_rows``.
        conv: committed convolution inputs [C, K].
        memory: of this layer; inputs and keys are filled.

    Returns:
        query [N, H_k, D_k] and value [N, H, D_v] in the dtype of the inputs, beta and log decay
        step [N, H] in float32 and float64.
    """
    inputs, b, a = (part.contiguous() for part in projected)
    nodes, heads, groups = len(inputs), layer.num_v_heads, layer.num_k_heads
    query = torch.empty_like(memory.keys)
    value = inputs.new_empty(nodes, heads, layer.head_v_dim)
    beta = torch.empty(nodes, heads, device=inputs.device)
    step = torch.empty_like(beta, dtype=torch.float64)  # summed along paths in float64
    _convolve_kernel[(nodes, 2 * groups + heads)](
        inputs, conv, layer.conv1d.weight, rows, b, a, layer.A_log, layer.dt_bias,
        memory.inputs, query, memory.keys, value, beta, step,
        KERNEL=layer.conv_kernel_size, KEY_HEADS=groups, HEADS=heads, D_K=layer.head_k_dim,
        D_V=layer.head_v_dim, EPS=L2_EPS,
        WIDTH=triton.next_power_of_2(max(layer.head_k_dim, layer.head_v_dim)),
    )  # fmt: skip
    return query, value, beta, step


def solve(
    heads: tuple[Tensor, Tensor, Tensor],
    shape: "TreeShape",
    state: Tensor,
    memory: "NodeMemory",
) -> Tensor:
    """The delta rule of one layer over a tree.

    Args:
        heads: query [N, H_k, D_k], value [N, H, D_v], beta [N, H].
        shape: of the tree.
        state: committed [H, D_k, D_v].
        memory: of this layer; keys and decay are read, corrections filled.

    Returns:
        Outputs [N, H, D_v] in the dtype of the query.
    """
    query, value, beta = heads
    nodes, groups, d_k = query.shape
    count, d_v = value.shape[1:]
    out = torch.empty_like(value)
    block, stretch, warps = _launch(nodes)
    stretch = min(stretch, max(16, triton.next_power_of_2(d_v)))
    _solve_kernel[(count, triton.cdiv(d_v, stretch))](
        query, memory.keys, value, beta, shape.ancestors.view(torch.uint8), memory.decay, state,
        memory.corrections, out, nodes,
        KEY_HEADS=groups, HEADS=count, D_K=d_k, D_V=d_v,
        K_WIDTH=max(16, triton.next_power_of_2(d_k)), BLOCK=block, STRETCH=stretch,
        DOUBLINGS=max(1, (min(block, shape.levels) - 1).bit_length()),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32x3", num_warps=warps,
    )  # fmt: skip
    return out


def _launch(nodes: int) -> tuple[int, int, int]:
    """Nodes per block, value channels per program and warps, for a number of nodes."""
    if nodes <= 32:
        return 16, 32, 4
    return (32, 32, 4) if nodes <= 128 else (64, 32, 4)
