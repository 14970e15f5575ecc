"""New forwards of random tokens: what agrees, what does not, and what is allowed."""

import dataclasses

import pytest
from safetensors.torch import load_file, save_file

from drafttrain.data.errors import StoreError
from drafttrain.data.store_reader import FeatureStore
from drafttrain.extract import recheck
from drafttrain.extract.recheck import check_states
from drafttrain.extract.worker import extract
from tests.data.store_factory import change_record

from .factory import CONFIG, LENGTHS, count_forwards, make_target


@pytest.mark.parametrize(("codec", "allowed"), [("fp32", 1e-3), ("bf16", 5e-3), ("fp8", 5e-2)])
def test_stored_states_agree_with_the_target(tmp_path, target, table, codec, allowed):
    config = CONFIG.model_copy(update={"codec": codec})
    store = extract(target, config, table, tmp_path / "store")
    check = check_states(target, store, 1000)
    assert check.tokens == sum(LENGTHS) and not check.bad and check.tolerance == allowed
    assert list(check.cosine) == ["tap 0", "tap 2", "tap 4", "the final hidden state"]
    assert all(cosine > (0.999 if codec == "fp8" else 0.9999) for cosine in check.cosine.values())
    assert all(error < allowed for error in check.error.values())
    assert (max(check.error.values()) > 1e-3) == (codec != "fp32")


def change_rows(store, index: int, change) -> FeatureStore:
    """The store, after its shard's states were changed under a fitting record."""
    path = store.path / f"shard-{index:05d}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    change_record(store.path, path.stem)
    return FeatureStore(store.path)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda t: t["taps"][:, 1].copy_(t["taps"][:, 2].clone()), "tap 2"),  # a layer off
        (lambda t: t["taps"].copy_(t["taps"].roll(1, dims=0)), "tap 0"),  # a token off
        (lambda t: t["final"].mul_(1.01), "final hidden state"),  # the cosine cannot see it
        (lambda t: t["taps"][:, 2].neg_(), "tap 4"),
    ],
)
def test_other_states_are_found_in_their_shard(tmp_path, target, table, change, names):
    """(fault kinds 21, 23)"""
    store = extract(target, CONFIG, table, tmp_path / "store")
    check = check_states(target, change_rows(store, 3, change), 1000)
    assert list(check.bad) == [3]
    assert names in check.bad[3] and "shard-00003.safetensors: sample" in check.bad[3]
    assert "\n" not in check.bad[3]


def test_the_seed_chooses_the_tokens(tmp_path, target, table, monkeypatch):
    store = extract(target, CONFIG, table, tmp_path / "store")
    seen = count_forwards(monkeypatch, recheck)
    drawn = []
    for seed in (0, 0, 1):
        seen.clear()
        assert check_states(target, store, 4, seed).tokens == 4
        drawn.append(list(seen))
    assert drawn[0] == drawn[1] != drawn[2]


def test_another_target_is_refused(tmp_path, target, table):
    store = extract(target, CONFIG, table, tmp_path / "store")
    with pytest.raises(StoreError, match=r"was made from target .*give the recipe"):
        check_states(make_target("qwen3", seed=1), store, 4)
    disguised = dataclasses.replace(make_target("qwen3", seed=1), fingerprint=target.fingerprint)
    assert len(check_states(disguised, store, 1000).bad) == store.meta.num_shards
