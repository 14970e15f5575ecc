"""The delta rule over a tree equals the recurrence along each of its paths."""

import numpy as np
import pytest
import torch

from drafttrain.acceptance.delta_rule import commit_state, conv_rows, tree_conv, tree_delta_rule

GROUPS, HEADS, D_K, D_V, KERNEL = 2, 6, 5, 7, 4


def parents_of(rng, nodes, newest):
    return np.array([-1, *(int(rng.integers(max(0, i - newest), i)) for i in range(1, nodes))])


def path_of(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def ancestors_of(parents):
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        seen[node, path_of(parents, node)] = True
    return seen


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def draw(nodes, seed, decay_scale=1.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = unit(normal(nodes, GROUPS, D_K)), unit(normal(nodes, GROUPS, D_K))
    value, state = normal(nodes, HEADS, D_V), normal(HEADS, D_K, D_V)
    step = -decay_scale * normal(nodes, HEADS).exp()
    return query, key, value, step, normal(nodes, HEADS).sigmoid(), state


def recurrence(query, key, value, step, beta, state):
    """The rule as written, token by token: outputs [n, H, D_v] and the last state."""
    outputs = []
    for q, k, v, g, b in zip(query, key, value, step, beta, strict=True):
        q, k = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (q, k))
        state = g.exp()[:, None, None] * state
        known = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - known))
        outputs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outputs), state


@pytest.mark.parametrize("newest", [1, 3, 1000], ids=["chain", "deep", "wide"])
@pytest.mark.parametrize("nodes", [1, 2, 17, 64, 65, 128])
def test_every_node_follows_the_recurrence_of_its_own_path(nodes, newest):
    """In float64 to 1e-10: outputs, and the state that a commit of the node would leave."""
    rng = np.random.default_rng(nodes)
    parents = parents_of(rng, nodes, newest)
    query, key, value, step, beta, state = draw(nodes, seed=nodes)
    ancestors = ancestors_of(parents)
    decay = ancestors.double() @ step
    out, corrections = tree_delta_rule(query, key, value, decay, beta, ancestors, state)
    assert out.dtype == torch.float64
    for node in range(nodes):
        path = path_of(parents, node)
        wanted, last = recurrence(*(x[path] for x in (query, key, value, step, beta)), state)
        torch.testing.assert_close(out[node], wanted[-1], atol=1e-10, rtol=1e-10)
        committed = state[None].clone()
        commit_state(committed, *(x[path][None] for x in (key, corrections, decay)))
        torch.testing.assert_close(committed[0], last, atol=1e-10, rtol=1e-10)


def test_layers_are_committed_together():
    """Each layer of the stack by its own quantities."""
    query, key, value, step, beta, state = draw(6, seed=3)
    states = torch.stack([state, 2 * state])
    ancestors = ancestors_of(np.arange(6) - 1)
    decay = ancestors.double() @ step
    both = [tree_delta_rule(query, key, value, decay, beta, ancestors, s)[1] for s in states]
    commit_state(states, key.expand(2, -1, -1, -1), torch.stack(both), decay.expand(2, -1, -1))
    for got, start in zip(states, (state, 2 * state), strict=True):
        torch.testing.assert_close(got, recurrence(query, key, value, step, beta, start)[1])


def test_strong_decay_of_siblings_does_not_overflow():
    """G_i - G_j between siblings may be +hundreds; it is masked before the exponential."""
    parents = np.array([-1, 0, 0, 0, 1, 2])
    query, key, value, step, beta, state = draw(6, seed=5)
    step[1], step[2], step[3] = -900.0, -0.1, -300.0
    query, key, value, step, beta, state = (
        x.float() for x in (query, key, value, step, beta, state)
    )
    ancestors = ancestors_of(parents)
    out, corrections = tree_delta_rule(
        query, key, value, ancestors.float() @ step, beta, ancestors, state
    )
    assert torch.isfinite(out).all() and torch.isfinite(corrections).all()
    for node in range(6):
        path = path_of(parents, node)
        wanted, _ = recurrence(*(x[path] for x in (query, key, value, step, beta)), state)
        torch.testing.assert_close(out[node], wanted[-1], atol=1e-5, rtol=1e-5)


def test_a_slot_order_sum_of_decays_would_be_wrong():
    """A control: what a chain computes, cumulative sums over slots, is not what a tree needs."""
    parents = np.array([-1, 0, 0, 1])
    query, key, value, step, beta, state = draw(4, seed=6)
    ancestors = ancestors_of(parents)
    right, _ = tree_delta_rule(query, key, value, ancestors.double() @ step, beta, ancestors, state)
    wrong, _ = tree_delta_rule(query, key, value, step.cumsum(0), beta, ancestors, state)
    assert (right[2] - wrong[2]).abs().max() > 1e-3
    torch.testing.assert_close(right[:2], wrong[:2])  # the first two nodes are a chain


def test_convolution_rows_by_hand():
    """K = 4: rows 0..2 are committed inputs, row 3 + i is node i."""
    parents = np.array([-1, 0, 0, 1, 3, 4])
    assert conv_rows(parents, 4).tolist() == [
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 3, 5],
        [2, 3, 4, 6],
        [3, 4, 6, 7],
        [4, 6, 7, 8],
    ]


def test_the_convolution_reads_ancestors_not_neighbours():
    rng = np.random.default_rng(0)
    parents = parents_of(rng, 30, 9)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 11, generator=generator, dtype=torch.float64)
    history = torch.randn(KERNEL - 1, 11, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, KERNEL, generator=generator, dtype=torch.float64)
    got = tree_conv(inputs, history, weight, torch.from_numpy(conv_rows(parents, KERNEL)))
    for node in range(30):
        seen = torch.cat([history, inputs[path_of(parents, node)]])[-KERNEL:]
        wanted = torch.nn.functional.silu((seen * weight.T).sum(0))
        torch.testing.assert_close(got[node], wanted)
