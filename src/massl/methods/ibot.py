"""iBOT: Image BERT Pre-Training with Online Tokenizer (Zhou et al., ICLR 2022).

Each step:
    student   = head(class token of every view), head(hidden patches of global views), which it sees as mask tokens
    teacher   = the same with EMA weights, on global views with nothing hidden, no gradient
    class     = DINO's loss: mean over pairs of different views of the cross-entropy between choices of prototypes
    patches   = cross-entropy between the student's choice for a hidden patch and the teacher's for the same patch;
                mean over the hidden patches of a view, then over views
    loss      = class + patches
    after the optimizer step: each centre <- running mean of the teacher's similarities;
                              teacher and its prototypes <- EMA of the student's
Class token and patches share head and prototypes, so both are described in the same terms; each has its own centre.
"""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from massl.config import RecipeError, Settings
from massl.data.views import ViewBatch
from massl.methods.base import StepHyper, StepOutput
from massl.methods.self_distillation import SelfDistillation, SelfDistillationSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.prototypes import Centre, PrototypeSettings
from massl.ops.block_masks import block_masks
from massl.ops.masked_rows import masked_rows, num_slots
from massl.ops.prototype_attention import cross_view_weights


class SharedPrototypeSettings(PrototypeSettings):
    num_prototypes: int = Field(default=8192, gt=1, description="K: number of prototypes for class tokens and patches")


class MaskSettings(Settings):
    ratios: tuple[float, ...] = Field(
        default=(0.0, 0.3), min_length=1, description="shares of patches to hide; each view takes one at random"
    )
    ratio_variances: tuple[float, ...] = Field(default=(0.0, 0.2), description="largest random change of each ratio")

    @model_validator(mode="after")
    def _shares_are_shares(self) -> Self:
        if len(self.ratios) != len(self.ratio_variances):
            raise ValueError(f"{len(self.ratios)} ratios but {len(self.ratio_variances)} ratio_variances; give as many")
        for ratio, variance in zip(self.ratios, self.ratio_variances, strict=True):
            if not 0.0 <= ratio - variance <= ratio + variance <= 1.0:
                raise ValueError(f"ratio {ratio} +- {variance} exceeds the range 0 to 1")
        if max(self.ratios) == 0.0:
            raise ValueError("no patch would be hidden: give a ratio above 0, or use the method dino")
        return self


class IBOTSettings(SelfDistillationSettings):
    name: Literal["ibot"] = "ibot"
    prototypes: SharedPrototypeSettings = SharedPrototypeSettings()
    masks: MaskSettings = MaskSettings()


class IBOT(SelfDistillation):
    settings: IBOTSettings

    def __init__(self, settings: IBOTSettings, backbone: BackboneSettings, *, seed: int) -> None:
        super().__init__(settings, backbone, seed=seed)
        if not self.student.backbone.is_transformer:
            raise RecipeError(
                f"ibot hides patches, which {backbone.name} does not have; choose a vision transformer "
                "(--backbone.name vit_small_patch16_224, or --init with weights of one) or another method"
            )
        # [1, D], so that weight decay applies to it, as in the authors' code
        self.mask_token = nn.Parameter(torch.zeros(1, self.student.backbone.dim))
        self.patch_centre = Centre(settings.prototypes)

    def forward(self, views: ViewBatch, hyper: StepHyper) -> StepOutput:
        masks, settings = self._masks(views, hyper), self.settings.masks
        slots = num_slots(*masks.shape, ratios=settings.ratios, ratio_variances=settings.ratio_variances)
        rows, row_weights = masked_rows(masks, slots)
        student, student_patches = self._student(views, hyper, masks, rows)
        teacher, teacher_patches = self._teacher(views)
        pairs = cross_view_weights(len(student), len(teacher), device=student.device)
        class_loss, held = self.imitation_loss(student, teacher, self.centre, hyper, pair_weights=pairs)
        patch_loss, _ = self.imitation_loss(
            student_patches[None],
            teacher_patches.flatten(0, 2).index_select(0, rows)[None],
            self.patch_centre,
            hyper,
            pair_weights=torch.ones(1, 1, device=student.device),  # one target: the teacher's same patch
            row_weights=row_weights,
        )
        return StepOutput(
            loss=class_loss + patch_loss,
            metrics={"class_loss": class_loss.detach(), "patch_loss": patch_loss.detach(), **held},
            carry={"teacher_embeddings": teacher.mean(dim=0), "teacher_patches": teacher_patches.mean(dim=(0, 2))},
        )

    def after_step(self, output: StepOutput, hyper: StepHyper) -> None:
        # The centres first: the embeddings they follow belong to the prototypes before the update.
        prototypes = self.teacher_prototypes()
        self.centre.follow(output.carry["teacher_embeddings"], prototypes)
        self.patch_centre.follow(output.carry["teacher_patches"], prototypes)
        self.move_teacher(output, hyper)

    def _masks(self, views: ViewBatch, hyper: StepHyper) -> Tensor:  # -> [G * B, N] bool
        masks = block_masks(
            (self.seed, "patch masks", hyper.step),
            views.image_indices,
            num_views=len(views.global_views),
            grid=self.student.backbone.grid(views.global_views.shape[-1]),
            ratios=self.settings.masks.ratios,
            ratio_variances=self.settings.masks.ratio_variances,
            device=views.global_views.device,
        )
        return masks.flatten(0, 1)

    def _student(
        self, views: ViewBatch, hyper: StepHyper, masks: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:  # [G * B, N], [slots] -> [V, B, D], [slots, D]
        """Embeddings of every view, global ones with hidden patches, and of the patches indexed by `rows`."""
        keys = self.drop_path_keys(views, hyper, num_views=views.num_views)
        classes, patches = self.student.backbone.class_and_patches(
            [group.flatten(0, 1) for group in views.groups()],
            None if keys is None else keys.flatten(),
            masks=masks,
            mask_token=self.mask_token[0],
        )
        chosen = patches.flatten(0, 1).index_select(0, rows)
        embeddings = self.student.head(torch.cat([classes, chosen]))
        of_classes, of_patches = torch.split(embeddings, [len(classes), len(chosen)])
        return of_classes.reshape(views.num_views, -1, of_classes.shape[1]), of_patches

    @torch.no_grad()
    def _teacher(self, views: ViewBatch) -> tuple[Tensor, Tensor]:  # -> [G, B, D], [G, B, N, D]
        """Embeddings of the global views and of all their patches; the patch centre needs all."""
        classes, patches = self.teacher.backbone.class_and_patches([views.global_views.flatten(0, 1)])
        shape = views.global_views.shape[:2]
        return self.teacher.head(classes).unflatten(0, shape), self.teacher.head(patches).unflatten(0, shape)
