"""A plain drafter folder: ``config.json`` + ``model.safetensors``, as the serving engines read it.

Written by ``save_drafter`` beside every checkpoint and read by ``load_drafter``, vLLM, SGLang and
the public reference class. Names and shapes are checked strictly in both directions: an engine
that ignores a misspelt name would serve random weights without an error.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafttrain.data.errors import CheckpointError
from drafttrain.data.files import publish, read_json, write_json

from .drafter.config import DrafterConfig
from .drafter.hf_config import from_hf_config, to_hf_config
from .drafter.model import Drafter

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor name of a drafter with its shape."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Drafter(config).state_dict().items()}


def save_drafter(config: DrafterConfig, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a drafter folder, each file atomically, the weights last.

    Args:
        config: fully resolved.
        weights: full (unpartitioned) tensors under their published names, one dtype.
        folder: created if needed.

    Raises:
        CheckpointError: when names or shapes are not exactly those of ``config``.
    """
    _check(config, {name: tuple(w.shape) for name, w in weights.items()}, folder)
    dtypes = {w.dtype for w in weights.values()}
    assert len(dtypes) == 1 and dtypes <= set(_DTYPE_NAMES), f"mixed weight dtypes {dtypes}"
    raw = to_hf_config(config) | {"dtype": _DTYPE_NAMES[dtypes.pop()]}
    write_json(folder / CONFIG_FILE, raw)
    tensors = {name: w.detach().cpu().contiguous() for name, w in weights.items()}
    publish(folder / WEIGHTS_FILE, lambda tmp: save_file(tensors, tmp, {"format": "pt"}))


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The resolved config of a drafter folder."""
    path = folder / CONFIG_FILE
    raw = read_json(path, CheckpointError, "name a folder with config.json and model.safetensors")
    return from_hf_config(raw, path)


def load_drafter(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Drafter:
    """Load a drafter folder strictly, in evaluation mode.

    Args:
        folder: an exported or published DFlash checkpoint.
        device: where to put it.
        dtype: cast to this; None keeps the stored dtype.

    Raises:
        CheckpointError: naming the file and the field or tensor at fault.
    """
    config = read_drafter_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{path} cannot be read ({exc}): export the drafter again") from None
    _check(config, {name: tuple(w.shape) for name, w in weights.items()}, path)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(weights, assign=True)
    return drafter.to(device=device, dtype=dtype).eval()


def _check(config: DrafterConfig, shapes: dict[str, tuple[int, ...]], where: Path) -> None:
    """Refuse missing, unexpected and misshapen tensors by name."""
    wanted = expected_shapes(config)
    if missing := sorted(set(wanted) - set(shapes)):
        raise CheckpointError(f"{where}: {len(missing)} tensors missing, first {missing[0]}")
    if extra := sorted(set(shapes) - set(wanted)):
        raise CheckpointError(f"{where}: {len(extra)} unexpected tensors, first {extra[0]}")
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(shapes[name])}, config.json implies {list(shape)}"
            )
