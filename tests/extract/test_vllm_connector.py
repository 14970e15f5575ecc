"""The connector inside vLLM, on a stand-in for the parts of vLLM that it builds on."""

import sys
import types

import pytest
import torch

from drafttrain.extract import vllm_connector

CACHE = torch.arange(5 * 2 * 4 * 3.0).reshape(5, 2, 4, 3)  # blocks, layers, block size, width


class Stock:
    """What is used of vLLM's connector, whose own write needs a GPU."""

    def __init__(self):
        self._kv_cache, self._block_size, self._is_tp_rank_zero = CACHE, 4, True
        self._lock_fds, self._req_copy_events, self.written = {"a": 7}, {}, []
        config = types.SimpleNamespace(eagle_aux_hidden_state_layer_ids=(2, 5))
        model = types.SimpleNamespace(hf_config=config)
        speculative = types.SimpleNamespace(draft_model_config=model)
        self._vllm_config = types.SimpleNamespace(speculative_config=speculative)

    def _write_tensors(self, tensors, event, filename, lock):
        event.synchronize()
        self.written.append((tensors, filename, lock))

    def request_finished(self, request, block_ids):
        return (False, None) if request is None else (True, {"hidden_states_path": "p"})


@pytest.fixture
def connector(monkeypatch):
    stock = types.ModuleType("example_hidden_states_connector")
    stock.ExampleHiddenStatesConnector = Stock
    stock.extract_from_kv_cache = lambda cache, slots, count: cache[slots // 4, :, slots % 4][
        :count
    ]
    parent = "vllm"
    monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    for part in ("distributed", "kv_transfer", "kv_connector", "v1"):
        parent = f"{parent}.{part}"
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    sys.modules[parent].example_hidden_states_connector = stock
    vllm_connector._connector.cache_clear()
    yield vllm_connector.HiddenStates()
    vllm_connector._connector.cache_clear()


def test_states_are_read_from_the_blocks_in_their_order(connector):
    pending = types.SimpleNamespace(
        req_id="a", filename="f", block_ids=[3, 1], token_ids=torch.arange(6)
    )
    connector._submit_async_write(pending)
    ((tensors, filename, lock),) = connector.written
    rows = torch.cat([CACHE[3], CACHE[1]], dim=1).transpose(0, 1)[:6]
    assert torch.equal(tensors["hidden_states"], rows)
    assert (filename, lock) == ("f", 7) and connector._req_copy_events["a"].query()
    connector._is_tp_rank_zero = False
    connector._submit_async_write(pending)
    assert len(connector.written) == 1


def test_answers_name_the_layers(connector):
    assert connector.request_finished(None, []) == (False, None)
    delayed, params = connector.request_finished("request", [])
    assert delayed and params == {"hidden_states_path": "p", "layer_ids": [2, 5]}


def test_nothing_else_is_promised():
    with pytest.raises(AttributeError, match="Missing"):
        _ = vllm_connector.Missing
