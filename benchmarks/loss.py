"""The memory loss alone, forward and backward, including drawing the blocks: massl against the published formulation.

    python benchmarks/loss.py --batch 64 128

The published formulation is written here from its formula: all logits of all views against the whole memory, a random
permutation of their columns, blocks of N_b, and one cross-entropy per pair of different views, each with its own
softmax and log-softmax, under float16 autocast. In its favour, it neither draws the permutation on the host nor copies
the memory, as the authors' code does. Memory is what a step needs beyond its inputs: peak minus what was allocated
before.
"""

import argparse
from collections.abc import Callable, Sequence

import ours
import torch
from arguments import PAPER_BLOCK, PAPER_ROWS, add_repetition_arguments
from measure import (
    GIB,
    MIB,
    Case,
    announce,
    benchmark_device,
    emit,
    free_memory,
    print_table,
    remark,
    survives_lack_of_memory,
    timed_steps,
)
from torch import Tensor


# [V, N, D], [T, N, D], [D, K] -> []
def published_loss(student: Tensor, teacher: Tensor, memory: Tensor, block_size: int) -> Tensor:
    """Mean over view pairs, samples and blocks of cross-entropy(softmax(teacher logits), softmax(student logits))."""
    num_blocks = memory.shape[1] // block_size
    columns = torch.randperm(memory.shape[1], device=memory.device)[: num_blocks * block_size]

    def in_blocks(views: Tensor, temperature: float) -> list[Tensor]:  # -> per view [N, blocks, N_b]
        logits = views.flatten(0, 1) @ memory / temperature
        return [of_view[:, columns].reshape(-1, num_blocks, block_size) for of_view in logits.chunk(len(views))]

    student_blocks = in_blocks(student, ours.STUDENT_TEMPERATURE)
    with torch.no_grad():
        teacher_blocks = in_blocks(teacher, ours.TEACHER_TEMPERATURE)
    pair_losses = [
        -(torch.softmax(target, dim=-1) * torch.log_softmax(prediction, dim=-1)).sum(dim=-1).mean()
        for student_view, prediction in enumerate(student_blocks)
        for teacher_view, target in enumerate(teacher_blocks)
        if student_view != teacher_view
    ]
    return torch.stack(pair_losses).mean()


def published_step(student: Tensor, teacher: Tensor, *, num_rows: int, block_size: int) -> Callable[[int], object]:
    device = student.device
    memory = ours.unit_rows(num_rows, student.shape[-1], device=device, seed=2).T.contiguous()
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16

    def step(number: int) -> None:
        with torch.autocast(device.type, dtype=dtype):
            loss = published_loss(student, teacher, memory, block_size)
        # Scaled as in float16 training; otherwise the gradients of 65,536 softmax entries vanish.
        torch.autograd.grad(loss * 65_536.0, student)

    return step


def graphed_step(student: Tensor, teacher: Tensor, *, num_rows: int, block_size: int) -> Callable[[int], object]:
    """massl's step, recorded as a CUDA graph at its first call, as inside a training step."""
    step = ours.memory_loss_step(student, teacher, num_rows=num_rows, block_size=block_size)
    graph = torch.cuda.CUDAGraph()
    is_recorded = False

    def replay(number: int) -> None:
        nonlocal is_recorded
        if not is_recorded:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                for _ in range(3):  # choose and compile kernels before recording
                    step(number)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                step(number)
            is_recorded = True
        graph.replay()

    return replay


FORMULATIONS = {"published": published_step, "massl": ours.memory_loss_step, "massl-graph": graphed_step}


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="The memory loss, forward and backward.")
    parser.add_argument("--batch", nargs="+", default=[64, 128], type=int, help="images per step")
    parser.add_argument("--formulations", nargs="+", default=["published", "massl"], choices=FORMULATIONS)
    parser.add_argument("--rows", nargs="+", default=[PAPER_ROWS], type=int, help="K, for both formulations")
    parser.add_argument(
        "--massl-rows", nargs="*", default=[262_144, 1_048_576], type=int, help="further K, for massl only"
    )
    parser.add_argument("--block", default=PAPER_BLOCK, type=int, help="N_b: rows per block")
    parser.add_argument("--num-views", default=12, type=int, help="student views; the teacher sees the first two")
    parser.add_argument("--dim", default=256, type=int, help="dimension of the embeddings")
    add_repetition_arguments(parser, num_warmup=10, num_timed=50)
    chosen = parser.parse_args(arguments)
    announce(ours.environment(benchmark_device()))
    sizes = [(name, rows) for rows in chosen.rows for name in chosen.formulations]
    sizes += [(name, rows) for rows in chosen.massl_rows for name in chosen.formulations if name != "published"]
    cases: list[Case] = []
    for batch_size in chosen.batch:
        for name, num_rows in sizes:
            label = f"loss {name} N={batch_size} K={num_rows}"
            with survives_lack_of_memory(label):
                cases.append(emit(measure_loss(label, name, num_rows, batch_size, chosen)))
            free_memory()
    print_table(cases, extra_columns=["extra_mib"])
    print_ratios(cases)
    return cases


def measure_loss(label: str, name: str, num_rows: int, batch_size: int, chosen: argparse.Namespace) -> Case:
    device = benchmark_device()
    student = ours.unit_rows(chosen.num_views, batch_size, chosen.dim, device=device, seed=0).requires_grad_()
    teacher = ours.unit_rows(2, batch_size, chosen.dim, device=device, seed=1)
    step = FORMULATIONS[name](student, teacher, num_rows=num_rows, block_size=chosen.block)
    timing = timed_steps(step, num_warmup=chosen.warmup, num_timed=chosen.timed, device=device)
    memory = timing.memory
    is_graph = name == "massl-graph"  # its memory shows only during recording
    peak = None if memory is None else memory.peak if is_graph else memory.steady_peak
    extra_mib = None if memory is None or peak is None else round((peak - memory.at_start) * GIB / MIB, 1)
    return timing.case(label, num_images=batch_size, extras={"extra_mib": extra_mib}, steady_memory=not is_graph)


def print_ratios(cases: Sequence[Case]) -> None:
    found = {case.case: case for case in cases}
    for our_case in cases:
        published = found.get(our_case.case.replace("massl-graph", "published").replace("massl", "published"))
        if published is None or published is our_case:
            continue
        text = f"{our_case.case}: {published.milliseconds / our_case.milliseconds:.1f} times as fast as published"
        their_mib, our_mib = published.extras["extra_mib"], our_case.extras["extra_mib"]
        if isinstance(their_mib, float) and isinstance(our_mib, float) and our_mib > 0:
            text += f", {their_mib / our_mib:.1f} times less extra memory"
        remark(text)


if __name__ == "__main__":
    main()
