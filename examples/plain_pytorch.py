"""MaSSL in a plain PyTorch loop: torchvision's transforms, a timm model, and massl's memory loss.

    python examples/plain_pytorch.py photos/ --epochs 20

`photos/` holds images, also in sub-folders, whose names are ignored. The teacher's weights end in `backbone.pt`.
`massl pretrain` does the same faster, with checkpoints and probes: this is for loops of your own.
"""

import argparse
import copy
from pathlib import Path

import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from massl.nn.memory import MemoryBank
from massl.ops.memory_attention import memory_loss

DIM = 256  # of an embedding


class TwoViews:
    """Two random crops of an image, in changed colours."""

    def __init__(self, size: int) -> None:
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(size, scale=(0.25, 1.0), interpolation=v2.InterpolationMode.BICUBIC),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __call__(self, image: object) -> Tensor:  # -> [2, 3, S, S]
        return torch.stack([self.transform(image) for _ in range(2)])


class Photos(Dataset[Tensor]):
    """All images below a folder, each as two views."""

    def __init__(self, folder: str, size: int) -> None:
        self.files = sorted(file for file in Path(folder).rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
        self.transform = TwoViews(size)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:  # -> [2, 3, S, S]
        with Image.open(self.files[index]) as image:
            return self.transform(image.convert("RGB"))


class Encoder(nn.Module):
    """A timm model and a projection head; batch norm in the head helps on small data."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        options = {"img_size": size} if name.startswith("vit") else {}
        self.backbone = timm.create_model(name, num_classes=0, **options)
        hidden = [nn.Linear(self.backbone.num_features, 1024), nn.BatchNorm1d(1024), nn.GELU()]
        self.head = nn.Sequential(*hidden, nn.Linear(1024, DIM))

    def forward(self, views: Tensor) -> Tensor:  # [N, V, 3, S, S] -> [V, N, DIM], unit length
        rows = normalize(self.head(self.backbone(views.transpose(0, 1).flatten(0, 1))), dim=-1)
        return rows.unflatten(0, (views.shape[1], views.shape[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--backbone", default="resnet18", help="a timm model")
    parser.add_argument("--image_size", type=int, default=96)
    parser.add_argument("--memory", type=int, default=2048, help="past embeddings; a quarter of your images is a start")
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    images = Photos(given.folder, given.image_size)
    if len(images) < given.batch_size:
        parser.error(f"{given.folder} holds {len(images)} images, less than a batch; lower --batch_size")
    loader = DataLoader(images, given.batch_size, shuffle=True, drop_last=True, num_workers=given.workers)
    student = Encoder(given.backbone, given.image_size).to(device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    memory = MemoryBank(given.memory, DIM).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04)

    step = 0
    for epoch in range(given.epochs):
        for views in loader:
            with torch.no_grad():
                target = teacher(views.to(device))
            blocks = memory.random_blocks(given.memory // 4, key=(0, step))  # another key: another partition
            loss = memory_loss(
                student(views.to(device)), target, blocks, student_temperature=0.1, teacher_temperature=0.04
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, quick in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(quick, 0.1)  # momentum 0.9: with two views and little data a quick teacher learns best
            memory.enqueue(target[1])  # after the loss: a batch is never compared with itself
            step += 1
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    torch.save(teacher.backbone.state_dict(), "backbone.pt")


if __name__ == "__main__":
    main()
