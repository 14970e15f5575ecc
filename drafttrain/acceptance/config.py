"""Settings of the acceptance stage, as they stand in a recipe under ``eval:``."""

from pydantic import Field, model_validator

from drafttrain.data.config import StrictModel


class EvalConfig(StrictModel):
    """How acceptance length is measured."""

    tree_budgets: list[int] = Field(
        default=[8, 32, 64], description="draft-tree sizes: nodes without the root"
    )
    live_prompts: int = Field(
        default=0,
        ge=0,
        description="prompts per data set decoded with the target; 0 is replay only",
    )
    max_new_tokens: int = Field(default=256, gt=1, description="limit of a live response")
    temperatures: list[float] = Field(
        default=[0.0], min_length=1, description="live decoding temperatures; 0 is greedy"
    )
    bootstrap_resamples: int = Field(default=1000, ge=100, description="for the 95 % intervals")
    context_buckets: list[int] = Field(
        default=[1024, 4096, 16384], description="upper ends of the context-length buckets, tokens"
    )
    seed: int = Field(default=0, ge=0, description="of the sampled decoding and the bootstrap")

    @model_validator(mode="after")
    def _sensible(self) -> "EvalConfig":
        for name in ("tree_budgets", "context_buckets"):
            values = getattr(self, name)
            if any(value < 1 for value in values) or sorted(set(values)) != values:
                raise ValueError(f"{name} {values} must be positive and strictly ascending")
        if any(value < 0 for value in self.temperatures):
            raise ValueError(f"temperatures {self.temperatures} must not be negative")
        if len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError(f"temperatures {self.temperatures} names one twice")
        return self
