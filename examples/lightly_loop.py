"""MaSSL with lightly's data sets and multi-crop transforms: only the loss and the memory are massl's.

pip install lightly
python examples/lightly_loop.py photos/ --epochs 20
"""

import argparse
import copy

import torch
from lightly.data import LightlyDataset
from lightly.transforms import DINOTransform
from lightly.utils.scheduler import cosine_schedule
from plain_pytorch import DIM, Encoder
from torch import Tensor
from torch.utils.data import DataLoader

from massl.nn.memory import MemoryBank
from massl.ops.memory_attention import memory_loss

NUM_GLOBAL, NUM_LOCAL = 2, 4


def embed(encoder: Encoder, views: list[Tensor]) -> Tensor:  # V x [N, 3, S, S] -> [V, N, DIM]
    return encoder(torch.stack(views, dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--image_size", type=int, default=96)
    parser.add_argument("--memory", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    size = given.image_size
    transform = DINOTransform(global_crop_size=size, local_crop_size=size // 2, n_local_views=NUM_LOCAL)
    images = LightlyDataset(given.folder, transform=transform)
    loader = DataLoader(images, given.batch_size, shuffle=True, drop_last=True, num_workers=given.workers)
    student = Encoder("resnet18", size).to(device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    memory = MemoryBank(given.memory, DIM).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04)

    step, num_steps = 0, given.epochs * len(loader)
    for epoch in range(given.epochs):
        for views, _, _ in loader:
            views = [view.to(device) for view in views]
            with torch.no_grad():
                target = embed(teacher, views[:NUM_GLOBAL])
            # Student view t < NUM_GLOBAL is the crop of teacher view t: the loss leaves that pair out.
            source = torch.cat([embed(student, views[:NUM_GLOBAL]), embed(student, views[NUM_GLOBAL:])])
            blocks = memory.random_blocks(given.memory // 4, key=(0, step))
            loss = memory_loss(source, target, blocks, student_temperature=0.1, teacher_temperature=0.04)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            momentum = cosine_schedule(step, max(num_steps, 2), 0.97, 1.0)
            with torch.no_grad():
                for slow, quick in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(quick, 1 - momentum)
            memory.enqueue(target[1])
            step += 1
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    torch.save(teacher.backbone.state_dict(), "backbone.pt")


if __name__ == "__main__":
    main()
