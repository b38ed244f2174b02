"""`massl embed --feature patches`: the features of every patch, as a folder of files and their index.

Each file holds a fixed range of the images and is written whole, by one process. The same command continues: files
that are whole stay, the others are computed.
"""

import itertools
import json
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from massl import distributed
from massl.commands.console import print_line
from massl.commands.images import SkippedImages, require_few
from massl.config import MasslError
from massl.data.evaluation.views import view_key
from massl.data.keys import stored_key
from massl.data.loading.loader import ImageBatch
from massl.data.sources.base import ImageSource
from massl.data.sources.subset import UnreadableImages
from massl.digests import DamagedFile
from massl.evaluations.base import require_finite
from massl.evaluations.features import Extractor
from massl.evaluations.named_features import PATCHES, read_patches
from massl.evaluations.patch_files import Shape, whole_shard, write_shard
from massl.files import is_leftover, remove_leftovers, write_atomically
from massl.nn.token_readout import require_patches

_INDEX = "index.json"
_INDEX_HEAD = '{"format": "massl patches 1", '


@dataclass(frozen=True, kw_only=True)
class PatchFolder:
    """Which images go to which file, and what the files hold."""

    path: Path
    extractor: Extractor
    source: ImageSource
    shape: Shape
    images_per_file: int

    @cached_property
    def ranges(self) -> list[range]:
        """The images of each file, as numbers in the source."""
        step, total = self.images_per_file, len(self.source)
        return [range(begin, min(begin + step, total)) for begin in range(0, total, step)]

    def file(self, number: int) -> Path:
        return self.path / f"patches-{number:05d}.safetensors"

    @cached_property
    def preprocessing(self) -> dict[str, object]:
        model = self.extractor.model
        return {**view_key(self.extractor.centre_view()), "mean": list(model.mean), "std": list(model.std)}

    @cached_property
    def _decisive(self) -> dict[str, str]:
        """All that decides the content of the files: another value is refused."""
        settings = self.extractor.settings
        return {
            "weights": self.extractor.model.fingerprint,
            "images": self.source.fingerprint(),
            **{name: str(value) for name, value in self.preprocessing.items()},
            "precision": settings.precision,
            "decoder": settings.decoder,
            "images_per_file": str(self.images_per_file),
        }

    def about(self, number: int) -> dict[str, str]:
        return {**self._decisive, "file": self.file(number).name}

    def require_own(self) -> None:
        """Refuse a folder that holds anything else."""
        names = {self.file(number).name for number in range(len(self.ranges))}
        for entry in sorted(self.path.iterdir()):
            if entry.name == _INDEX and entry.is_file():
                with entry.open("rb") as file:
                    is_own = file.read(len(_INDEX_HEAD)) == _INDEX_HEAD.encode()
            else:
                is_own = entry.name in names or is_leftover(entry)
            if not is_own:
                raise MasslError(
                    f"{self.path} holds {entry.name}, which this command would not write; choose an empty or new "
                    "folder as --output"
                )


def patch_folder(extractor: Extractor, source: ImageSource, path: Path, *, file_mib: int) -> PatchFolder:
    backbone, size = extractor.model.backbone, extractor.model.image_size
    require_patches(backbone, purpose=f"the feature {PATCHES!r}")
    shape = (*backbone.grid(size), backbone.dim)
    bytes_per_image = 2 * shape[0] * shape[1] * shape[2]
    images_per_file = max(1, file_mib * 2**20 // bytes_per_image)
    return PatchFolder(path=path, extractor=extractor, source=source, shape=shape, images_per_file=images_per_file)


def write_patches(folder: PatchFolder, console: Console) -> None:
    """Write the files that are missing or damaged, then the index."""
    extractor = folder.extractor
    left_out = _whole_files(folder)
    _require_few(folder, left_out)
    missing = [number for number in range(len(folder.ranges)) if number not in left_out]
    if left_out and missing:
        print_line(console, f"{folder.path}: {len(left_out)} of {len(folder.ranges)} files are whole; it continues")
    num_ranks = distributed.world_size()
    own = missing[distributed.rank() :: num_ranks]
    work = _Work(folder, own, num_done=sum(len(folder.ranges[number]) for number in left_out))
    with closing(work.batches):
        for turn in range(-(-len(missing) // num_ranks)):
            with extractor.failing_together():
                written = work.write(own[turn]) if turn < len(own) else {}
            for of_rank in distributed.gather_objects(written):
                left_out |= of_rank
            _require_few(folder, left_out)
    _name_left_out(folder, left_out, console)
    with extractor.failing_together():
        if distributed.is_main():
            _write_index(folder, left_out)
            remove_leftovers(folder.path)
    num_images = len(folder.source) - sum(map(len, left_out.values()))
    height, width, dim = folder.shape
    files = "1 file" if len(folder.ranges) == 1 else f"{len(folder.ranges):,} files"
    said = f"{folder.path}: patches of {num_images:,} images, each {height} x {width} of {dim} dimensions, in {files}"
    print_line(console, said)


LeftOut = dict[int, str]  # number of an image in the source -> why it cannot be read


def _whole_files(folder: PatchFolder) -> dict[int, LeftOut]:
    """File -> images left out of it, for all files that are there and whole. The processes share the checks."""
    found: dict[int, LeftOut] = {}
    with folder.extractor.failing_together():
        for number in range(distributed.rank(), len(folder.ranges), distributed.world_size()):
            path, images = folder.file(number), folder.ranges[number]
            if path.exists() or path.is_symlink():
                try:
                    numbers = whole_shard(path, shape=folder.shape, images=images, about=folder.about(number))
                    found[number] = dict.fromkeys(numbers, "it could not be read before")
                except DamagedFile as error:
                    folder.extractor.say(f"{path}: {error}; it is computed again")
        folder.require_own()
    return {number: left for of_rank in distributed.gather_objects(found) for number, left in of_rank.items()}


class _Work:
    """The files of one process. Images are read ahead, also those of the next file."""

    def __init__(self, folder: PatchFolder, files: list[int], *, num_done: int) -> None:
        self._folder = folder
        self._num_done = num_done
        self._unreadable: dict[int, str] = {}
        chunks = [chunk for number in files for chunk in self._chunks(number)]
        self.batches = self._read(chunks)

    def _chunks(self, number: int) -> tuple[Tensor, ...]:
        images = self._folder.ranges[number]
        return torch.split(torch.arange(images.start, images.stop), self._folder.extractor.settings.batch_size)

    def _read(self, chunks: list[Tensor]) -> Generator[ImageBatch, None, None]:
        extractor = self._folder.extractor
        yield from extractor.images_or_others(self._folder.source, chunks, self._unreadable) if chunks else ()

    def write(self, number: int) -> dict[int, LeftOut]:
        """Write one file, the next of those that were given."""
        images = self._folder.ranges[number]
        left_out = write_shard(
            self._folder.file(number),
            self._rows(len(self._chunks(number))),
            shape=self._folder.shape,
            num_images=len(images),
            about=self._folder.about(number),
        )
        return {number: {index: self._unreadable[index] for index in left_out}}

    def _rows(self, num_batches: int) -> Iterator[tuple[Tensor, list[int]]]:
        """Features of the readable images of each batch, and the numbers of the others."""
        extractor, source = self._folder.extractor, self._folder.source
        for batch in itertools.islice(self.batches, num_batches):
            with torch.inference_mode():
                (views,) = extractor.seen(batch, extractor.centre_view())
                rows = read_patches(extractor.model.backbone, views, precision=extractor.settings.precision).half()
            readable = torch.tensor([index not in self._unreadable for index in batch.indices.tolist()])
            rows = rows.cpu()[readable]
            require_finite(rows.flatten(1), name=source.name)
            self._num_done += len(batch.indices) * distributed.world_size()
            extractor.progress(f"patches of {source.name}", self._num_done, len(source))
            yield rows, batch.indices[~readable].tolist()


def _require_few(folder: PatchFolder, left_out: dict[int, LeftOut]) -> None:
    reasons = {index: reason for of_file in left_out.values() for index, reason in of_file.items()}
    if reasons:
        require_few(folder.source, len(reasons), UnreadableImages(folder.source, reasons))


def _name_left_out(folder: PatchFolder, left_out: dict[int, LeftOut], console: Console) -> None:
    skipped = SkippedImages(console)
    for of_file in left_out.values():
        if of_file:
            for message in UnreadableImages(folder.source, of_file).messages:
                skipped.add(message)
    skipped.print_total()


def _write_index(folder: PatchFolder, left_out: dict[int, LeftOut]) -> None:
    """What the files hold, in one JSON object."""
    source, model = folder.source, folder.extractor.model
    files = []
    for number, images in enumerate(folder.ranges):
        shown = [index for index in images if index not in left_out[number]]
        keys = [stored_key(source.key_of(index)) for index in shown]
        files.append({"file": folder.file(number).name, "keys": keys, "labels": [*map(source.label_of, shown)]})
    content = {
        "model": stored_key(model.name),
        "weights": model.fingerprint,
        "data": stored_key(source.name),
        "preprocessing": folder.preprocessing,
        "precision": folder.extractor.settings.precision,
        "shape": folder.shape,
        "dtype": "float16",
        "num_images": sum(len(entry["keys"]) for entry in files),
        "classes": [*map(stored_key, source.class_names or ())],
        "files": files,
    }
    try:
        write_atomically(folder.path / _INDEX, _INDEX_HEAD + json.dumps(content)[1:])
    except OSError as error:
        raise MasslError(
            f"cannot write {folder.path / _INDEX} ({error}); make room or choose another --output"
        ) from None
