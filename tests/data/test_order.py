"""The order of training samples: seekable, a permutation per epoch, and nothing else decides it."""

from drafttrain.data.order import epoch_order, global_batch


def test_steps_walk_through_whole_epochs_without_a_gap():
    pairs = [pair for step in range(25) for pair in global_batch(10, 3, step, 4)]
    assert len(pairs) == 100
    for epoch in range(10):
        assert sorted(index for e, index in pairs if e == epoch) == list(range(10))
    assert [e for e, _ in pairs] == sorted(e for e, _ in pairs)


def test_a_step_is_the_same_whatever_was_asked_before():
    """(fault kind 62)"""
    first = global_batch(1000, 0, 123, 8)
    for step in (0, 500, 7):
        global_batch(1000, 0, step, 8)
    epoch_order.cache_clear()
    assert global_batch(1000, 0, 123, 8) == first
    assert global_batch(1000, 1, 123, 8) != first
