"""What training says that it will read is what it reads, and is read ahead."""

import time
from types import SimpleNamespace

import torch

from drafttrain.data.order import sample_at
from drafttrain.data.store_reader import FeatureStore
from drafttrain.features import open_features
from drafttrain.trainer import Trainer
from tests.data.store_factory import LENGTHS, make_store

from .drafter.factory import make_sample

CPU = torch.device("cpu")


class Calls(list):
    """A source that writes down what it is asked."""

    def wait(self, positions):
        self.append(("wait", list(positions)))

    def prefetch(self, positions):
        self.append(("prefetch", list(positions)))

    def read(self, positions):
        self.append(("read", list(positions)))
        return [(0, make_sample(12, seed=position)) for position in positions]


def test_a_rank_waits_for_the_step_and_names_its_own_part_of_this_and_the_next():
    trainer = object.__new__(Trainer)
    train = SimpleNamespace(global_batch=4, micro_batch=1, anchors=4, packing=False)
    trainer.recipe = SimpleNamespace(train=train, seed=0)
    trainer.rank, trainer.world, trainer.total_steps, trainer.device = 1, 2, 2, CPU
    trainer.config = SimpleNamespace(block_size=4)
    trainer.features = calls = Calls()
    for step in range(2):
        assert len(trainer._load(step)) == 2
    assert calls == [
        ("wait", [0, 1, 2, 3]),
        ("prefetch", [2, 3, 6, 7]),
        ("read", [2]),
        ("read", [3]),
        ("wait", [4, 5, 6, 7]),
        ("prefetch", [6, 7]),
        ("read", [6]),
        ("read", [7]),
    ]


def test_a_stored_source_reads_ahead_what_it_was_told_and_no_final_states(tmp_path, monkeypatch):
    make_store(tmp_path)
    loaded, real = [], FeatureStore._load

    def load(store, i):
        loaded.append(i)
        return real(store, i)

    monkeypatch.setattr(FeatureStore, "_load", load)
    recipe = SimpleNamespace(
        extract=SimpleNamespace(features="stored"), store=lambda split: tmp_path, seed=3
    )
    source = open_features(recipe, CPU, rank=0)
    positions = [6, 7, 8, 9]  # over the end of an epoch of 8
    wanted = [sample_at(len(LENGTHS), 3, position) for position in positions]
    source.prefetch(positions)
    deadline = time.monotonic() + 10
    while len(loaded) < len(positions) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(loaded) == sorted({i for _, i in wanted})
    read = source.read(positions)
    assert [epoch for epoch, _ in read] == [epoch for epoch, _ in wanted] == [0, 0, 1, 1]
    assert [s.sample_id for _, s in read] == [source.sample_id(i) for _, i in wanted]
    assert all(sample.final is None for _, sample in read)
    assert len(loaded) == len(positions)
