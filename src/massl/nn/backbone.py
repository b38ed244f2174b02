"""Any timm model as a backbone: one feature vector per image, and patch tokens for transformers."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from massl import keyed_random
from massl.config import RecipeError, Settings
from massl.nn.drop_path import KeyedDropPath, draw_scales, keep_probabilities, replace_drop_paths, split_scales
from massl.nn.positions import FirstAxis, ResamplingRule, fix_positions, resampling_rule
from massl.nn.timm_models import checked_options, create_timm_model
from massl.nn.transformer.plain import (
    KernelOptions,
    class_token_of_last_block,
    has_plain_attention,
    refuse_unknown_transformer,
    why_not_fused,
)
from massl.nn.transformer.tokens import (
    Tokens,
    Transformer,
    embed_images,
    is_transformer,
    normed_tokens,
    pools_class_token,
    rotations_of,
)

__all__ = ["Backbone", "BackboneSettings", "Tokens", "build_backbone", "refuse_published_weights"]


class BackboneSettings(Settings):
    name: str = Field("vit_small_patch16_224", description="timm model name, e.g. vit_small_patch16_224 or resnet50")
    image_size: int | None = Field(None, gt=0, description="image side in pixels (ViTs); default: the model's own")
    patch_size: int | None = Field(None, gt=0, description="patch side in pixels (ViTs); default: the model's own")
    stem: Literal["", "small"] = Field(
        "", description="small: 3 x 3 stem without downsampling, ResNets on 32-px images"
    )
    drop_path_rate: float = Field(0.1, ge=0.0, lt=1.0, description="student's stochastic depth, rising over depth")
    timm_options: dict[str, int | float | bool | str | list[int]] = Field(
        default_factory=dict,
        description="further options of timm's architecture in a YAML recipe, e.g. {depth: 6, embed_dim: 192}",
    )

    def timm_arguments(self) -> dict[str, Any]:
        """The arguments of `create_timm_model` for this backbone, without weights or classifier."""
        choices = {"img_size": self.image_size, "patch_size": self.patch_size, "stem": self.stem or None}
        given = {key: value for key, value in choices.items() if value is not None}
        return {"model_name": self.name, "num_classes": 0, **given, **self.timm_options}


def refuse_published_weights(settings: BackboneSettings) -> None:
    """Refuse settings that ask timm for weights, or for anything but an architecture, before anything is written.

    Training would start from random or partly random weights instead.
    """
    name, _, tag = str(settings.timm_arguments()["model_name"]).partition(".")
    keys = [
        key for key, value in settings.timm_options.items() if value and key.startswith(("pretrained", "checkpoint"))
    ]
    given = f"backbone.name {settings.name!r}" if tag else f"backbone.timm_options.{''.join(keys[:1])}"
    if tag or keys:
        wanted = f"--init {settings.timm_arguments()['model_name']}" if tag else "--init NAME, with a tag of timm's"
        instead = f"give backbone.name {name}" if tag else "leave it out"
        raise RecipeError(
            f"{given} asks for published weights, but backbone settings only describe an architecture. To start from "
            f"published weights give {wanted}; to start from random ones {instead}."
        )
    checked_options(settings.timm_arguments(), prefix="backbone.timm_options.")


class Backbone(nn.Module):
    """Wraps a timm model: `backbone.model` is the plain timm module with its own state dict.

    Vision transformers (also DINOv3's, timm's `Eva`) accept images of any size: position embeddings are resampled by
    the model's rule, and pixels beyond the last whole patch are ignored. Other networks return their pooled features.
    """

    keep: Tensor  # [num_drop_paths] probability that a residual branch is kept

    def __init__(self, model: nn.Module, *, timm_arguments: Mapping[str, Any]) -> None:
        super().__init__()
        refuse_unknown_transformer(model)
        self.model = model
        self.timm_arguments = dict(timm_arguments)  # these build an empty copy of the model
        # of the features before a classifier; num_features may differ
        self.dim = int(model.head_hidden_size)  # type: ignore[arg-type]
        self.is_frozen = self.keeps_statistics = False  # set by nn.freezing
        self.activation_checkpointing = False
        self.fused_kernels = False
        self.float32_stream = False
        self._layout = torch.contiguous_format
        self._rotations: dict[tuple[torch.device, int, int], Tensor | None] = {}
        self._drop_paths = replace_drop_paths(model)
        self.register_buffer("keep", keep_probabilities(self._drop_paths), persistent=False)
        self._class_token_of_last_block = class_token_of_last_block

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.modules() if self.keeps_statistics else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(self, images: Tensor, sample_keys: Tensor | None = None) -> Tokens:  # [B, 3, H, W], [B] int64
        """Features of the images; `sample_keys` turns stochastic depth on and decides its random choices."""
        scales = self._scales(sample_keys)
        if not is_transformer(self.model):
            return Tokens(pooled=self._pooled(images, scales), patches=None)
        return self._tokens(images, scales)

    # groups of [R_i, 3, H_i, W_i] -> [sum R_i, D]
    def pooled(self, view_groups: list[Tensor], sample_keys: Tensor | None = None) -> Tensor:
        """`forward(...).pooled` of views of several sizes, without computing the last block's patch tokens."""
        scales = self._scales(sample_keys)
        options = self._kernel_options(view_groups[0])
        if options is not None:
            from massl.nn.transformer.fused import class_features  # needs Triton, which requires CUDA

            return class_features(self._vision_transformer(), view_groups, scales, options)
        parts = split_scales(scales, view_groups)
        return torch.cat([self._pooled(group, part) for group, part in zip(view_groups, parts, strict=True)])

    def class_and_patches(
        self,
        view_groups: list[Tensor],
        sample_keys: Tensor | None = None,
        *,
        masks: Tensor | None = None,
        mask_token: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`pooled` of all views, and the patch tokens of the first group after the final norm.

        Groups of [R_i, 3, H_i, W_i], [sum R_i], [R_0, N] bool, [D] -> [sum R_i, D], [R_0, N, D]. Where `masks` is true,
        `mask_token` replaces the embedded patch before positions are added (BEiT, iBOT); only the first group is
        masked.
        """
        assert (masks is None) == (mask_token is None)
        scales = self._scales(sample_keys)
        options = self._kernel_options(view_groups[0])
        if options is not None:
            from massl.nn.transformer.fused import class_and_patch_features

            model = self._vision_transformer()
            return class_and_patch_features(model, view_groups, scales, options, masks=masks, mask_token=mask_token)
        parts = split_scales(scales, view_groups)
        first = self._tokens(view_groups[0], parts[0], masks, mask_token)
        further = [self._pooled(group, part) for group, part in zip(view_groups[1:], parts[1:], strict=True)]
        assert first.patches is not None
        return torch.cat([first.pooled, *further]), first.patches

    # [R, 3, H, W], [R, n] int64, [R] -> [R, prefix + n, D]
    def visible(self, images: Tensor, kept: Tensor, sample_keys: Tensor | None = None) -> Tensor:
        """MAE's encoder (He et al., 2022): tokens after the final norm, only for the patches indexed by `kept`.

        The class token and registers, if any, come first; the patches follow in the order of `kept`.
        """
        model, scales = self._transformer(), self._scales(sample_keys)
        options = self._kernel_options(images)
        if options is not None:
            from massl.nn.transformer.fused import visible_features

            return visible_features(self._vision_transformer(), images, kept, scales, options)
        prefix, patches = torch.tensor_split(embed_images(model, images), [model.num_prefix_tokens], dim=1)
        chosen = patches.gather(1, kept[..., None].expand(-1, -1, patches.shape[2]))
        rotations = self.rotations(images)
        chosen_rotations = None if rotations is None else rotations[kept][:, None]  # [R, 1, n, 2 * head_dim]
        tokens = torch.cat([prefix, chosen], dim=1)
        return model.norm(self._through_blocks(tokens, model.blocks, scales, chosen_rotations))  # type: ignore[no-any-return]

    @property
    def model_name(self) -> str:
        return str(self.timm_arguments["model_name"])

    @property
    def is_transformer(self) -> bool:
        """Whether the model has patch tokens; others have only pooled features."""
        return is_transformer(self.model)

    @property
    def position_resampling(self) -> ResamplingRule | None:
        """How position embeddings are resampled to other sizes; None: the model has no table of them."""
        has_table = is_transformer(self.model) and self.model.pos_embed is not None
        return resampling_rule(self.model) if has_table else None

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return int(self._transformer().patch_embed.patch_size[0])

    def grid(self, image_size: int) -> tuple[int, int]:
        """Rows and columns of patches of a square image with this side in pixels."""
        return image_size // self.patch_size, image_size // self.patch_size

    def fix_positions(self, *, first_axis: FirstAxis) -> None:
        """Replace learned positions by fixed sines and cosines: "rows" first as in MoCo-v3, "columns" as in MAE."""
        fix_positions(self._vision_transformer(), first_axis=first_axis)

    def rotations(self, images: Tensor) -> Tensor | None:  # [B, 3, H, W] -> [patches, 2 * head_dim]
        """What the blocks rotate queries and keys by (DINOv3); None for other models."""
        height, width = images.shape[2] // self.patch_size, images.shape[3] // self.patch_size
        if (key := (images.device, height, width)) not in self._rotations:  # a CUDA graph copies nothing from the host
            self._rotations[key] = rotations_of(self._transformer(), height, width)
        return self._rotations[key]

    def _transformer(self) -> Transformer:
        if not is_transformer(self.model):
            raise RecipeError(f"this needs a vision transformer, not {self.model_name}; e.g. vit_small_patch16_224")
        return self.model

    def _vision_transformer(self) -> VisionTransformer:
        if not isinstance(self.model, VisionTransformer):
            raise RecipeError(f"this needs a vision transformer, not {self.model_name}; e.g. vit_small_patch16_224")
        return self.model

    def _kernel_options(self, images: Tensor) -> KernelOptions | None:
        """How the fused kernels compute these images; None: by the plain path."""
        dtype = self._dtype_of_kernels(images)
        if dtype is None:
            return None
        return KernelOptions(dtype, torch.float32 if self.float32_stream else dtype, self.activation_checkpointing)

    def _dtype_of_kernels(self, images: Tensor) -> torch.dtype | None:
        if not (self.fused_kernels and images.is_cuda and torch.is_autocast_enabled("cuda")):
            return None
        dtype = torch.get_autocast_dtype("cuda")
        return None if dtype == torch.float32 else dtype

    def _tokens(
        self, images: Tensor, scales: Tensor | None, masks: Tensor | None = None, mask_token: Tensor | None = None
    ) -> Tokens:
        model = self._transformer()
        embedded = embed_images(model, images, masks, mask_token)
        return normed_tokens(model, self._through_blocks(embedded, model.blocks, scales, self.rotations(images)))

    def _pooled(self, images: Tensor, scales: Tensor | None) -> Tensor:  # [B, 3, H, W] -> [B, D]
        model = self.model
        if not is_transformer(model):
            self._set_scales(model, scales)
            return model(images.contiguous(memory_format=self._layout))  # type: ignore[no-any-return]
        if not pools_class_token(model) or not has_plain_attention(model.blocks[-1]):
            return self._tokens(images, scales).pooled
        tokens = self._through_blocks(embed_images(model, images), model.blocks[:-1], scales)
        self._set_scales(model.blocks[-1], scales)
        return model.fc_norm(model.norm(self._class_token_of_last_block(model.blocks[-1], tokens))[:, 0])  # type: ignore[no-any-return]

    def _through_blocks(
        self, tokens: Tensor, blocks: Iterable[nn.Module], scales: Tensor | None, rotations: Tensor | None = None
    ) -> Tensor:
        run = self._run_block
        for block in blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                # no random state: nothing here uses it (dropout is refused), and a CUDA graph cannot read it
                parts = (block, tokens, scales, rotations)
                tokens = checkpoint(run, *parts, use_reentrant=False, preserve_rng_state=False)
            else:
                tokens = run(block, tokens, scales, rotations)
        return tokens

    def _run_block(self, block: nn.Module, tokens: Tensor, scales: Tensor | None, rotations: Tensor | None) -> Tensor:
        # inside the checkpointed function, so that recomputation in the backward pass uses the same scales
        self._set_scales(block, scales)
        return block(tokens) if rotations is None else block(tokens, rope=rotations)  # type: ignore[no-any-return]

    def _scales(self, sample_keys: Tensor | None) -> Tensor | None:  # [B] -> [num_drop_paths, B]
        return None if sample_keys is None or not self._drop_paths else draw_scales(self.keep, sample_keys)

    def _set_scales(self, part: nn.Module, scales: Tensor | None) -> None:
        for module in part.modules():
            if isinstance(module, KeyedDropPath):
                module.scales = None if scales is None else scales[module.layer]

    def use_fused_kernels(self, *, float32_stream: bool = False) -> str | None:
        """Train with fused kernels when running in 16 bits on a GPU; returns the reason if this is impossible.

        `float32_stream` keeps the residual stream in float32, as autocast does.
        """
        reason = why_not_fused(self.model)
        self.float32_stream = float32_stream
        self.fused_kernels = reason is None
        return reason

    def use_channels_last(self) -> None:
        """Use the channels-last layout, which is faster for convolutions; not for transformers."""
        assert not self.is_transformer
        self._layout = torch.channels_last
        self.model.to(memory_format=torch.channels_last)

    def compile_blocks(self) -> None:
        """Compile each transformer block in place (other networks as a whole); state dict and results stay the same."""
        for block in self.model.blocks if is_transformer(self.model) else [self.model]:
            block.compile(dynamic=False)
        self._class_token_of_last_block = torch.compile(class_token_of_last_block, dynamic=False)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute each transformer block in the backward pass instead of keeping its activations."""
        if enabled and not self.is_transformer:
            raise RecipeError("trainer.activation_checkpointing needs a vision transformer; set it to false")
        if enabled and any(isinstance(part, nn.Dropout) and part.p > 0.0 for part in self.model.modules()):
            raise RecipeError(
                "trainer.activation_checkpointing would draw another dropout mask in the backward pass; set it to "
                "false, or the dropout rates in backbone.timm_options to 0"
            )
        self.activation_checkpointing = enabled


def build_backbone(settings: BackboneSettings, *, seed: int, drop_path_rate: float = 0.0) -> Backbone:
    """A newly initialised backbone; its weights depend on the seed alone."""
    model = create_timm_model(settings.timm_arguments(), drop_path_rate=drop_path_rate, seed=seed)
    if isinstance(model, VisionTransformer) and model.cls_token is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_random.seed_from(seed, "cls token"))
            nn.init.trunc_normal_(model.cls_token, std=0.02)  # timm starts it at 1e-6
    return Backbone(model, timm_arguments=settings.timm_arguments())
