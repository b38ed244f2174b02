"""Training steps of a peer's own code, imported from its checkout; `peers.py` starts this once per case.

    python benchmarks/peer_step.py massl --checkout PATH --model vit_small --batch 128

No code of a peer is copied or changed. Its own `train_one_epoch` runs, with its own modules, on our loader, which
returns the same synthetic views again and again and records the time of each request. So the time includes everything
the peer does in a step: waiting for the loss and for each gradient norm, the all-reduce of a group of one,
`torch.cuda.synchronize()`, printing every few steps. Settings are those of the peers' published commands, with the
sizes of the comparison. Three things are left out, in the peer's favour: TensorBoard histograms every 50 steps (MaSSL),
the frozen last layer of the first epoch (DINO, iBOT; it trains in the other 99 of 100), and drawing masks, which
happens in the data loader (iBOT).
"""

import argparse
import contextlib
import importlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from arguments import PAPER_BLOCK, PAPER_ROWS, PAPER_VIEWS, add_repetition_arguments, views_argument
from measure import StepWatch, benchmark_device, emit
from shapes import parse_views
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

_PATCH_SIZE, _CLIP_NORM = 16, 3.0


class SyntheticLoader:
    """A data loader for the peer that times its steps for us."""

    def __init__(
        self, views: list[Tensor], masks: list[Tensor], watch: StepWatch, *, num_warmup: int, num_timed: int
    ) -> None:
        self._views, self._masks, self._watch = views, masks, watch
        self._num_warmup, self._num_steps = num_warmup, num_warmup + num_timed

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[tuple[list[Tensor], Tensor] | tuple[list[Tensor], Tensor, list[Tensor]]]:
        labels = torch.arange(len(self._views[0])) % 10  # read only by iBOT, after the last step
        for step in range(self._num_steps):
            if step == self._num_warmup:
                self._watch.end_warmup()
            if step >= self._num_warmup:
                self._watch.mark()
            yield (list(self._views), labels, list(self._masks)) if self._masks else (list(self._views), labels)
        self._watch.mark()


def train_massl(program: ModuleType, chosen: argparse.Namespace, loader: SyntheticLoader) -> None:
    """Built as the authors' `train_massl` builds it for `--arch vit_... --use_bn_in_head false --optimizer adamw`."""
    utils = program.utils
    settings = SimpleNamespace(
        ncrops=parse_views(chosen.views).num_views,
        out_dim=chosen.rows,
        partition_size=chosen.block,
        student_temp=0.1,
        koleo_loss_weight=0.0,
        clip_grad=_CLIP_NORM,
        print_freq=50,
    )

    def network(drop_path_rate: float) -> nn.Module:
        backbone = getattr(program.models, chosen.model)(
            patch_size=_PATCH_SIZE, drop_path_rate=drop_path_rate, return_all_tokens=False
        )
        head = program.ProjectionHead(in_dim=backbone.embed_dim, use_bn=False, bottleneck_dim=256)
        wrapped: nn.Module = utils.MultiCropWrapper(backbone, head)
        return wrapped.cuda()

    student, teacher = pair(network(chosen.drop_path), network(0.0))
    memory_bank = program.MemoryBank(settings.ncrops, settings.out_dim, 256).cuda()
    optimizer = torch.optim.AdamW(utils.get_params_groups(student))
    program.train_one_epoch(
        student,
        teacher,
        teacher,
        program.Criterion(),
        loader,
        optimizer,
        constant(5e-4 * chosen.batch / 256.0),  # learning rate
        constant(0.04),  # weight decay
        constant(0.992),  # momentum of the teacher
        constant(0.04),  # temperature of the teacher
        constant(0.0),  # weight of the KoLeo loss
        0,  # epoch
        torch.cuda.amp.GradScaler(),
        program.RandomPartition(settings).cuda(),
        memory_bank,
        None,  # no TensorBoard writer
        settings,
    )


def train_dino(program: ModuleType, chosen: argparse.Namespace, loader: SyntheticLoader) -> None:
    """Built as the authors' `train_dino` builds it by default, with as many prototypes as the memory has rows."""
    utils = program.utils
    if benchmark_device().type == "cpu":
        # It is called once after the last step and needs a GPU.
        utils.MetricLogger.synchronize_between_processes = lambda _: None
    settings = SimpleNamespace(epochs=100, clip_grad=_CLIP_NORM, freeze_last_layer=1)

    def network(drop_path_rate: float) -> nn.Module:
        backbone = getattr(program.vits, chosen.model)(patch_size=_PATCH_SIZE, drop_path_rate=drop_path_rate)
        wrapped: nn.Module = utils.MultiCropWrapper(
            backbone, program.DINOHead(backbone.embed_dim, chosen.rows, use_bn=False)
        )
        return wrapped.cuda()

    student, teacher = pair(network(chosen.drop_path), network(0.0))
    num_views = parse_views(chosen.views).num_views
    loss = program.DINOLoss(chosen.rows, num_views, 0.04, 0.04, 0, settings.epochs).cuda()
    optimizer = torch.optim.AdamW(utils.get_params_groups(student))
    program.train_one_epoch(
        student,
        teacher,
        teacher,
        loss,
        loader,
        optimizer,
        constant(5e-4 * chosen.batch / 256.0),  # learning rate
        constant(0.04),  # weight decay
        constant(0.996),  # momentum of the teacher
        1,  # epoch: the last layer trains
        torch.cuda.amp.GradScaler(),
        settings,
    )


def train_ibot(program: ModuleType, chosen: argparse.Namespace, loader: SyntheticLoader) -> None:
    """Built as in the authors' `train_ibot`, with one head for class and patch tokens (their ViT-S/16 command)."""
    utils, shapes = program.utils, parse_views(chosen.views)
    if benchmark_device().type == "cpu":
        utils.MetricLogger.synchronize_between_processes = lambda _: None
    settings = SimpleNamespace(
        epochs=100,
        clip_grad=_CLIP_NORM,
        freeze_last_layer=1,
        global_crops_number=shapes.num_global,
        use_masked_im_modeling=True,
    )

    def network(drop_path_rate: float, *, is_student: bool) -> nn.Module:
        options = {"patch_size": _PATCH_SIZE, "drop_path_rate": drop_path_rate, "return_all_tokens": True}
        backbone = getattr(program.models, chosen.model)(**options, masked_im_modeling=is_student)
        head = program.iBOTHead(
            backbone.embed_dim, chosen.rows, patch_out_dim=chosen.rows, norm_last_layer=not is_student, shared_head=True
        )
        wrapped: nn.Module = utils.MultiCropWrapper(backbone, head)
        return wrapped.cuda()

    student, teacher = pair(network(chosen.drop_path, is_student=True), network(0.0, is_student=False), strict=False)
    temperatures = (0.04, 0.04, 0.04, 0.04, 0)
    loss = program.iBOTLoss(
        chosen.rows, chosen.rows, shapes.num_global, shapes.num_local, *temperatures, settings.epochs
    ).cuda()
    program.train_one_epoch(
        student,
        teacher,
        teacher,
        loss,
        loader,
        torch.optim.AdamW(utils.get_params_groups(student)),
        constant(5e-4 * chosen.batch / 256.0),  # learning rate
        constant(0.04),  # weight decay
        constant(0.996),  # momentum of the teacher
        1,  # epoch: the last layer trains
        torch.cuda.amp.GradScaler(),
        settings,
    )


def masks_for(chosen: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Masks for the global views: about a third of the patches in half of the images. Their time is not measured."""
    shapes = parse_views(chosen.views)
    side = shapes.global_size // _PATCH_SIZE
    is_masked = torch.arange(chosen.batch)[:, None, None] % 2 == 0
    return [((torch.rand(chosen.batch, side, side) < 0.3) & is_masked).to(device) for _ in range(shapes.num_global)]


PEERS: dict[str, tuple[str, Callable[[ModuleType, argparse.Namespace, SyntheticLoader], None]]] = {
    "massl": ("main_massl", train_massl),
    "dino": ("main_dino", train_dino),
    "ibot": ("main_ibot", train_ibot),
}


def pair(student: nn.Module, teacher: nn.Module, *, strict: bool = True) -> tuple[nn.Module, nn.Module]:
    """The student wrapped in DDP, and the teacher with the same weights and no gradients."""
    on_gpu = benchmark_device().type == "cuda"
    parallel = DistributedDataParallel(student, device_ids=[torch.cuda.current_device()] if on_gpu else None)
    teacher.load_state_dict(student.state_dict(), strict=strict)
    return parallel, teacher.requires_grad_(False)


def constant(value: float) -> Mapping[int, float]:
    """A schedule: step -> the same value."""
    return defaultdict(lambda: value)


UNUSED_IMPORTS: dict[str, dict[str, object]] = {
    "tensorboardX": {"SummaryWriter": None},
    # iBOT's, after the last step
    "evaluation.unsupervised.unsup_cls": {"eval_pred": lambda *_, **__: (0.0, 0.0, 0.0, 0.0)},
}


def pretend_the_cpu_is_a_gpu() -> None:
    """Make .cuda() and torch.cuda.synchronize() do nothing, so that peers' steps can be tried without a GPU."""

    def stay(thing: Any, *_: object, **__: object) -> Any:
        return thing

    torch.Tensor.cuda = stay  # type: ignore[method-assign, assignment]
    nn.Module.cuda = stay  # type: ignore[method-assign, assignment]
    torch.cuda.synchronize = lambda *_: None


def import_from(checkout: Path, module: str) -> ModuleType:
    """Import the peer's program. Its folder comes first: it has modules with common names such as `utils`."""
    sys.path.insert(0, str(checkout))
    sys.dont_write_bytecode = True  # do not write to the checkout
    for name, contents in UNUSED_IMPORTS.items():  # imported by a program but not used in its steps
        sys.modules.setdefault(name, ModuleType(name)).__dict__.update(contents)
    return importlib.import_module(module)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Training steps of a peer's own code.")
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--checkout", required=True, type=Path, help="folder of the peer's repository")
    parser.add_argument("--model", required=True, help="the peer's name of the network, e.g. vit_small")
    parser.add_argument("--batch", required=True, type=int)
    parser.add_argument("--views", default=PAPER_VIEWS, type=views_argument)
    parser.add_argument(
        "--rows", default=PAPER_ROWS, type=int, help="rows of the memory (massl), prototypes (dino, ibot)"
    )
    parser.add_argument("--block", default=PAPER_BLOCK, type=int, help="rows per block (massl)")
    parser.add_argument("--drop-path", default=0.1, type=float)
    add_repetition_arguments(parser, num_warmup=5, num_timed=15)
    chosen = parser.parse_args(arguments)
    device = benchmark_device()
    module, train = PEERS[chosen.peer]
    warnings.simplefilter("ignore")  # old names of torch and timm
    torch.backends.cudnn.benchmark = True  # as both peers set it
    torch.manual_seed(0)
    if device.type == "cpu":
        pretend_the_cpu_is_a_gpu()
    store = TCPStore("127.0.0.1", 0, world_size=1, is_master=True)  # port 0: any free one
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    shapes = parse_views(chosen.views)
    sizes = [shapes.global_size] * shapes.num_global + [shapes.local_size] * shapes.num_local
    views = [torch.randn(chosen.batch, 3, size, size, device=device) for size in sizes]
    watch = StepWatch(device)
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
        masks = masks_for(chosen, device) if chosen.peer == "ibot" else []
        loader = SyntheticLoader(views, masks, watch, num_warmup=chosen.warmup, num_timed=chosen.timed)
        train(import_from(chosen.checkout, module), chosen, loader)
    dist.destroy_process_group()
    emit(
        watch.timing().case(
            f"{chosen.model} N={chosen.batch} {chosen.peer}", num_images=chosen.batch, steady_memory=True
        )
    )


if __name__ == "__main__":
    main()
