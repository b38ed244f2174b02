"""MaSSL as a Lightning module: your Trainer owns the loop, massl gives the memory and its loss.

pip install lightning
python examples/lightning_loop.py photos/ --epochs 20
"""

import argparse
import copy

import lightning
import torch
from plain_pytorch import DIM, Encoder, Photos
from torch import Tensor
from torch.utils.data import DataLoader

from massl.nn.memory import MemoryBank
from massl.ops.memory_attention import memory_loss


class MaSSL(lightning.LightningModule):
    """Student, teacher and memory. Lightning's checkpoints hold all three: the memory is a buffer."""

    def __init__(self, backbone: str, image_size: int, *, memory: int, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.student = Encoder(backbone, image_size)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.memory = MemoryBank(memory, DIM)
        self.momentum = momentum

    def training_step(self, views: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(views)
        blocks = self.memory.random_blocks(self.memory.num_rows // 4, key=(0, self.global_step))
        loss = memory_loss(self.student(views), target, blocks, student_temperature=0.1, teacher_temperature=0.04)
        self._new_rows = target[1]
        self.log("loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, *_: object) -> None:
        for slow, quick in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(quick, 1 - self.momentum)
        # Every process must hold the same memory: gather the rows of all of them.
        self.memory.enqueue(self.all_gather(self._new_rows).reshape(-1, DIM))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=5e-4, weight_decay=0.04)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--image_size", type=int, default=96)
    parser.add_argument("--memory", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    images = Photos(given.folder, given.image_size)
    loader = DataLoader(images, given.batch_size, shuffle=True, drop_last=True, num_workers=given.workers)
    trainer = lightning.Trainer(max_epochs=given.epochs, log_every_n_steps=1)
    trainer.fit(MaSSL("resnet18", given.image_size, memory=given.memory), loader)


if __name__ == "__main__":
    main()
