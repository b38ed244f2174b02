"""The decoder of a masked autoencoder: predicts all patches from the visible ones (He et al., CVPR 2022)."""

import functools

import torch
from pydantic import Field
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from massl.config import RecipeError, Settings
from massl.nn.positions import resample_positions, sine_cosine_positions
from massl.nn.transformer.plain import FUSED_HEAD_DIMS, KernelOptions


class DecoderSettings(Settings):
    dim: int = Field(default=512, gt=0, description="width of the decoder's tokens")
    depth: int = Field(default=8, gt=0, description="transformer blocks of the decoder")
    num_heads: int = Field(default=16, gt=0, description="attention heads per block")


class PatchDecoder(nn.Module):
    """A small transformer over the whole grid: tokens of visible patches, a learned mask token for hidden ones.

    It is not needed after training. Its position embeddings are fixed sines and cosines, like those of MAE's encoder.
    """

    positions: Tensor  # [1, N, dim]

    def __init__(self, settings: DecoderSettings, *, in_dim: int, out_dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        if settings.dim % settings.num_heads or settings.dim % 4:
            raise RecipeError(
                f"method.decoder.dim {settings.dim} must be a multiple of 4 (for position embeddings) and of "
                f"method.decoder.num_heads ({settings.num_heads})"
            )
        norm = functools.partial(nn.LayerNorm, eps=1e-6)
        self.embed = nn.Linear(in_dim, settings.dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, settings.dim))
        dim, heads = settings.dim, settings.num_heads
        blocks = (Block(dim, heads, qkv_bias=True, norm_layer=norm) for _ in range(settings.depth))  # type: ignore[arg-type]
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm(settings.dim)
        self.predict = nn.Linear(settings.dim, out_dim)
        self._head_dim = settings.dim // settings.num_heads
        self.activation_checkpointing = False
        table = sine_cosine_positions(settings.dim, grid, first_axis="columns")
        # without the class token's row, which is zero
        self.register_buffer("positions", table[None, 1:], persistent=False)

    def forward(
        self,
        tokens: Tensor,
        kept: Tensor,
        grid: tuple[int, int],
        *,
        fused_kernels: bool = False,
        float32_stream: bool = False,
    ) -> Tensor:  # [R, prefix + n, in_dim], [R, n] int64 -> [R, N, out_dim]
        """Predictions for all N patches. `tokens`: class and register tokens, then visible patches in `kept` order.

        `fused_kernels` and `float32_stream` are as in Backbone.use_fused_kernels.
        """
        # float32, like the sum with the positions: the mask token is not rounded
        prefix, visible = self.embed(tokens).float().tensor_split([tokens.shape[1] - kept.shape[1]], dim=1)
        positions = resample_positions(self.positions, *grid)
        places = self.mask_token.expand(len(kept), positions.shape[1], -1)
        restored = places.scatter(1, kept[..., None].expand(-1, -1, visible.shape[2]), visible)
        everything = torch.cat([prefix, restored + positions], dim=1)
        can_fuse = self._head_dim in FUSED_HEAD_DIMS and tokens.is_cuda and torch.is_autocast_enabled("cuda")
        if fused_kernels and can_fuse:
            dtype = torch.get_autocast_dtype("cuda")
            decoded = self.fused(everything, dtype=dtype, stream_dtype=torch.float32 if float32_stream else dtype)
        else:
            decoded = self.norm(self._through_blocks(everything))
        predictions: Tensor = self.predict(decoded[:, prefix.shape[1] :])
        return predictions

    # [R, T, dim] -> [R, T, dim] in `dtype`
    def fused(self, tokens: Tensor, *, dtype: torch.dtype, stream_dtype: torch.dtype) -> Tensor:
        """Blocks and norm by kernels; `dtype` is that of the matrix products."""
        from massl.nn.transformer.fused import through_blocks  # needs Triton, which requires CUDA
        from massl.ops.kernels.attention import SequenceGroup
        from massl.ops.kernels.fused_block import Stream, settle

        options = KernelOptions(dtype, stream_dtype, memory_lean=self.activation_checkpointing)
        stream = Stream(tokens.flatten(0, 1).to(stream_dtype))
        stream = through_blocks(list(self.blocks), stream, None, [SequenceGroup(*tokens.shape[:2])], options)
        _, normed = settle(stream, self.norm.weight, self.norm.bias, epsilon=self.norm.eps, dtype=dtype)
        return normed.view(tokens.shape)

    def _through_blocks(self, tokens: Tensor) -> Tensor:  # [R, T, dim]
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                # no random state: nothing here draws random numbers
                tokens = checkpoint(block, tokens, use_reentrant=False, preserve_rng_state=False)
            else:
                tokens = block(tokens)
        return tokens
