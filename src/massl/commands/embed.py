"""Features of a source as a file, for whatever comes next."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import Field, model_validator

from massl import distributed
from massl.commands.arguments import parse
from massl.commands.console import print_line, require_writable
from massl.commands.model import ModelSettings, model_on_device
from massl.config import MasslError, merge, validate
from massl.data.sources import open_source
from massl.files import replacing

Rows = NDArray[np.float32]
Labels = NDArray[np.int64]


DESCRIPTION = """Write a model's features of your images to a file.

massl embed runs/a --data photos/ --output features.parquet"""


class EmbedSettings(ModelSettings):
    data: str = Field(description="the images: a folder, archive or URI, as in pretrain's --data.source")
    output: str = Field(description="file to write: .parquet (needs pyarrow), .npz or .safetensors")

    @model_validator(mode="after")
    def _format_is_known(self) -> "EmbedSettings":
        if Path(self.output).suffix not in WRITERS:
            raise ValueError(f"output is {self.output!r}; its ending chooses the format: {', '.join(WRITERS)}")
        return self


def embed(
    model: str | Path, *, data: str | Path, output: str | Path, overrides: Mapping[str, Any] | None = None
) -> Path:
    """Write the features of all images of `data`, with their keys and labels, to the file `output`.

    The file's ending chooses the format: .parquet, .npz or .safetensors. `overrides` sets any other option of
    `massl embed --help`, e.g. {"image_size": 96}.
    """
    values = merge({"model": str(model), "data": str(data), "output": str(output)}, overrides or {}, EmbedSettings)
    return run_embedding(validate(EmbedSettings, values, origin="embed"))


def main(arguments: Sequence[str]) -> int:
    run_embedding(parse(EmbedSettings, "embed", DESCRIPTION, arguments))
    return 0


def run_embedding(settings: EmbedSettings) -> Path:
    path = Path(settings.output).expanduser()
    if path.exists():
        raise MasslError(f"{path} exists; move it away or choose another --output")
    if path.suffix == ".parquet":
        _require_pyarrow()
    source = open_source(settings.data)
    require_writable(path.parent)
    with model_on_device(settings, cache=None) as (extractor, console):
        wanted = extractor.feature or "pooled"
        features = extractor.features(source, view=extractor.centre_view(), feature=wanted)
        if distributed.is_main():
            about = {
                "model": extractor.model.name,
                "weights": extractor.model.fingerprint,
                "feature": wanted,
                "data": source.name,
            }
            keys = [source.key_of(index) for index in range(len(source))]
            with replacing(path) as partial:
                WRITERS[path.suffix](partial, features.rows.numpy(), features.labels.numpy(), keys, about)
        print_line(console, f"{path}: {len(features):,} features of {features.rows.shape[1]} dimensions")
        distributed.barrier()
    return path


def _write_npz(path: Path, rows: Rows, labels: Labels, keys: list[str], about: dict[str, str]) -> None:
    with path.open("wb") as file:
        np.savez(file, features=rows, labels=labels, keys=np.array(keys), about=np.array(json.dumps(about)))


def _write_safetensors(path: Path, rows: Rows, labels: Labels, keys: list[str], about: dict[str, str]) -> None:
    names = np.frombuffer("\n".join(keys).encode(), dtype=np.uint8)
    safetensors.numpy.save_file({"features": rows, "labels": labels, "keys_utf8_lines": names}, path, metadata=about)


def _write_parquet(path: Path, rows: Rows, labels: Labels, keys: list[str], about: dict[str, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "key": pyarrow.array(keys),
        "label": pyarrow.array(labels, mask=labels < 0),  # unlabelled: null
        "feature": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), rows.shape[1]),
    }
    table = pyarrow.table(columns).replace_schema_metadata({"massl": json.dumps(about)})
    pyarrow.parquet.write_table(table, path)


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise MasslError(
            "parquet files need pyarrow; install it with: pip install 'massl[parquet]', or write .npz or .safetensors"
        ) from None


Writer = Callable[[Path, Rows, Labels, list[str], dict[str, str]], None]
WRITERS: dict[str, Writer] = {".parquet": _write_parquet, ".npz": _write_npz, ".safetensors": _write_safetensors}
