"""The order of training samples: seekable, a permutation per epoch, and nothing else decides it."""

from drafttrain.data.order import epoch_order, sample_at, stream_order


def test_the_stream_walks_through_whole_epochs_without_a_gap():
    pairs = [sample_at(10, 3, position) for position in range(100)]
    for epoch in range(10):
        assert sorted(index for e, index in pairs if e == epoch) == list(range(10))
    assert [e for e, _ in pairs] == sorted(e for e, _ in pairs)
    assert [index for _, index in pairs[:37]] == stream_order(10, 3, 37).tolist()


def test_a_position_is_the_same_whatever_was_asked_before():
    """(fault kind 62)"""
    first = [sample_at(1000, 0, position) for position in range(984, 1016)]
    for position in (0, 4000, 7):
        sample_at(1000, 0, position)
    epoch_order.cache_clear()
    assert [sample_at(1000, 0, position) for position in range(984, 1016)] == first
    assert [sample_at(1000, 1, position) for position in range(984, 1016)] != first
