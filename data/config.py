"""Settings of the data stage, as they stand in a recipe under ``data:``."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_RENDER_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "tokenize",
        "tools",
    }
)


class StrictModel(BaseModel):
    """Base of all recipe sections: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceConfig(StrictModel):
    """One file of conversations, or of token records made by ``drafttrain data regenerate``."""

    path: Path = Field(description="a .jsonl or .parquet file")
    name: str = Field(min_length=1, description="the data set's name in every report")
    where: dict[str, str | int | bool] = Field(
        default={}, description="keep only rows whose columns have these values"
    )
    limit: int | None = Field(
        default=None, gt=0, description="keep the first so many rows that can be read"
    )

    @model_validator(mode="after")
    def _known_format(self) -> "SourceConfig":
        if self.path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"path '{self.path}' must end in .jsonl or .parquet")
        return self


class RegenerateConfig(StrictModel):
    """How ``drafttrain data regenerate`` obtains the target's own responses."""

    prompts: Path | None = Field(default=None, description="a .jsonl or .parquet of conversations")
    output: Path | None = Field(default=None, description="the .jsonl of responses to write")
    engine: Literal["local", "server"] = Field(
        default="local", description="the target in this process, or an OpenAI-compatible server"
    )
    server_url: str | None = Field(default=None, description="e.g. http://127.0.0.1:8000/v1")
    server_model: str | None = Field(default=None, description="the model name the server knows")
    concurrency: int = Field(default=16, gt=0, description="requests in flight (server)")
    batch_size: int = Field(default=16, gt=0, description="prompts per batch (local)")
    max_new_tokens: int = Field(default=256, gt=0)
    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy")

    @model_validator(mode="after")
    def _known_formats(self) -> "RegenerateConfig":
        if self.prompts is not None and self.prompts.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"prompts '{self.prompts}' must end in .jsonl or .parquet")
        if self.output is not None and self.output.suffix != ".jsonl":
            raise ValueError(f"output '{self.output}' must end in .jsonl")
        if self.output is not None and self.output == self.prompts:
            raise ValueError(f"output and prompts are the same file '{self.output}'")
        return self

    @model_validator(mode="after")
    def _server_needs_url(self) -> "RegenerateConfig":
        if self.engine == "server" and not (self.server_url and self.server_model):
            raise ValueError("engine 'server' needs server_url and server_model")
        if self.engine == "local" and (self.server_url or self.server_model):
            raise ValueError("server_url and server_model have no effect with engine 'local'")
        return self


class DataConfig(StrictModel):
    """From conversations to the two sample tables (train and eval)."""

    train: list[SourceConfig] = Field(min_length=1)
    eval: list[SourceConfig] = Field(min_length=1)
    max_length: int = Field(gt=1, description="tokens; longer samples are truncated at the end")
    template_kwargs: dict[str, Any] = Field(
        default={}, description="passed to the chat template, e.g. {enable_thinking: false}"
    )
    regenerate: RegenerateConfig = RegenerateConfig()

    @model_validator(mode="after")
    def _template_variables_are_free(self) -> "DataConfig":
        taken = sorted(set(self.template_kwargs) & _RENDER_ARGUMENTS)
        if taken:
            raise ValueError(f"template_kwargs cannot set {taken}: the data stage sets them itself")
        return self
