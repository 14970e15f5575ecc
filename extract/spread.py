"""Targets larger than one GPU: layers spread over GPUs, memory and disk, computed on the GPUs.

    target.device: spread  ->  options of from_pretrained  ->  a model whose modules carry hooks

Transformers fills the GPUs, then memory, and leaves the rest in the target's own files; hooks of
accelerate move a module's inputs to its device and load weights that wait elsewhere for each call.
Between calls such weights are on torch's "meta" device, without values: whoever reads a weight
itself does so inside ``own_weights``. Guarantee: the arithmetic is that of the target on one device
of the same kind. Cost: weights beside the GPUs travel once a forward, whatever its size.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drafttrain.data.errors import TargetError
from drafttrain.data.sizes import parse_bytes

from .config import TargetConfig

_LOGGER = logging.getLogger(__name__)


def placement(config: TargetConfig) -> dict[str, Any]:
    """What ``from_pretrained`` is told of a target's place; nothing for one that is not spread.

    Raises:
        TargetError: accelerate is missing, or there is no such GPU.
    """
    if config.device != "spread":
        return {}
    try:
        import accelerate  # noqa: F401  (Transformers needs it for a device map)
    except ImportError:
        raise TargetError(
            "target.device: spread needs accelerate, which is not installed here: run"
            " `pip install accelerate` (it comes with drafttrain[gpu]), or use auto, cpu or cuda"
        ) from None
    if config.max_memory is None:
        return {"device_map": "auto"}
    gpus = torch.cuda.device_count()
    for device in config.max_memory:
        if isinstance(device, int) and device >= gpus:
            raise TargetError(
                f"target.max_memory names GPU {device}, torch sees {gpus} (counted from 0)"
            )
    sizes = {device: parse_bytes(text) for device, text in config.max_memory.items()}
    return {"device_map": "auto", "max_memory": sizes}


def is_spread(model: nn.Module) -> bool:
    """Whether a model is on more than one device."""
    return hasattr(model, "_hf_hook")


def say_where(model: Any, layers: nn.ModuleList, name: str) -> None:
    """Log how many layers of a spread model are where."""
    places = {
        f"{prefix}." if prefix else "": place for prefix, place in model.hf_device_map.items()
    }
    names = {module: prefix for prefix, module in model.named_modules()}
    counts = Counter(
        next((str(places[p]) for p in places if f"{names[layer]}.".startswith(p)), "several")
        for layer in layers
    )
    shown = ", ".join(f"{count} on {place}" for place, count in counts.items())
    level = logging.WARNING if "disk" in counts else logging.INFO
    cost = "; those on disk are read again in every forward" if "disk" in counts else ""
    _LOGGER.log(level, "target '%s': %d layers, %s%s", name, len(layers), shown, cost)


def _loads(module: nn.Module) -> bool:
    """Whether a module's own weights are loaded for each call."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def unhook_whole_layers(layers: nn.ModuleList) -> None:
    """Leave a layer that stays on its device only the outermost of its hooks.

    The inner ones have nothing to move, and stand in the way of compiling.
    """
    for layer in layers:
        if is_spread(layer) and not any(_loads(module) for module in layer.modules()):
            from accelerate.hooks import remove_hook_from_submodules

            for child in layer.children():
                remove_hook_from_submodules(child)


def device_of(module: nn.Module) -> torch.device:
    """Where a module with weights computes."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None and hook.execution_device is not None:
        return torch.device(hook.execution_device)
    return next(module.parameters()).device


@contextmanager
def own_weights(module: nn.Module) -> Iterator[None]:
    """The module's own weights (not its children's) are on its device while the body runs."""
    if not _loads(module):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for a module, behind what accelerate put in front of its own."""
    name = "_old_forward" if is_spread(module) else "forward"
    own = vars(module).get(name)
    setattr(module, name, forward)
    try:
        yield
    finally:
        if own is None:
            delattr(module, name)
        else:
            setattr(module, name, own)
