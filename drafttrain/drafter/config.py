"""The drafter's shape: what a recipe asks for, and the fully resolved form a checkpoint stores.

A missing mask id, layer id or rotary base is an error, never a default. ``hf_config.py`` writes the
resolved form as the ``config.json`` of published DFlash checkpoints and reads it back.
"""

from typing import Literal

from pydantic import Field, model_validator

from drafttrain.data.config import StrictModel

LayerType = Literal["full_attention", "sliding_attention"]


class DrafterRecipe(StrictModel):
    """The ``drafter:`` section. Width, vocabulary and rotary base are the target's."""

    block_size: int = Field(default=16, ge=2, description="B: the anchor and B-1 drafted slots")
    mask_token_id: int = Field(ge=0, description="an id that never occurs in the corpus")
    num_hidden_layers: int = Field(default=5, gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    layer_types: list[LayerType] | None = Field(
        default=None, description="one per layer; unset means full_attention everywhere"
    )
    sliding_window: int | None = Field(
        default=None, gt=0, description="tokens a sliding layer sees, itself included"
    )
    init: str | None = Field(
        default=None, description="folder of an exported drafter to start from"
    )

    @model_validator(mode="after")
    def _combinations(self) -> "DrafterRecipe":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even (rotary pairs)")
        types = self.layer_types
        if types is not None and len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(types)} entries for {self.num_hidden_layers} layers"
            )
        sliding = types is not None and "sliding_attention" in types
        if sliding and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention: set sliding_window")
        if not sliding and self.sliding_window is not None:
            raise ValueError("sliding_window has no effect without a sliding_attention layer")
        return self


class DrafterConfig(StrictModel):
    """Every value that decides what the drafter computes, and the lengths it was trained on."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    num_target_layers: int
    layer_types: list[LayerType]
    sliding_window: int | None
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    trained_length: int | None = None
    """Tokens of the longest training sample; unset in checkpoints that do not say."""

    def differences(self, other: "DrafterConfig") -> list[str]:
        """Fields in which two drafters compute differently; how they were trained is not one."""
        return [
            name
            for name in type(self).model_fields
            if name != "trained_length" and getattr(self, name) != getattr(other, name)
        ]

    @property
    def num_taps(self) -> int:
        """How many target layers feed the context features."""
        return len(self.target_layer_ids)

    @property
    def num_draft_tokens(self) -> int:
        """B-1: slots that predict a token (slot 0 is the anchor)."""
        return self.block_size - 1
