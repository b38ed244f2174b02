"""The settings of the training loop: length, batch, precision, logging and checkpoints."""

from typing import Literal

from pydantic import Field

from massl.config import Settings
from massl.keyed_random import MAX_SEED


class TrainerSettings(Settings):
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of all random choices")
    epochs: int = Field(default=100, gt=0, description="length of the schedules, in passes over the data")
    max_steps: int | None = Field(default=None, gt=0, description="stop after this many steps; schedules do not change")
    batch_size: int = Field(default=1024, gt=0, description="images per step, over all processes")
    accumulation_steps: int = Field(default=1, gt=0, description="parts a batch is split into to save memory")
    precision: Literal["fp32", "bf16"] = Field(default="bf16", description="of the networks; weights stay float32")
    activation_checkpointing: bool = Field(default=False, description="save memory by recomputing activations")
    kernels: Literal["fused", "compiled", "plain"] = Field(
        default="fused",
        description="fused: hand-written kernels for plain ViTs in bf16 on a GPU, else plain; compiled: torch.compile, "
        "which needs a compiler and a minute at the start and suits ResNets on a GPU; plain: timm's code",
    )
    residual: Literal["bf16", "fp32"] = Field(
        default="bf16", description="residual stream in fused kernels; fp32, as under autocast, costs time and memory"
    )
    cuda_graph: bool = Field(
        default=True, description="record the step once and replay it, faster than Python; one process on a GPU only"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if available")
    skip_bad_steps: int = Field(
        default=0, ge=0, description="steps whose loss or gradients are not finite to leave out before the run stops"
    )
    stop_when_flat: int = Field(
        default=0, ge=0, description="end after this many probes without a higher other_view_top1; 0: never"
    )
    guard: Literal["auto", "off", "warn", "stop"] = Field(
        default="auto",
        description="if features fall below those the run started from (k-NN by 3 points): warn, or stop the run; "
        "auto: warn if it started from trained weights, else off",
    )
    log_every_steps: int = Field(default=50, gt=0, description="steps between rows of metrics.jsonl")
    checkpoint_every_steps: int = Field(default=1000, gt=0, description="steps between checkpoints")
    checkpoint_every_minutes: float = Field(
        default=10.0, ge=0, description="minutes without a checkpoint after which one is written; 0: only by steps"
    )
    keep_checkpoints: int = Field(default=2, gt=0, description="how many of the newest checkpoints to keep")
    milestone_every_epochs: int = Field(default=0, ge=0, description="also keep every n-th epoch's checkpoint; 0: none")
