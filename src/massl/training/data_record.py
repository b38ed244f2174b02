"""The images of a run, as its folder remembers them: data.json, and the list of files in data_files.gz."""

import gzip
import io
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from massl.config import MasslError
from massl.data.identity import DataIdentity, describe_change
from massl.data.sources.rules import PixelRanges
from massl.files import read_limited, write_atomically
from massl.json_lines import read_json

_FILE, _LIST = "data.json", "data_files.gz"
_MAX_BYTES = 16 << 20  # of a list of files beyond four times the present one
_KINDS = {"digest": str, "num_images": int, "source": str, "as_before": bool, "changes": list}


class ChangedData(MasslError, ValueError):
    """The images are not those that the run was trained on; the message says what changed and how to go on."""


@dataclass(frozen=True)
class DataRecord:
    FILES: ClassVar = (_FILE, _LIST)

    folder: Path

    @property
    def exists(self) -> bool:
        """False for a new run and for one of a version that did not record its images."""
        return (self.folder / _FILE).exists()

    @property
    def as_before(self) -> bool:
        """Whether the images were listed as by older versions."""
        return bool(self._read().get("as_before", False))

    @property
    def ranges(self) -> PixelRanges:
        """Of images with more than 8 bits; a run that did not record them guessed one for each image."""
        recorded = self._read().get("pixel_ranges")
        return PixelRanges(of_each_image=True) if recorded is None else PixelRanges.from_json(recorded)

    @property
    def source(self) -> str:
        """As the images were last opened."""
        return str(self._read().get("source", ""))

    def digests(self) -> list[str]:
        """Of the images now, and of those before each accepted change."""
        known = self._read()
        return [known["digest"], *(change["digest"] for change in known["changes"])] if known else []

    def refuse_changes(self, now: DataIdentity) -> None:
        known = self._read()
        if known and known["digest"] != now.digest:
            raise ChangedData(
                f"the images are not those that {self.folder} was trained on: {self._describe(known, now)}. Put them "
                "back, go on with the changed images by --data.accept_changes True (in Python: "
                'overrides={"data.accept_changes": True}), or choose another --output.'
            )

    def write(self, now: DataIdentity, *, after_step: int, is_new: bool) -> None:
        """Record the images; those of a run that has begun are added to the list of accepted changes."""
        known = {} if is_new else self._read()
        changes = known.get("changes", [])
        if known and known["digest"] != now.digest:
            before = {key: known[key] for key in ("digest", "num_images", "source")}
            changes = [*changes, {**before, "change": self._describe(known, now), "after_step": after_step}]
        record = {
            "digest": now.digest,
            "num_images": now.num_images,
            "source": now.source,
            "as_before": now.as_before,
            "changes": changes,
            "pixel_ranges": now.ranges.as_json(),
        }
        if record == known:
            return
        if now.files and known.get("digest") != now.digest:
            write_atomically(self.folder / _LIST, gzip.compress(now.files, compresslevel=6, mtime=0))
        write_atomically(self.folder / _FILE, json.dumps(record, indent=2) + "\n")

    def _read(self) -> dict[str, Any]:
        if not self.exists:
            return {}
        try:
            known: dict[str, Any] = read_json(self.folder / _FILE)
            needed = {key: _typed(known, key, kind) for key, kind in _KINDS.items()}
            for change in needed["changes"]:
                _typed(change, "digest", str)
            recorded = known.get("pixel_ranges")
            if recorded is None:
                return needed
            PixelRanges.from_json(recorded)  # raises if it is no such record
            return {**needed, "pixel_ranges": recorded}
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            raise ChangedData(
                f"{self.folder / _FILE} cannot be read ({error!r}), so it is not known which images this run was "
                "trained on; delete the file if they have not changed"
            ) from None

    def _describe(self, known: dict[str, Any], now: DataIdentity) -> str:
        moved = f" (data.source was {known['source']})" if known["source"] != now.source else ""
        before = self._files_before(max_bytes=_MAX_BYTES + 4 * len(now.files)) if now.files else b""
        change = describe_change(before, now.files) if before else ""
        if not change and known["num_images"] != now.num_images:
            change = f"{now.num_images:,} images instead of {known['num_images']:,}"
        return f"{now.source}{moved}: {change or 'pixels, labels, order or orientation differ'}"

    def _files_before(self, *, max_bytes: int) -> bytes:
        """The list of files as recorded; empty if it cannot be read or is far longer than the present one."""
        try:
            packed = read_limited(self.folder / _LIST, max_bytes=max_bytes)
            with gzip.open(io.BytesIO(packed)) as file:
                files = file.read(max_bytes + 1)
        except (OSError, EOFError, zlib.error):
            return b""
        return files if len(files) <= max_bytes else b""


def _typed(record: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(record[key], kind):
        raise TypeError(f"{key} is {record[key]!r}"[:100])
    return record[key]
