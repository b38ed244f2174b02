"""Fills a memory before the first step: a new run from existing weights then starts with rows that mean something."""

import math
from collections.abc import Callable

import torch

from massl import distributed
from massl.nn.memory import MemoryBank
from massl.training.trainer import Trainer
from massl.training.view_maker import ViewMaker


@torch.no_grad()
def fill_memory(trainer: Trainer, memory: MemoryBank, *, progress: Callable[[int, int], None]) -> None:
    """Replace every row by the embedding of a view; `progress` takes the rows that are done, and all.

    The views are those of an epoch after the last: training never sees the same ones, so no batch meets itself.
    """
    method, settings = trainer.method, trainer.settings
    views = trainer.views.model_copy(update={"num_local": 0})
    is_bf16 = settings.precision == "bf16"
    make_views = ViewMaker(views, seed=settings.seed, bf16=is_bf16, device=trainer.device)
    first, num_batches = trainer.schedules.num_steps, math.ceil(memory.num_rows / settings.batch_size)
    method.freeze_backbones(True)
    progress(0, memory.num_rows)
    for step in range(first, first + num_batches):
        images = trainer.loader.at(step)
        size = len(images.indices) // settings.accumulation_steps
        rows = []
        for part in range(settings.accumulation_steps):
            batch = make_views(
                images.slice(part * size, (part + 1) * size), epoch=step // trainer.schedules.steps_per_epoch
            )
            with torch.autocast(trainer.device.type, dtype=torch.bfloat16, enabled=is_bf16):
                embeddings = method.memory_rows(batch)
            assert embeddings is not None
            rows.append(embeddings)
        memory.enqueue(distributed.gather_rows(torch.cat(rows)))
        progress((step + 1 - first) * settings.batch_size, memory.num_rows)
    method.freeze_backbones(False)
