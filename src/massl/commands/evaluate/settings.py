"""The options of `massl evaluate`, as fields."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model, model_validator

from massl.commands.model import ModelSettings
from massl.config import closest
from massl.evaluations.protocols import PROTOCOLS

_NO_CACHE = "none"


class EvaluationRequest(ModelSettings):
    """What to measure on which images: the options besides those of single protocols."""

    output: str = Field(description="folder for results.jsonl, results.md, kept features, heads and figures")
    protocol: tuple[str, ...] = Field(
        (), description="; ".join(f"{name}: {entry.summary}" for name, entry in PROTOCOLS.items())
    )
    suite: Literal["paper"] | None = Field(
        None, description="paper: every evaluation of the paper whose data lie below data_root"
    )
    train: str | None = Field(None, description="images to learn from: a folder, archive or URI, as in pretrain")
    test: str | None = Field(None, description="images to score")
    validation: str | None = Field(None, description="images for choosing rates; default: a part of train is held out")
    folder: str | None = Field(
        None, description="of retrieval, copy-detection, backgrounds and davis: the folder in the published layout"
    )
    data: tuple[str, ...] = Field(
        (), description="data sets by name (CIFAR-10, Pets ...) below data_root, instead of train, test and folder"
    )
    data_root: str | None = Field(None, description="where the data sets lie")
    name: str | None = Field(
        None, description="what the data are called in the results; default: the URI of the test images"
    )
    cache: str = Field(
        "", description=f"folder where features are kept; default: OUTPUT/features; {_NO_CACHE}: they are not kept"
    )
    again: bool = Field(
        False, description="measure again what the results already hold, and try unreadable images again"
    )

    @model_validator(mode="after")
    def _something_is_asked_for(self) -> "EvaluationRequest":
        for protocol in self.protocol:
            if protocol not in PROTOCOLS:
                known = f"Known: {', '.join(PROTOCOLS)}"
                raise ValueError(f"there is no protocol {protocol!r}.{closest(protocol, PROTOCOLS)} {known}")
        if (self.suite is None) == (not self.protocol):
            raise ValueError("give either protocol (knn, linear ...) or suite paper")
        if (self.suite or self.data) and not self.data_root:
            raise ValueError("data_root is missing: the folder below which the data sets lie")
        own = [field for field in ("train", "test", "validation", "folder", "name") if getattr(self, field) is not None]
        if self.data and own:
            raise ValueError(f"data names known sets, {' and '.join(own)} your own images: give one or the other")
        if self.suite and (self.data or own):
            given = " and ".join([*(["data"] if self.data else []), *own])
            raise ValueError(f"suite {self.suite} chooses its own images below data_root: leave {given} out")
        if self.data_root and not (self.suite or self.data):
            raise ValueError("data_root is where the sets of data or suite lie; give one of them, or leave it out")
        if self.train is None and self.test is None:
            self._refuse_rules()
        return self

    def _refuse_rules(self) -> None:
        """Published data sets are read as they are, whole."""
        for name in ("pixel_range", "max_file_mib", "max_megapixels"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for images of train and test; published data sets are read as they are")

    def cache_folder(self) -> Path | None:
        if self.cache == _NO_CACHE:
            return None
        return Path(self.cache).expanduser() if self.cache else Path(self.output).expanduser() / "features"


_PROTOCOL_FIELDS: dict[str, Any] = {
    name.replace("-", "_"): (entry.settings_type, entry.settings_type()) for name, entry in PROTOCOLS.items()
}
# All options, with one group for each protocol of the table.
EvaluateSettings = create_model("EvaluateSettings", __base__=EvaluationRequest, **_PROTOCOL_FIELDS)
