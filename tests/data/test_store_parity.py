"""Shards of another engine are read only beside figures that pass."""

import json

import pytest

from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import check_store
from drafttrain.data.store_parity import COSINE, ERROR, parity_path, proved
from drafttrain.data.store_reader import FeatureStore

from .store_factory import change_record, make_meta, make_store, prove


@pytest.fixture
def made(tmp_path):
    """A store whose second shard is another engine's."""
    made = make_store(tmp_path / "store")
    change_record(made.folder, made.shards[1].stem, engine="vllm")
    return made


def test_a_proof_admits_the_shard_and_no_proof_does_not(made):
    """(fault kind 28)"""
    with pytest.raises(StoreError, match=r"shard-00001.json: written by engine 'vllm'.* does not"):
        FeatureStore(made.folder)
    assert list(check_store(made.folder).bad) == [1]
    prove(made.folder, made.meta, COSINE, ERROR)
    assert len(FeatureStore(made.folder)) == len(made.samples)
    assert check_store(made.folder).problems() == []
    assert proved(made.folder, made.meta) == {"vllm"}


@pytest.mark.parametrize("figures", [(0.9989, 0.0), (1.0, 0.051), (float("nan"), 0.0)])
def test_figures_that_do_not_pass_are_no_proof(made, figures):
    prove(made.folder, made.meta, *figures)
    with pytest.raises(StoreError, match="has not passed for all of tap 1, tap 3, the final"):
        FeatureStore(made.folder)


def _edited(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_damaged_proof_or_one_of_another_store_is_none(made, tmp_path):
    path = parity_path(made.folder, "vllm")
    other = make_meta(tmp_path / "other", shard_tokens=99)
    for damage, words in (
        (lambda: _edited(path, samples={"s": 4}), "does not match its seal"),
        (lambda: _edited(path, engine=3), "field 'engine'"),
        (lambda: path.write_text("{"), "not valid JSON"),
        (lambda: prove(made.folder, other), "proves vllm for a store with settings"),
    ):
        prove(made.folder, made.meta)
        FeatureStore(made.folder)
        damage()
        with pytest.raises(StoreError, match=f"{words}.*run `drafttrain extract`"):
            FeatureStore(made.folder)


def test_a_proof_of_fewer_columns_is_none(made):
    fewer = made.meta.model_copy(update={"final_hidden": False})
    prove(made.folder, fewer)
    path = parity_path(made.folder, "vllm")
    value = json.loads(path.read_text()) | {"store": made.meta.identity()}
    path.write_text(json.dumps(value))
    assert proved(made.folder, made.meta) == set()
