"""Sizes of views and networks, and the arithmetic of a training step. Pure functions."""

import re
from dataclasses import dataclass

import timm
import torch
from timm.models.vision_transformer import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class ViewShapes:
    num_global: int
    global_size: int  # pixels
    num_local: int
    local_size: int  # pixels; 0 without local views

    @property
    def num_views(self) -> int:
        return self.num_global + self.num_local

    def __str__(self) -> str:
        local = f"+{self.num_local}x{self.local_size}" if self.num_local else ""
        return f"{self.num_global}x{self.global_size}{local}"


def parse_views(text: str) -> ViewShapes:
    """'2x224+10x96' -> two views of 224 pixels and ten of 96."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+)x(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} names no views; expected e.g. 2x224+10x96 or 2x224")
    num_global, global_size, num_local, local_size = (int(number or 0) for number in match.groups())
    return ViewShapes(num_global=num_global, global_size=global_size, num_local=num_local, local_size=local_size)


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    dim: int
    depth: int
    hidden_dim: int  # of the MLP
    patch_size: int  # pixels
    num_prefix_tokens: int = 1

    def num_tokens(self, image_size: int) -> int:
        return (image_size // self.patch_size) ** 2 + self.num_prefix_tokens


def transformer_shape(model_name: str) -> TransformerShape | None:
    """Shape of a timm vision transformer; None for other networks, whose arithmetic is not counted here."""
    with torch.device("meta"):  # allocates no weights
        model = timm.create_model(model_name, num_classes=0)
    if not isinstance(model, VisionTransformer):
        return None
    return TransformerShape(
        dim=model.embed_dim,
        depth=len(model.blocks),
        hidden_dim=model.get_submodule("blocks.0.mlp.fc1").out_features,  # type: ignore[arg-type]
        patch_size=model.patch_embed.patch_size[0],
        num_prefix_tokens=model.num_prefix_tokens,
    )


def forward_flop(network: TransformerShape, num_tokens: int, *, class_token_only_at_the_end: bool = False) -> float:
    """FLOP of all blocks for one image of T tokens; a multiplication and an addition count as two.

    Per block, with dimension d and hidden dimension h:
        queries, keys, values, output    2 T d * 4 d
        MLP                              2 T * 2 d h
        similarities, weighted values    2 T T d * 2
    With `class_token_only_at_the_end` the last block is computed only for the class token, because nothing else leaves
    the network: keys and values of all tokens (2 T d * 2 d), the rest for one token.
    """
    dim, hidden_dim = network.dim, network.hidden_dim

    def block(num_queries: int) -> float:
        projections = 2.0 * dim * (2 * num_queries * dim + 2 * num_tokens * dim)
        mlp = 4.0 * num_queries * dim * hidden_dim
        attention = 4.0 * num_queries * num_tokens * dim
        return projections + mlp + attention

    last = block(1) if class_token_only_at_the_end else block(num_tokens)
    return (network.depth - 1) * block(num_tokens) + last


def step_flop_per_image(
    network: TransformerShape, views: ViewShapes, *, class_token_only_at_the_end: bool = False
) -> float:
    """FLOP of one training step for one image: student views forward and backward, teacher's global views forward.

    A backward pass costs two forward passes: one product for the gradient of the input, one for that of the weights.
    ViT-S/16 with 2x224+10x96 has 764 student and 394 teacher tokens and needs 121 GFLOP. Left out, for these sizes: the
    patch embedding (1.1 GFLOP), the head (0.4) and the memory loss (0.9 at 65,536 rows), so a share of the card's rate
    computed from this is 2 % too low.
    """
    global_flop = forward_flop(
        network, network.num_tokens(views.global_size), class_token_only_at_the_end=class_token_only_at_the_end
    )
    local_flop = 0.0
    if views.num_local:
        local_flop = forward_flop(
            network, network.num_tokens(views.local_size), class_token_only_at_the_end=class_token_only_at_the_end
        )
    student = views.num_global * global_flop + views.num_local * local_flop
    teacher = views.num_global * global_flop
    return 3.0 * student + teacher
