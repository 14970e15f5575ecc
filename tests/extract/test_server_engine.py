"""A second engine over real HTTP: its store, what it may not do, and what survives an outage."""

import os
import signal
import time

import pytest
import torch

from drafttrain.data.errors import StoreError
from drafttrain.data.store_check import verify_store
from drafttrain.data.store_format import Shard
from drafttrain.data.store_parity import COSINE, read_parity
from drafttrain.data.store_reader import FeatureStore
from drafttrain.extract import server
from drafttrain.extract.worker import extract

from .factory import CONFIG, LENGTHS, NUM_SHARDS, make_table, make_target, save_target
from .processes import Server, wait_for_files
from .state_server import StatesServer

LAYERS = [1, 3, 5, 6]  # taps 0, 2, 4 and the state before the final norm


@pytest.fixture
def served(tmp_path):
    with StatesServer(make_target("qwen3"), LAYERS, tmp_path / "spool") as running:
        yield running


@pytest.fixture
def spool(tmp_path):
    return tmp_path / "spool"


def through(served: StatesServer, **changes):
    """The configuration of an extraction through a server."""
    values = {"engine": "vllm", "server_url": served.url, **changes}
    return CONFIG.model_copy(update=values)


def differences(one: FeatureStore, other: FeatureStore) -> tuple[float, float]:
    """Largest relative errors of taps and final states, over whole samples."""
    found = [0.0, 0.0]
    assert len(one) == len(other)
    for i in range(len(one)):
        a, b = one.sample(i), other.sample(i)
        assert a.sample_id == b.sample_id and torch.equal(a.input_ids, b.input_ids)
        for k, (x, y) in enumerate([(a.taps, b.taps), (a.final, b.final)]):
            x, y = x.float(), y.float()
            found[k] = max(found[k], float(((x - y).norm(dim=-1) / y.norm(dim=-1)).max()))
    return found[0], found[1]


@pytest.mark.parametrize(("codec", "allowed"), [("fp32", 1e-5), ("bf16", 2**-7), ("fp8", 2**-3)])
def test_a_store_through_a_server_is_the_transformers_store(
    target, table, served, spool, tmp_path, codec, allowed
):
    """Also the final state, which vLLM gives before the final norm. (fault kinds 27, 28)"""
    plain = CONFIG.model_copy(update={"codec": codec})
    ours = extract(target, plain, table, tmp_path / "ours")
    theirs = extract(target, through(served, codec=codec), table, tmp_path / "theirs")
    assert max(differences(theirs, ours)) <= allowed
    assert ours.meta == theirs.meta
    assert {r.engine for r in verify_store(theirs.path).whole.values()} == {"vllm"}
    assert list(spool.iterdir()) == []
    parity = read_parity(theirs.path, theirs.meta, "vllm")
    assert set(parity.samples.values()) == {3, 9, 16, 40}
    assert min(column.min_cosine for column in parity.columns.values()) >= COSINE


def test_without_final_state_and_with_more_layers_than_wanted(target, table, served, tmp_path):
    served.layers, served.tells_layers = [6, 5, 0, 3, 1], True
    plain = CONFIG.model_copy(update={"final_hidden": False})
    ours = extract(target, plain, table, tmp_path / "ours")
    theirs = extract(target, through(served, final_hidden=False), table, tmp_path / "theirs")
    for i in range(len(ours)):
        assert torch.allclose(ours.sample(i).taps, theirs.sample(i).taps, atol=1e-5)


def _rows(change):
    return lambda files: {**files, "hidden_states": change(files["hidden_states"])}


def _normalised(states):
    states[:, -1] = make_target("qwen3").norm(states[:, -1])
    return states


FAULTS = {
    "one position late": (
        _rows(lambda s: torch.roll(s, 1, 0)),
        "rows come one position late: row t must",
    ),
    "one position early": (
        _rows(lambda s: torch.roll(s, -1, 0)),
        "rows come one position early: row t must",
    ),
    "final state normalised": (
        _rows(_normalised),
        "the final hidden state of the second .* before the final norm .auxiliary layer 6",
    ),
    "one row short": (_rows(lambda s: s[:-1]), "rows of states for .* prefix caching off"),
    "reused prefix": (_rows(lambda s: s[len(s) // 2 :]), "rows of states for .* prefix caching"),
    "rows of another request": (
        lambda files: {**files, "token_ids": files["token_ids"] + 1},
        "other token ids than .* without a drafter",
    ),
    "NaN": (_rows(lambda s: s * float("nan")), "cosine nan"),
    "another dtype": (_rows(lambda s: s.bfloat16()), "--dtype float32"),
    "a layer too few": (_rows(lambda s: s[:, 1:]), r"eagle_aux_hidden_state_layer_ids \[1, 3, 5"),
    "scaled": (_rows(lambda s: s * 1.1), "relative error 0.1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_states_are_refused_before_anything_is_written(
    target, table, served, spool, tmp_path, fault
):
    """(fault kinds 23, 28, 29, 30, 41)"""
    served.change, words = FAULTS[fault]
    with pytest.raises(StoreError, match=words):
        extract(target, through(served), table, tmp_path / "store")
    left = {path.suffix for path in (tmp_path / "store").iterdir()}
    assert left == {".json", ".safetensors"}  # store.json and the head
    assert not list((tmp_path / "store").glob("shard-*")) and list(spool.iterdir()) == []


@pytest.mark.parametrize("layers", [[0, 2, 4, 6], [2, 4, 6, 6], [1, 3, 5, 5]])
def test_layers_off_by_one_are_refused(target, table, served, tmp_path, layers):
    """Ids taken over unchanged, one too high, and the last layer's input. (fault kinds 25, 28)"""
    served.layers = layers
    with pytest.raises(StoreError, match=r"sample .* of the second engine is not the target's"):
        extract(target, through(served), table, tmp_path / "store")


def test_a_server_started_anew_with_other_layers_is_noticed(target, table, served, tmp_path):
    """Every repeated request is judged, and one sample of each shard."""
    probes = 5

    def restarted(number):
        if number == probes + 3:
            served.layers = [2, 4, 6, 6]
        return number == probes + 3

    served.drop = restarted
    with pytest.raises(StoreError, match=r"sample .* of a shard .* is not the target's"):
        extract(target, through(served), table, tmp_path / "store")


def test_a_server_that_dies_and_comes_back(target, table, served, spool, tmp_path, monkeypatch):
    """Lost connections and answers, files never written or cut short: asked for again.

    (fault kind 32)
    """
    monkeypatch.setattr(server, "_FIRST_WAIT_S", 0.01)
    served.drop = lambda number: 7 <= number < 12
    served.spoil = lambda number: {13: "lost", 15: "short", 17: "silent"}.get(number, "")
    theirs = extract(target, through(served), table, tmp_path / "theirs")
    assert len(served.requests) == 5 + len(LENGTHS) + 5 + 3
    ours = extract(target, CONFIG, table, tmp_path / "ours")
    assert max(differences(theirs, ours)) <= 1e-5
    assert list(spool.iterdir()) == []


def test_a_server_that_stays_away_is_named(target, table, served, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_PATIENCE_S", 0.5)
    served.drop = lambda number: number >= 9
    with pytest.raises(StoreError, match=r"127.0.0.1:\d+/v1 does not answer .* rerun"):
        extract(target, through(served), table, tmp_path / "store")
    served.drop = lambda number: False
    assert len(extract(target, through(served), table, tmp_path / "store")) == len(LENGTHS)


@pytest.mark.parametrize(
    ("route", "words"), [("/v2", "status 404"), ("", "names no model")], ids=["404", "no model"]
)
def test_an_address_that_is_no_such_server_is_named(target, table, served, tmp_path, route, words):
    config = through(served, server_url=served.url.removesuffix("/v1") + route)
    with pytest.raises(StoreError, match=rf"{words}.*check.*extract.server_url"):
        extract(target, config, table, tmp_path / "store")


def test_a_server_without_states_or_with_a_folder_of_its_own(target, table, served, tmp_path):
    served.answers = lambda path: {}
    with pytest.raises(StoreError, match=r"computes no hidden states.*extract_hidden_states"):
        extract(target, through(served), table, tmp_path / "store")
    served.answers = lambda path: {"hidden_states_path": f"/elsewhere/{path.name}"}
    with pytest.raises(StoreError, match=r"/elsewhere/.*does not exist.*the same path"):
        extract(target, through(served), table, tmp_path / "store")
    served.answers = lambda path: {"hidden_states_path": str(table)}
    with pytest.raises(StoreError, match=r"is not a file of request"):
        extract(target, through(served), table, tmp_path / "store")
    assert table.exists()  # what is not ours is never removed


def test_tokens_on_their_way_are_bounded(target, table, served, tmp_path):
    """(fault kind 32)"""
    served.latency = 0.01
    extract(target, through(served, batch_tokens=45), table, tmp_path / "store")
    assert 20 < served.most_tokens <= 45


def test_what_dead_workers_left_is_removed(target, table, served, spool, tmp_path):
    """(fault kind 32)"""
    dead = spool / "cmpl-drafttrain-unknown-1-1-aa-0-0-0.safetensors"
    ended = spool / "cmpl-drafttrain-x-0.safetensors"
    foreign = spool / "somebody.safetensors"
    for path in (dead, ended, foreign):
        path.write_bytes(b"")
    os.utime(dead, (1, 1))
    extract(target, through(served), table, tmp_path / "store")
    assert sorted(spool.iterdir()) == sorted([ended, foreign])


def test_where_nothing_is_left_to_do_no_server_is_needed(target, table, tmp_path):
    extract(target, CONFIG, table, tmp_path / "store")
    nobody = {"engine": "vllm", "server_url": "http://127.0.0.1:9/v1"}
    extract(target, CONFIG.model_copy(update=nobody), table, tmp_path / "store")
    assert not (tmp_path / "store" / "parity-vllm.json").exists()


def test_a_mixed_store_needs_the_proof(target, table, served, tmp_path):
    """(fault kind 28)"""
    folder = tmp_path / "store"
    extract(target, CONFIG, table, folder)
    for index in (1, 4):
        (folder / Shard.named(index).record).unlink()
    assert len(extract(target, through(served), table, folder)) == len(LENGTHS)
    engines = [r.engine for _, r in sorted(verify_store(folder).whole.items())]
    assert engines == ["vllm" if i in (1, 4) else "transformers" for i in range(NUM_SHARDS)]
    (folder / "parity-vllm.json").unlink()
    for read in (FeatureStore, verify_store):
        with pytest.raises(StoreError, match=r"shard-00001.json: written by engine 'vllm'"):
            read(folder)
    # The same command proves it again and writes nothing else.
    before = len(served.requests)
    extract(target, through(served), table, folder)
    assert len(served.requests) == before + 5
    assert len(FeatureStore(folder)) == len(LENGTHS)
    extract(target, through(served), table, folder)
    assert len(served.requests) == before + 5


def test_a_killed_extraction_is_resumed(tmp_path, served, spool, target):
    """(fault kinds 32, 33)"""
    table = make_table(tmp_path / "many.parquet", LENGTHS * 3)
    served.layers, served.latency = [2, 4, 6], 0.05  # taps of the killed runs
    processes = Server(save_target(tmp_path / "target", "qwen3"), table, tmp_path / "errors")
    out = tmp_path / "store"
    for files in (6, 15):
        pid = processes.start(out, server_url=served.url)
        wait_for_files(out, files)
        wait_for_files(spool, 1, "*.lock")
        os.kill(pid, signal.SIGKILL)
        assert processes.wait(pid)[0] == -signal.SIGKILL
    time.sleep(0.2)  # the server still writes what it was asked for
    assert len(list(spool.iterdir())) > 0
    sealed = {path.name: path.read_bytes() for path in out.glob("shard-*.json")}
    assert processes.run(out, server_url=served.url) == (0, "")
    processes.close()
    for name, content in sealed.items():
        assert (out / name).read_bytes() == content
    verify_store(out)
    assert list(spool.iterdir()) == []
