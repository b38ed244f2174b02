"""Settings of a run that starts from existing weights: what is taken from them, and how training begins."""

from typing import Literal

from pydantic import Field

from massl.config import Settings

# Why these values: docs/continue.md. They are for transformers that other recipes trained.
LAYER_DECAY = 0.75
LEARNING_RATE_FACTOR = 0.2
_HEAD_SHARE = 0.1  # of the run in which only a new head is trained ...
_MOST_HEAD_EPOCHS = 10.0  # ... and at most these


class InitSettings(Settings):
    """Without `weights` a run starts from random weights and the other values have no effect."""

    weights: str | None = Field(
        None,
        description="existing weights to start from: a run of massl, a weights file, or a timm name with a tag; the "
        "backbone's architecture comes from there",
    )
    part: Literal["all", "backbone"] | None = Field(
        None,
        description="what is taken. all: head and memory too, of a run of the same method; default: all if possible",
    )
    head_epochs: float | None = Field(
        None,
        ge=0.0,
        description="first epochs in which the backbone is frozen and the new head learns; default: a tenth of the "
        "run, at most 10; 0 if the head is taken too",
    )
    fill_memory: bool | None = Field(
        None,
        description="fill a memory with embeddings before the first step; default: if it is new or of another size",
    )
    keep_statistics: bool | None = Field(
        None,
        description="batch norms of the backbone keep the running averages of the weights and use them in training "
        "too; default: for weights that massl did not train",
    )
    layer_decay: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="learning rate of a layer / that of the layer above it; 1: equal; default: "
        f"{LAYER_DECAY} for transformers of others, else 1",
    )
    learning_rate_factor: float | None = Field(
        None,
        gt=0.0,
        description="factor on the peak learning rate while the backbone trains; default: "
        f"{LEARNING_RATE_FACTOR} for transformers of others, else 1",
    )

    def resolved(
        self, *, weights: str, has_head: bool, is_transformer: bool, keeps_statistics: bool, epochs: int
    ) -> "InitSettings":
        """All values decided, but for `fill_memory` where the memory is taken: it may have another size.

        `has_head`: the weights are a run of the same method; `keeps_statistics`: the default
        of `keep_statistics`.
        """
        is_gentle = is_transformer and not has_head
        part = self.part or ("all" if has_head else "backbone")
        is_new = part == "backbone"
        head_epochs = min(_MOST_HEAD_EPOCHS, _HEAD_SHARE * epochs) if is_new else 0.0
        return InitSettings(
            weights=weights,
            part=part,
            head_epochs=head_epochs if self.head_epochs is None else self.head_epochs,
            fill_memory=is_new or None if self.fill_memory is None else self.fill_memory,
            keep_statistics=keeps_statistics if self.keep_statistics is None else self.keep_statistics,
            layer_decay=self.layer_decay or (LAYER_DECAY if is_gentle else 1.0),
            learning_rate_factor=self.learning_rate_factor or (LEARNING_RATE_FACTOR if is_gentle else 1.0),
        )
