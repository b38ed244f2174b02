"""From JPEG files to updated weights: can images be loaded and augmented as fast as the network trains?

    python benchmarks/loading.py --images FOLDER_OR_TAR --files 20000 --batch 256

Four measurements: the loader alone; loader and views; the training step on synthetic views; all together, as in the
trainer. The result is the ratio of the last two. Times are means over all timed steps, not medians: with images read
ahead, a rare long wait counts.
"""

import argparse
import itertools
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import ours
from arguments import add_repetition_arguments, add_training_arguments, step_spec
from measure import Case, Step, announce, benchmark_device, emit, free_memory, print_table, remark, timed_steps

_SUFFIXES = (".jpg", ".jpeg")
_FILES_PER_FOLDER = 1000


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="From JPEG files on disk to updated weights.")
    parser.add_argument("--images", required=True, type=Path, help="a folder or a tar of JPEG files")
    parser.add_argument("--files", default=20_000, type=int, help="the images are copied to this many files")
    parser.add_argument("--scratch", type=Path, help="folder of the temporary copies; default: the system's")
    parser.add_argument("--workers", default=16, type=int, help="threads or processes that read and decode")
    parser.add_argument("--worker-kind", default="processes", choices=ours.WORKER_KINDS, help="gpu decoder: threads")
    parser.add_argument("--decoder", default="cpu", choices=ours.DECODERS, help="decoder of plain JPEGs")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm model name")
    parser.add_argument("--batch", default=128, type=int, help="images per step")
    add_training_arguments(parser)
    add_repetition_arguments(parser, num_warmup=10, num_timed=50)
    chosen = parser.parse_args(arguments)
    if chosen.files < chosen.batch:
        parser.error(f"--files {chosen.files} make no batch of {chosen.batch}")
    try:
        images = list(jpeg_files(chosen.images))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    announce(ours.environment(benchmark_device()))
    cases = []
    with tempfile.TemporaryDirectory(prefix="massl-loading-", dir=chosen.scratch) as folder:
        num_bytes = replicate(images, Path(folder), num_files=chosen.files)
        kilobytes = num_bytes / chosen.files / 1e3
        remark(f"# {chosen.files} files of {kilobytes:.0f} kB, just written: they may be in the page cache")
        for kernels in chosen.kernels:
            cases += measure_all(Path(folder), chosen, kernels)
            free_memory()
    print_table(cases, extra_columns=["share_of_compute_only"])
    return cases


def jpeg_files(path: Path) -> Iterator[bytes]:
    """The content of each JPEG file in a folder (at any depth) or a tar archive."""
    found = False
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES):
            found = True
            yield file.read_bytes()
    elif path.is_file():
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.lower().endswith(_SUFFIXES) else None
                if content is not None:
                    found = True
                    yield content.read()
    if not found:
        raise ValueError(f"{path} holds no JPEG files; expected a folder or a tar of .jpg files")


def replicate(images: Sequence[bytes], folder: Path, *, num_files: int) -> int:
    """Write the images in turn to `num_files` files; returns the number of bytes written."""
    num_bytes = 0
    for number, content in enumerate(itertools.islice(itertools.cycle(images), num_files)):
        parent = folder / f"part-{number // _FILES_PER_FOLDER:05d}"
        if number % _FILES_PER_FOLDER == 0:
            parent.mkdir()
        (parent / f"{number:08d}.jpg").write_bytes(content)
        num_bytes += len(content)
    return num_bytes


def measure_all(folder: Path, chosen: argparse.Namespace, kernels: str) -> list[Case]:
    device = benchmark_device()
    spec = step_spec(chosen, batch_size=chosen.batch, kernels=kernels, device=device)
    training = ours.Training(spec)

    def measure(label: str, step: Step, extras: dict[str, float | str | None] | None = None) -> Case:
        timing = timed_steps(step, num_warmup=chosen.warmup, num_timed=chosen.timed, device=device)
        return Case(
            case=f"{label} {spec.name}",
            images_per_second=1e3 * spec.batch_size / timing.mean_milliseconds,
            peak_gib=None if timing.memory is None else timing.memory.peak,
            milliseconds=timing.mean_milliseconds,
            extras={
                "slowest_milliseconds": round(timing.slowest_milliseconds, 3),
                "workers": chosen.workers,
                "worker_kind": chosen.worker_kind,
                "decoder": chosen.decoder,
                **(extras or {}),
            },
        )

    def measure_compute_only() -> Case:
        views = ours.synthetic_views(spec)  # freed before the last measurement
        return measure("3 compute only", lambda number: training.on_views(views, number))

    def loader() -> ours.OpenLoader:
        return ours.open_loader(
            folder,
            batch_size=spec.batch_size,
            num_workers=chosen.workers,
            worker_kind=chosen.worker_kind,
            decoder=chosen.decoder,
            device=device,
        )

    cases = []
    with loader() as images_at:
        cases.append(emit(measure("1 loader", images_at)))
    with loader() as images_at:
        cases.append(emit(measure("2 loader+views", lambda number: training.views_of(images_at(number), number))))
    compute_only = emit(measure_compute_only())
    cases.append(compute_only)
    with loader() as images_at:
        # the same trainer as above, with its kernels and graphs, so that the ratio is fair
        together = measure("4 files to weights", lambda number: training.on_images(images_at(number), number))
    share = round(together.images_per_second / compute_only.images_per_second, 4)
    cases.append(emit(replace(together, extras={**together.extras, "share_of_compute_only": share})))
    return cases


if __name__ == "__main__":
    main()
