"""Settings of the target and of the extraction stage (``target:`` and ``extract:``)."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from drafttrain.data.config import StrictModel
from drafttrain.data.sizes import parse_bytes


class TargetConfig(StrictModel):
    """The frozen model that is to be decoded faster."""

    path: str = Field(min_length=1, description="a local folder or a hub id")
    revision: str | None = Field(default=None, description="hub revision; needs a hub id")
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["auto", "cpu", "cuda", "spread"] = Field(
        default="auto",
        description="auto: cuda where there is one, else cpu; spread: over all GPUs, then memory,"
        " then the target's own files",
    )
    max_memory: dict[int | str, str] | None = Field(
        default=None,
        min_length=1,
        description="of a spread target: sizes for its weights, such as {0: 60GB, cpu: 100GB};"
        " unset takes what is free",
    )

    @field_validator("max_memory")
    @classmethod
    def _sizes_of_devices(cls, given: dict[int | str, str] | None) -> dict[int | str, str] | None:
        found: dict[int | str, str] = {}
        for device, size in (given or {}).items():
            parse_bytes(size)
            if device != "cpu" and not str(device).isdecimal():
                raise ValueError(f"'{device}' is neither the number of a GPU nor 'cpu'")
            found[device if device == "cpu" else int(device)] = size
        return found or None

    @model_validator(mode="after")
    def _only_if_spread(self) -> "TargetConfig":
        if self.max_memory is not None and self.device != "spread":
            raise ValueError(f"max_memory has no effect with device '{self.device}': write spread")
        return self


class ExtractConfig(StrictModel):
    """What is taken from the target and how it is stored."""

    taps: list[int] | int = Field(
        default=5,
        description="layer ids L (output of layer L), or how many to space evenly on [1, layers-3]",
    )
    final_hidden: bool = Field(
        default=True, description="also store the last hidden state after the final norm"
    )
    features: Literal["stored", "rolling", "online"] = Field(
        default="stored",
        description="training reads a whole store, one that extraction fills ahead of it and"
        " empties behind it (rolling), or runs the target itself (online)",
    )
    store: Path | None = Field(
        default=None,
        description="folder of the stores train and eval; unset: <output>/store",
    )
    budget: str | None = Field(
        default=None, description="rolling: the training store never takes more, such as 500GB"
    )
    consumers: int = Field(
        default=1, gt=0, description="rolling: training runs that read the store side by side"
    )
    codec: Literal["bf16", "fp32", "fp8"] = Field(
        default="bf16",
        description="fp8: taps in e4m3 with a scale per token and tap, final in bf16",
    )
    shard_tokens: int = Field(default=65536, gt=0, le=1 << 28, description="tokens per shard")
    batch_tokens: int = Field(
        default=16384,
        gt=0,
        description="tokens per target forward; with another engine: asked for at a time",
    )
    claim_expiry_s: float = Field(
        default=120,
        gt=0,
        description="a worker that gave no sign of life for so long loses its shards to others",
    )
    engine: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="what computes the states; vllm must first agree with transformers on a few",
    )
    server_url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="of engine vllm, with /v1; its spool folder must be at the same path here",
    )

    @model_validator(mode="after")
    def _rolling(self) -> "ExtractConfig":
        rolling = self.features == "rolling"
        if rolling and self.budget is None:
            raise ValueError("features rolling needs a budget, such as budget: 500GB")
        if not rolling and (self.budget is not None or self.consumers != 1):
            raise ValueError(f"budget and consumers are for features rolling, not {self.features}")
        if self.budget is not None:
            parse_bytes(self.budget)
        return self

    @model_validator(mode="after")
    def _server(self) -> "ExtractConfig":
        if self.engine == "vllm" and self.server_url is None:
            raise ValueError("engine vllm needs server_url, for instance http://127.0.0.1:8000/v1")
        if self.engine == "transformers" and self.server_url is not None:
            raise ValueError("server_url is read by engine vllm only: set engine, or remove it")
        if self.engine == "vllm" and self.features == "online":
            raise ValueError("features online runs the target in the trainer: remove engine")
        return self

    @property
    def budget_bytes(self) -> int:
        """The budget of a rolling store."""
        assert self.budget is not None
        return parse_bytes(self.budget)
