"""For vLLM's process only: a connector that stores hidden states on any device, and names layers.

    --kv-transfer-config '{"kv_connector": "HiddenStates", "kv_role": "kv_producer",
        "kv_connector_module_path": "drafttrain.extract.vllm_connector", ...}'

vLLM's own ``ExampleHiddenStatesConnector`` copies through CUDA streams and pinned memory; on a CPU
the states are read from the cache and written at once. On both the answer says which auxiliary
layers the states are of. Guarantee: file and lock as vLLM's own. Cost on a CPU: the step waits for
the write. The class is made when vLLM asks for it: this module imports where there is no vLLM.
"""

import functools
from typing import Any


@functools.cache
def _connector() -> type:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import (  # type: ignore[import-not-found,unused-ignore]
        example_hidden_states_connector as stock,
    )

    class Written:
        """Stands for the event of a copy that is over."""

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    class HiddenStates(stock.ExampleHiddenStatesConnector):  # type: ignore[misc,unused-ignore]
        """See the module."""

        def _submit_async_write(self, pending: Any) -> None:
            if self._kv_cache is not None and self._kv_cache.is_cuda:
                super()._submit_async_write(pending)
                return
            if not self._is_tp_rank_zero:
                return
            blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
            slots = (blocks + torch.arange(self._block_size)).flatten()
            states = stock.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
            tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids}
            lock = self._lock_fds.pop(pending.req_id, None)
            self._write_tensors(tensors, Written(), pending.filename, lock)
            self._req_copy_events[pending.req_id] = Written()

        def request_finished(
            self, request: Any, block_ids: list[int]
        ) -> tuple[bool, dict[str, Any] | None]:
            delayed, params = super().request_finished(request, block_ids)
            if params is not None:
                config = self._vllm_config.speculative_config.draft_model_config.hf_config
                params["layer_ids"] = list(config.eagle_aux_hidden_state_layer_ids)
            return delayed, params

    return HiddenStates


def __getattr__(name: str) -> Any:
    if name == "HiddenStates":
        return _connector()
    raise AttributeError(name)
