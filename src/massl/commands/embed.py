"""Features of a source as a file, for whatever comes next."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import Field, model_validator
from safetensors import SafetensorError

from massl import distributed
from massl.commands.arguments import parse
from massl.commands.console import print_line, require_writable
from massl.commands.images import UnreadableLeftOut, open_images
from massl.commands.model import ModelSettings, model_on_device
from massl.commands.patches import patch_folder, write_patches
from massl.config import MasslError, closest, merge, validate
from massl.data.keys import stored_key
from massl.data.loading.given_images import GivenImage, given_source
from massl.data.loading.range_sample import settle_ranges
from massl.data.sources import ImageSource
from massl.data.sources.base import Pixels
from massl.digests import DIGEST_TO_COME, seal_safetensors_file
from massl.evaluations.features import Extractor
from massl.evaluations.named_features import FEATURE_LINES, FEATURES, PATCHES
from massl.files import replacing

Images = str | Path | Pixels | Sequence[GivenImage]
Rows = NDArray[np.float32]
Labels = NDArray[np.int64]
_FEATURE = "pooled"


DESCRIPTION = """Write a model's features of your images to a file, or those of every patch to a folder of files.

massl embed runs/a --data photos/ --output features.npz
massl embed runs/a --data photos/ --feature patches --output patches"""


class EmbedSettings(ModelSettings):
    data: str = Field(description="the images: a folder, archive or URI, as in pretrain")
    output: str = Field(
        description="file to write: .parquet (needs pyarrow), .npz or .safetensors; of patches: a folder"
    )
    feature: str | None = Field(
        None,
        description=f"what to write; default: {_FEATURE}{FEATURE_LINES}\n  {PATCHES}: all patch tokens, float16",
    )
    file_mib: int = Field(1024, gt=0, description="patches: size of a file in MiB, at most")

    @model_validator(mode="after")
    def _format_is_known(self) -> "EmbedSettings":
        ending, features = Path(self.output).suffix, (*FEATURES, PATCHES)
        if self.feature not in (None, *features):
            near, known = closest(str(self.feature), features), ", ".join(features)
            raise ValueError(f"there is no feature {self.feature!r}.{near} Known: {known}")
        if self.feature == PATCHES:
            if ending in WRITERS:
                raise ValueError(f"output is {self.output!r}, but {PATCHES} are written to a folder; name one")
        elif ending not in WRITERS:
            raise ValueError(f"output is {self.output!r}; its ending chooses the format: {', '.join(WRITERS)}")
        return self


class Embeddings(NamedTuple):
    """Features of images, in their order."""

    features: Rows  # [N, D]
    labels: Labels  # [N]; -1: none
    keys: list[str]  # paths as Python opens them, or numbers of images without one
    classes: list[str]  # names of the labels; "": none


@overload
def embed(
    model: str | Path,
    *,
    data: Images,
    output: str | Path,
    feature: str = _FEATURE,
    overrides: Mapping[str, Any] | None = None,
) -> Path: ...


@overload
def embed(
    model: str | Path,
    *,
    data: Images,
    output: None = None,
    feature: str = _FEATURE,
    overrides: Mapping[str, Any] | None = None,
) -> Embeddings: ...


def embed(
    model: str | Path,
    *,
    data: Images,
    output: str | Path | None = None,
    feature: str = _FEATURE,
    overrides: Mapping[str, Any] | None = None,
) -> Path | Embeddings:
    """The features of all images of `data`, with their labels and keys; with `output`, written to this file.

    `data` is a folder, archive or URI, a uint8 array [N, H, W, 3], or a list of paths, Pillow images and arrays. The
    ending of `output` chooses the format: .parquet, .npz or .safetensors. `feature` is what `massl embed --help`
    lists; "patches" needs a folder as `output`. Images are prepared as in training; `overrides` sets any other option,
    e.g. {"image_size": 96}.
    """
    values: dict[str, Any] = {"model": str(model), "feature": feature}
    if output is None:
        if feature == PATCHES:
            raise MasslError(
                f"{PATCHES} are written to a folder; give one as --output. For those of a few images in memory, see "
                "massl.load_backbone and the model's forward_features"
            )
        options = validate(ModelSettings, merge(values, overrides or {}, ModelSettings), origin="embed")
        source = _open(data, options)
        with model_on_device(options, cache=None) as (extractor, console):
            return UnreadableLeftOut(console).run(partial(_embeddings, extractor), source)
    is_named = isinstance(data, str | Path)
    values |= {"data": str(data) if is_named else "the given images", "output": str(output)}
    settings = validate(EmbedSettings, merge(values, overrides or {}, EmbedSettings), origin="embed")
    return run_embedding(settings, None if is_named else _open(data, settings))


def _open(data: Images, settings: ModelSettings) -> ImageSource:
    if isinstance(data, str | Path):
        return open_images(data, rules=settings.rules(), may_download=True)
    source = given_source(data, rules=settings.rules())
    settle_ranges(source)
    return source


def main(arguments: Sequence[str]) -> int:
    run_embedding(parse(EmbedSettings, "embed", DESCRIPTION, arguments))
    return 0


def run_embedding(settings: EmbedSettings, source: ImageSource | None = None) -> Path:
    """Write the features of the source, by default `settings.data`, to the file `settings.output`."""
    path = Path(settings.output).expanduser()
    if settings.feature == PATCHES:
        return _write_patches(settings, path, source)
    if path.exists():
        raise MasslError(f"{path} exists; move it away or choose another --output")
    if path.suffix == ".parquet":
        _require_pyarrow()
    source = _open(settings.data, settings) if source is None else source
    require_writable(path.parent)
    with model_on_device(settings, cache=None) as (extractor, console):
        rows = UnreadableLeftOut(console).run(partial(_embeddings, extractor), source)
        if distributed.is_main():
            about = {
                "model": extractor.model.name,
                "weights": extractor.model.fingerprint,
                "feature": extractor.chosen_feature(_FEATURE),
                "image_size": str(extractor.model.image_size),
                "crop_ratio": f"{extractor.crop_ratio:g}",
                "data": source.name,
            }
            _write(path, rows, _storable(about))
        print_line(console, f"{path}: {len(rows.keys):,} features of {rows.features.shape[1]} dimensions")
        distributed.barrier()
    return path


def _write_patches(settings: EmbedSettings, path: Path, source: ImageSource | None) -> Path:
    source = _open(settings.data, settings) if source is None else source
    require_writable(path)
    with model_on_device(settings, cache=None) as (extractor, console):
        write_patches(patch_folder(extractor, source, path, file_mib=settings.file_mib), console)
        distributed.barrier()
    return path


def _write(path: Path, rows: Embeddings, about: dict[str, str]) -> None:
    keys, classes = (list(map(stored_key, names)) for names in (rows.keys, rows.classes))
    stored = Embeddings(features=rows.features, labels=rows.labels, keys=keys, classes=classes)
    try:
        with replacing(path) as unfinished:
            WRITERS[path.suffix](unfinished, stored, about)
    except (OSError, SafetensorError) as error:
        raise MasslError(f"cannot write {path} ({error}); make room or choose another --output") from error


def _storable(about: dict[str, str]) -> dict[str, str]:
    return {name: stored_key(value) for name, value in about.items()}


def _embeddings(extractor: Extractor, source: ImageSource) -> Embeddings:
    found = extractor.features(source, view=extractor.centre_view(), feature=_FEATURE)
    keys = [source.key_of(index) for index in range(len(source))]
    names, labels = source.class_names or (), found.labels.tolist()
    classes = [names[label] if 0 <= label < len(names) else "" for label in labels]
    return Embeddings(features=found.rows.numpy(), labels=found.labels.numpy(), keys=keys, classes=classes)


def _write_npz(path: Path, rows: Embeddings, about: dict[str, str]) -> None:
    with path.open("wb") as file:
        np.savez(
            file,
            features=rows.features,
            labels=rows.labels,
            keys=np.array(rows.keys),
            classes=np.array(rows.classes, dtype=np.str_),
            about=np.array(json.dumps(about)),
        )


def _write_safetensors(path: Path, rows: Embeddings, about: dict[str, str]) -> None:
    keys, classes = (np.frombuffer("\n".join(lines).encode(), dtype=np.uint8) for lines in (rows.keys, rows.classes))
    tensors: dict[str, NDArray[Any]] = {"features": rows.features, "labels": rows.labels}
    tensors |= {"keys_utf8_lines": keys, "classes_utf8_lines": classes}
    safetensors.numpy.save_file(tensors, path, metadata={**about, **DIGEST_TO_COME})
    seal_safetensors_file(path)


def _write_parquet(path: Path, rows: Embeddings, about: dict[str, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    features = pyarrow.array(rows.features.reshape(-1))
    columns = {
        "key": pyarrow.array(rows.keys),
        "label": pyarrow.array(rows.labels, mask=rows.labels < 0),  # unlabelled: null
        "class": pyarrow.array([name or None for name in rows.classes], type=pyarrow.string()),
        "feature": pyarrow.FixedSizeListArray.from_arrays(features, rows.features.shape[1]),
    }
    table = pyarrow.table(columns).replace_schema_metadata({"massl": json.dumps(about)})
    pyarrow.parquet.write_table(table, path, write_page_checksum=True)


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise MasslError(
            "parquet files need pyarrow; install it with: pip install pyarrow (or 'massl[parquet]'), or write .npz or "
            ".safetensors"
        ) from None


Writer = Callable[[Path, Embeddings, dict[str, str]], None]
WRITERS: dict[str, Writer] = {".parquet": _write_parquet, ".npz": _write_npz, ".safetensors": _write_safetensors}
