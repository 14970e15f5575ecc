"""The target's rotary base, taken from the table it really uses.

``config.json`` may hold the base flat, nested, in both places, or under an old name, and a reader
that looks in the wrong place falls back to 10,000 without a word. So: the live table is rebuilt
from the resolved configuration and compared, and every base written in ``config.json`` must be that
one. Nothing is ever assumed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.data.errors import TargetError

# Names under which configurations write the base of their full-attention layers.
_FLAT_NAMES = ("rope_theta", "rotary_emb_base")
_NESTED_NAMES = ("rope_parameters", "rope_scaling")
# Targets with one rotary table per layer type; the drafter follows the full-attention one.
_LAYER_TYPE = "full_attention"


def resolve_rope_theta(
    decoder: nn.Module, config: PretrainedConfig, written: dict[str, Any], name: str
) -> float:
    """The rotary base of the target's (full-attention) layers.

    Args:
        decoder: the target without its LM head.
        config: its resolved text configuration.
        written: ``config.json`` as it is on disk.
        name: what to call the target in messages.

    Raises:
        TargetError: no rotary table, no base in ``config.json``, or bases that disagree.
    """
    live = _live_table(decoder, name)
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(_LAYER_TYPE, parameters)
    theta = parameters.get("rope_theta")
    if theta is None:
        raise TargetError(
            f"{name}: its configuration resolves to no rope_theta; write the base that the target"
            " was trained with into config.json"
        )
    expected = _rebuilt(config, parameters, 2 * len(live), float(theta)).to(live)
    tolerance = 1e-5 if live.dtype == torch.float32 else 2e-2
    if expected.shape != live.shape or not torch.allclose(live, expected, rtol=tolerance, atol=0):
        raise TargetError(
            f"{name}: its live rotary table (base about {_base(live):.6g}) is not the one that its"
            f" configuration describes ({parameters}); this version of Transformers does not read"
            " this config.json correctly"
        )
    bases = _written_bases(written)
    if not bases:
        raise TargetError(
            f"{name}: config.json names no rope_theta, the live rotary table uses {theta:g} by"
            f' default; if the target was trained with that, add "rope_theta": {theta:g}'
        )
    conflicts = {key: base for key, base in bases.items() if base != theta}
    if conflicts:
        raise TargetError(
            f"{name}: config.json says {conflicts}, the live rotary table uses {theta:g}: keep the"
            " one the target was trained with"
        )
    return float(theta)


def _live_table(decoder: nn.Module, name: str) -> Tensor:
    tables = {key: table for key, table in decoder.named_buffers() if key.endswith("inv_freq")}
    originals = [key for key in tables if key.endswith("original_inv_freq")]
    for key in originals:  # the unscaled copy that dynamic scaling keeps
        del tables[key]
    typed = {key: table for key, table in tables.items() if _LAYER_TYPE in key}
    for table in (typed or tables).values():
        return table.detach().cpu()
    raise TargetError(
        f"{name}: no rotary position table found; drafters need a target with rotary positions"
    )


def _rebuilt(
    config: PretrainedConfig, parameters: dict[str, Any], rotary_dims: int, theta: float
) -> Tensor:
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, rotary_dims, 2, dtype=torch.int64).float() / rotary_dims
        return 1.0 / theta**exponents
    typed = _LAYER_TYPE in (getattr(config, "rope_parameters", None) or {})
    options = {"layer_type": _LAYER_TYPE} if typed else {}
    table, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
    return table


def _base(table: Tensor) -> float:
    """Base of an unscaled table, from its last entry."""
    count = len(table)
    return float(table[-1].double()) ** (-count / max(count - 1, 1))


def _written_bases(written: dict[str, Any]) -> dict[str, float]:
    """Every full-attention base in ``config.json``, by the place it stands in."""
    bases: dict[str, float] = {}
    for prefix, part in (("", written), ("text_config.", written.get("text_config") or {})):
        for flat in _FLAT_NAMES:
            if part.get(flat) is not None:
                bases[prefix + flat] = float(part[flat])
        for nested in _NESTED_NAMES:
            group = part.get(nested) or {}
            group = group.get(_LAYER_TYPE, group)
            if group.get("rope_theta") is not None:
                bases[f"{prefix}{nested}.rope_theta"] = float(group["rope_theta"])
    return bases
