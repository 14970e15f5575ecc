"""The one home of layer-id conventions: which target layers are tapped, and how they are read.

Layer id L means the output of decoder layer L, before any later norm. The same state is
Transformers ``hidden_states[L + 1]`` and vLLM's auxiliary layer ``L + 1`` (both count the embedding
output as 0). ``TapRecorder`` turns one forward of ``[batch, tokens]`` ids into taps
``[batch, tokens, n_taps, hidden]`` through forward hooks. Cost: one copy when they are stacked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.data.errors import TargetError


def resolve_taps(spec: list[int] | int, num_layers: int) -> list[int]:
    """The layer ids that a recipe's ``taps`` means for a target.

    Args:
        spec: ascending layer ids, or how many ids to space evenly on [1, num_layers - 3]
            (a single one is num_layers // 2).
        num_layers: decoder layers of the target.

    Returns:
        Ascending, distinct ids in [0, num_layers - 2].

    Raises:
        TargetError: the target is too shallow for so many, or an id cannot be tapped.
    """
    if isinstance(spec, int):
        return _evenly_spaced(spec, num_layers)
    if not spec:
        raise TargetError(
            "taps: no layer ids given; name at least one, or how many to space evenly"
        )
    for layer in spec:
        _check_id(layer, num_layers)
    if spec != sorted(set(spec)):
        raise TargetError(
            f"taps: {spec} must be ascending without repeats (their order is the order of the"
            f" drafter's input); write {sorted(set(spec))}"
        )
    return list(spec)


def _evenly_spaced(count: int, num_layers: int) -> list[int]:
    room = max(num_layers - 3, 1)
    if count < 1:
        raise TargetError(f"taps: {count} layers to tap; at least 1 is needed")
    if count > room:
        raise TargetError(
            f"taps: {count} layers cannot be spaced on the {num_layers} layers of this target (at"
            f" most {room}): ask for fewer, or list the layer ids"
        )
    if count == 1:
        taps = [num_layers // 2]
    else:
        taps = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    for layer in taps:
        _check_id(layer, num_layers)
    assert taps == sorted(set(taps)), f"spacing gave {taps} for {num_layers} layers"
    return taps


def _check_id(layer: int, num_layers: int) -> None:
    if layer == num_layers - 1:
        raise TargetError(
            f"taps: layer {layer} is the last of {num_layers}: engines disagree whether its state"
            " is taken before or after the final norm; use an earlier layer"
        )
    if not 0 <= layer < num_layers:
        raise TargetError(
            f"taps: layer {layer} does not exist, the target has layers 0 to {num_layers - 1}"
            f" (0 to {num_layers - 2} can be tapped)"
        )


class ForwardStopped(Exception):
    """A forward ended after its last tapped layer."""


class TapRecorder:
    """Records the outputs of some decoder layers during forwards; use as a context manager.

    Args:
        layers: all decoder layers of the target, in order.
        taps: layer ids to record, ascending.
        stop: end each forward after the last tapped layer by raising ``ForwardStopped``, for
            callers that want nothing behind it.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.ModuleList,
        taps: Sequence[int],
        stop: bool = False,
    ) -> None:
        self._layers = layers
        self._taps = list(taps)
        self._stop = stop
        self._states: dict[int, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "TapRecorder":
        assert not self._handles, "the recorder is already active"
        for layer in self._taps:
            hook = self._hook(layer)
            self._handles.append(self._layers[layer].register_forward_hook(hook))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._states.clear()

    def _hook(self, layer: int) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            assert layer not in self._states, f"layer {layer} ran twice without collect()"
            # Some decoder layers return a tuple whose first entry is the hidden state.
            self._states[layer] = output[0] if isinstance(output, tuple) else output
            if self._stop and layer == self._taps[-1]:
                raise ForwardStopped

        return record

    def collect(self) -> Tensor:
        """The taps of the forward since the last call: ``[batch, tokens, n_taps, hidden]``.

        They are on the first tapped layer's device; those of a spread target are on several.
        """
        missing = [layer for layer in self._taps if layer not in self._states]
        assert not missing, f"layers {missing} did not run since the last collect()"
        device = self._states[self._taps[0]].device
        taps = torch.stack([self._states[layer].to(device) for layer in self._taps], dim=-2)
        self._states.clear()
        return taps
