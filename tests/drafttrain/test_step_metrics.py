"""Numbers of a step against counting one by one, and FLOPs against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from drafttrain.batches import make_batch
from drafttrain.drafter.masks import dense_mask, layer_masks
from drafttrain.drafter.parallel import block_embeddings
from drafttrain.losses.head_loss import head_cross_entropy
from drafttrain.step_metrics import (
    batch_flops,
    peak_memory,
    slot_numbers,
    slot_sums,
    utilisation,
    visible_pairs,
)

from .drafter.factory import drafter_config, make_drafter, make_head, make_sample


def test_expected_accepted_length_is_the_mean_leading_run_and_the_bonus_token():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (2, 50, 1), generator=generator)
    supervised = torch.arange(3).expand(2, 50, 3) < labels
    hits = supervised & (torch.rand(2, 50, 3, generator=generator) < 0.7)
    runs, anchors, prefixes = 0, 0, [0, 0, 0]
    for row in range(2):
        for place in range(50):
            anchors += bool(supervised[row, place].any())
            for slot in range(3):
                if not hits[row, place, slot]:
                    break
                runs += 1
                prefixes[slot] += 1
    sums = slot_sums(hits[:1], supervised[:1]) + slot_sums(hits[1:], supervised[1:])
    found = slot_numbers(sums, 3)
    assert 0 < anchors < 100
    assert found["expected_accepted_length"] == pytest.approx(1 + runs / anchors)
    assert found["expected_accepted_length"] == pytest.approx(1 + sum(prefixes) / anchors)
    accuracy = [(hits[..., k].sum() / supervised[..., k].sum()).item() for k in range(3)]
    assert found["slot_accuracy"] == pytest.approx(accuracy, abs=1e-4)
    # Slots of a block are right or wrong together more often than chance.
    product = 1 + sum(torch.tensor(accuracy).cumprod(0)).item()
    assert found["expected_accepted_length"] != pytest.approx(product, rel=1e-3)


def test_no_slot_at_all_counts_as_nothing():
    none = torch.zeros(1, 1, 3, dtype=torch.bool)
    found = slot_numbers(slot_sums(none, none), 3)
    assert found["expected_accepted_length"] == 1.0 and found["slot_accuracy"] == [0.0] * 3


@pytest.mark.parametrize("window", [None, 1, 3, 6, 40])
def test_visible_pairs_are_the_mask_added_up(window):
    batch = make_batch(
        [(0, make_sample(30))], seed=0, anchors=9, block_size=4, packing=False, multiple=16
    )
    used = batch.layout.anchor_doc >= 0
    mask = dense_mask(batch.layout, window)[0, 0].unflatten(0, (-1, 4))
    starts = batch.layout.anchor_pos[used]
    assert len(starts) == 9
    assert visible_pairs(starts, 4, window) == mask[used[0]].sum()


def test_flops_are_those_of_the_matrix_products_that_run():
    config = drafter_config(4, "fs", window=8)
    drafter, head = make_drafter(config).train(), make_head()
    batch = make_batch([(0, make_sample(30))], seed=0, anchors=9, block_size=4, packing=False)
    with FlopCounterMode(display=False) as counter:
        hidden = drafter(
            batch.taps.decode(),
            batch.layout.context_pos,
            block_embeddings(head, batch.anchor_ids, 4, config.mask_token_id),
            batch.layout.block_pos,
            layer_masks(batch.layout, config.layer_types, config.sliding_window),
        )
        states = hidden.unflatten(1, (-1, 4))[:, :, 1:][batch.supervised]
        labels = batch.labels[batch.supervised]
        loss, _ = head_cross_entropy(states, head.lm_head, labels, torch.ones(len(labels)))
        loss.backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if "mm" in str(op) and "bmm" not in str(op))
    # Attention runs on the full table here; its share by the mask is checked above.
    pairs = sum(visible_pairs(batch.layout.anchor_pos[0], 4, w) for w in (None, 8))
    assert products == batch_flops(config, batch) - 12 * 64 * pairs


def test_utilisation_needs_a_known_device(monkeypatch):
    assert utilisation(1e12, 1.0, 1, bf16=True) is None  # a CPU
    assert peak_memory() > 1e7
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, used in [("NVIDIA H200", 0.5), ("NVIDIA GH200 480GB", 0.5), ("Acme 1", None)]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert utilisation(989e12, 1.0, 2, bf16=True) == used
        assert utilisation(989e12, 1.0, 2, bf16=False) is None
