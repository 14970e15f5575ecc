"""Settings of the trainer, as they stand in a recipe under ``train:``."""

from typing import Literal

from pydantic import Field, model_validator

from drafttrain.data.config import StrictModel


class TrainConfig(StrictModel):
    """The baseline DFlash recipe (arXiv 2602.06036), on DeepSpeed."""

    epochs: float = Field(default=6.0, gt=0, description="passes over the training store")
    global_batch: int = Field(gt=0, description="samples per optimizer step, over all ranks")
    micro_batch: int = Field(gt=0, description="samples per forward pass of one rank")
    packing: bool = Field(
        default=False, description="one row per micro-batch (documents masked) instead of padding"
    )
    anchors: int = Field(default=512, gt=0, description="anchors drawn per sample and epoch")
    gamma: float | None = Field(
        default=None, gt=0, description="slot weight exp(-(k-1)/gamma); unset: 7/5/4 for B=16/10/8"
    )
    lr: float = Field(default=6e-4, gt=0)
    warmup: float = Field(default=0.04, ge=0, lt=1, description="share of the steps")
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0, description="global gradient norm")
    zero_stage: Literal[0, 1, 2, 3] = 1
    precision: Literal["fp32", "bf16"] = Field(
        description="bf16 computes in bfloat16 with fp32 masters; on a CPU fp32 is faster"
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="layers run again in the backward pass and keep only their inputs: less memory",
    )
    stop_after_skipped: int = Field(
        default=3,
        gt=0,
        description="steps skipped in a row, for gradients that are not finite, that end the run",
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="such as 0.999: checkpoints hold, and are judged by, the moving average of the "
        "weights; after step t the decay is min(ema, (1+t)/(10+t))",
    )
    loggers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        default=["tensorboard"],
        description="who gets the numbers, besides metrics.jsonl; install wandb or mlflow yourself",
    )
    checkpoint_every: int = Field(gt=0, description="optimizer steps")
    keep_checkpoints: int = Field(
        default=2, gt=0, description="newest optimizer states kept; exported drafters stay"
    )

    @model_validator(mode="after")
    def _combinations(self) -> "TrainConfig":
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch "
                f"{self.micro_batch}"
            )
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError(
                "precision bf16 with zero_stage 0 keeps no correct fp32 masters in DeepSpeed: "
                "use zero_stage 1"
            )
        return self

    def steps(self, samples: int) -> int:
        """Optimizer steps of the whole training on so many samples."""
        return round(self.epochs * samples / self.global_batch)
