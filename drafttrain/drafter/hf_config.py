"""DrafterConfig to and from the ``config.json`` of published DFlash checkpoints.

Field names follow the checkpoints that vLLM, SGLang and the public reference class read
(``DFlashDraftModel``, Qwen3 field names, ``dflash_config``). Reading is strict: a field that would
change what the drafter computes and that is not implemented here is refused, because an engine
would honour it and the two would disagree silently.
"""

from pathlib import Path
from typing import Any

from drafttrain.data.errors import CheckpointError

from .config import DrafterConfig, LayerType

ARCHITECTURE = "DFlashDraftModel"
# Keys of dflash_config that are understood; anything else is refused.
_DFLASH_KEYS = {"mask_token_id", "target_layer_ids", "block_size"}
# (field, value that means "off"): present with another value, they change the computation.
_UNSUPPORTED = (
    ("attention_bias", False),
    ("hidden_act", "silu"),
    ("rope_scaling", None),
    ("partial_rotary_factor", 1.0),
    ("draft_vocab_size", None),
    ("logit_scale", None),
)


def to_hf_config(config: DrafterConfig) -> dict[str, Any]:
    """Return the complete ``config.json`` content; nothing is left to an engine's defaults."""
    sliding = config.sliding_window is not None
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": config.tie_word_embeddings,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "trained_length": config.trained_length,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def from_hf_config(raw: dict[str, Any], source: Path) -> DrafterConfig:
    """Read a published or exported ``config.json``.

    Raises:
        CheckpointError: naming ``source`` and the field that is missing or not implemented.
    """

    def fail(problem: str) -> CheckpointError:
        return CheckpointError(f"{source}: {problem}")

    if raw.get("architectures") != [ARCHITECTURE]:
        raise fail(f"architectures is {raw.get('architectures')}, expected ['{ARCHITECTURE}']")
    for field, off in _UNSUPPORTED:
        if raw.get(field, off) not in (off, None):
            raise fail(f"{field} = {raw[field]!r} is not implemented (only {off!r})")
    dflash = raw.get("dflash_config")
    if not isinstance(dflash, dict):
        raise fail("dflash_config is missing (it holds mask_token_id and target_layer_ids)")
    extra = sorted(k for k in set(dflash) - _DFLASH_KEYS if dflash[k] not in (None, False))
    if extra:
        raise fail(f"dflash_config.{extra[0]} is not implemented")
    values: dict[str, Any] = {
        "mask_token_id": dflash.get("mask_token_id"),
        "target_layer_ids": dflash.get("target_layer_ids"),
        "block_size": raw.get("block_size", dflash.get("block_size")),
        "layer_types": _layer_types(raw),
        "rope_theta": _rope_theta(raw, fail),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "eos_token_id": raw.get("eos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
        "trained_length": raw.get("trained_length"),
    }
    for field in DrafterConfig.model_fields:
        if field not in values and field != "sliding_window":
            values[field] = raw.get(field)
    optional = ("eos_token_id", "pad_token_id", "trained_length")
    missing = [field for field, v in values.items() if v is None and field not in optional]
    if missing:
        raise fail(f"{missing[0]} is missing; it is never guessed")
    sliding = "sliding_attention" in values["layer_types"]
    if sliding and raw.get("sliding_window") is None:
        raise fail("layer_types has sliding_attention but sliding_window is missing")
    values["sliding_window"] = raw["sliding_window"] if sliding else None
    try:
        return DrafterConfig(**values)
    except ValueError as exc:
        raise fail(f"a field has the wrong type: {exc}") from None


def _layer_types(raw: dict[str, Any]) -> list[LayerType]:
    """``layer_types``, or Qwen3's rule for configs that predate the field."""
    if raw.get("layer_types") is not None:
        return raw["layer_types"]
    first = raw.get("max_window_layers", 0) if raw.get("use_sliding_window") else None
    return [
        "sliding_attention" if first is not None and i >= first else "full_attention"
        for i in range(raw.get("num_hidden_layers") or 0)
    ]


def _rope_theta(raw: dict[str, Any], fail: Any) -> float:
    """The rotary base from its flat or nested place; two different values are an error."""
    nested = raw.get("rope_parameters") or {}
    if nested.get("rope_type", "default") != "default":
        raise fail(f"rope_parameters.rope_type = {nested['rope_type']!r} is not implemented")
    if nested.get("partial_rotary_factor", 1.0) != 1.0:
        raise fail("rope_parameters.partial_rotary_factor is not 1: the drafter turns whole heads")
    flat, inner = raw.get("rope_theta"), nested.get("rope_theta")
    if flat is None and inner is None:
        raise fail("rope_theta is missing; it is never guessed")
    if flat is not None and inner is not None and flat != inner:
        raise fail(f"rope_theta is {flat} but rope_parameters.rope_theta is {inner}")
    return float(next(value for value in (flat, inner) if value is not None))
