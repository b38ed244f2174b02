"""`massl export`: a trained backbone as a folder that other libraries open."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import tyro
from pydantic import Field, field_validator
from rich.console import Console

from massl.commands.arguments import parse
from massl.commands.console import message_console, print_line, require_writable, working
from massl.config import MasslError, Settings, validate
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.results import RESULTS_FILE, ResultRow, newest, read_rows
from massl.exports.card import data_facts, model_card
from massl.exports.curves import draw_curves
from massl.exports.hub_folder import write_torchhub
from massl.exports.job import ExportError, ExportJob, Written, chosen_size
from massl.exports.onnx_folder import require_onnx, write_onnx
from massl.exports.plain_folder import write_safetensors
from massl.exports.timm_folder import write_timm
from massl.exports.transformers_folder import require_transformers, write_transformers
from massl.failures import printable
from massl.files import making_folder
from massl.reports.run_reader import read_run
from massl.reports.runs import PROBE_METRICS, Run, RunError
from massl.weights.io import BACKBONE_FILE, BEST_FILE, backbone_path
from massl.weights.models import open_model

Which = Literal["last", "best"]
Target = Literal["timm", "transformers", "onnx", "torchhub", "safetensors"]
_WRITERS: dict[Target, Callable[[ExportJob, Path], Written]] = {
    "timm": write_timm,
    "transformers": write_transformers,
    "onnx": write_onnx,
    "torchhub": write_torchhub,
    "safetensors": write_safetensors,
}
_NEEDS: dict[Target, Callable[[], None]] = {"transformers": require_transformers, "onnx": require_onnx}
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

DESCRIPTION = """Write a trained backbone as a folder that other libraries open without massl.

massl export runs/a --to timm --output a-timm
massl export runs/a --to transformers --output a-96 --image_size 96
massl export runs/a --to onnx --output a-onnx"""


class ExportSettings(Settings):
    """Which backbone, for which library, and where to."""

    run: tyro.conf.Positional[str] = Field(
        description="a run of massl (its folder), or a weights file of massl or another project (.safetensors .pth)"
    )
    to: Target = Field(
        description="timm and transformers: for one image size; onnx and torchhub: for all sizes; safetensors: massl's "
        "own file, with timm's names"
    )
    output: str = Field(description="folder to make; an existing one is refused")
    which: Which = Field("last", description="of a run: the weights after the last step, or those of its best probe")
    image_size: str = Field(
        "", description="side in pixels, or HEIGHTxWIDTH such as 96x160; default: that of the training images"
    )
    push_to_hub: str = Field(
        "",
        description="also send the folder to this repository of the Hugging Face Hub, OWNER/NAME; a new one is "
        "private. default: nothing is sent",
    )

    @field_validator("push_to_hub")
    @classmethod
    def _is_a_repository(cls, name: str) -> str:
        if name and (not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name):
            raise ValueError(f"push_to_hub is {name!r}; give the name of a repository, as in jane/flowers")
        return name


def export(
    run: str | Path,
    *,
    to: Target,
    output: str | Path,
    image_size: int | tuple[int, int] | str | None = None,
    which: Which = "last",
    push_to_hub: str | None = None,
) -> Path:
    """Write the backbone of a run (its folder, or a weights file) as a folder; returns the folder.

    `to` names the library that opens it: "timm", "transformers", "onnx", "torchhub" or "safetensors". `image_size` is a
    side in pixels or (height, width), by default that of the training images. The folder holds weights, how to prepare
    images, and a model card. `which`: the last or best weights of a run. Only with `push_to_hub`, OWNER/NAME, is
    anything sent: to the Hugging Face Hub.
    """
    if isinstance(image_size, tuple | list):
        image_size = "x".join(map(str, image_size))
    values = {
        "run": str(run),
        "to": to,
        "output": str(output),
        "image_size": "" if image_size is None else str(image_size),
        "which": which,
        "push_to_hub": push_to_hub or "",
    }
    return run_export(validate(ExportSettings, values, origin="export"))


def main(arguments: Sequence[str]) -> int:
    print(printable(str(run_export(parse(ExportSettings, "export", DESCRIPTION, arguments)))))
    return 0


def run_export(settings: ExportSettings, *, hub: Any = None) -> Path:
    """`export` with all settings in one object. `hub`: what sends the folder, by default huggingface_hub's HfApi."""
    assert set(_WRITERS) == set(get_args(Target))
    console = message_console()
    folder = Path(settings.output).expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        raise MasslError(f"{folder} exists; move it away or choose another --output")
    _NEEDS.get(settings.to, lambda: None)()
    if settings.push_to_hub and hub is None:
        hub = _hub()
    job = _job(settings)
    require_writable(folder.parent)
    try:
        with working(console, f"writing {folder.name} for {settings.to}"), making_folder(folder) as unfinished:
            written = _WRITERS[settings.to](job, unfinished)
            _write_card(settings, job, written, unfinished, name=folder.name, console=console)
    except OSError as error:
        raise MasslError(f"cannot write {folder} ({error}); make room or choose another --output") from error
    about = f"{job.model.kind}, {job.size[0]} x {job.size[1]} px"
    print_line(console, f"{folder}: {about}; features differ from massl's by at most {written.difference:.1e}")
    if settings.push_to_hub:
        _send(folder, settings.push_to_hub, hub, console)
    return folder


def _job(settings: ExportSettings) -> ExportJob:
    path = Path(settings.run).expanduser()
    if not path.exists():
        raise ExportError(f"{path} does not exist; give the folder of a massl run, or a weights file")
    model = open_model(path, which=settings.which)
    if not model.is_own and model.imported is None:  # where the file lies is no matter of those who get the folder
        model = replace(model, imported=model.origin.replace(str(path), path.name))
    return ExportJob(model=model, size=chosen_size(model, settings.image_size))


# ---- the model card --------------------------------------------------------------------------------------------------


def _write_card(
    settings: ExportSettings, job: ExportJob, written: Written, unfinished: Path, *, name: str, console: Console
) -> None:
    path = Path(settings.run).expanduser()
    of_run = path if path.is_dir() else path.absolute().parent
    run = _run_of(of_run, console) if job.model.is_own else None
    card = model_card(
        job,
        written,
        name=settings.push_to_hub.rpartition("/")[2] or name,
        folder=name,
        repository=settings.push_to_hub,
        run=run,
        probe={} if run is None else _probe_of(run, backbone_path(path, which=settings.which)),
        data=None if run is None else data_facts(of_run),
        results=() if run is None else _results_of(of_run, job.model.fingerprint, console),
        has_curves=run is not None and draw_curves(run, unfinished / "curves.png"),
    )
    (unfinished / "README.md").write_text(card, encoding="utf-8", errors="replace")


def _run_of(folder: Path, console: Console) -> Run | None:
    """The run in the folder of the weights; None for a backbone file that stands alone."""
    if not (folder / "recipe.yaml").is_file():
        return None
    try:
        return read_run(folder)
    except (RunError, MasslError, OSError, UnicodeError) as error:
        print_line(console, f"the model card leaves out recipe and scores: {error}", style="yellow")
        return None


def _probe_of(run: Run, file: Path) -> Mapping[str, float]:
    """The row of the last or best probe; empty where there is none, or if the file is another of the folder."""
    rows = [row for row in run.rows if any(name in row for name in PROBE_METRICS)]
    if file.name == BEST_FILE:
        best = next((row["best_step"] for row in reversed(rows) if "best_step" in row), None)
        rows = [row for row in rows if row["step"] == best]
    return rows[-1] if rows and file.name in (BACKBONE_FILE, BEST_FILE) else {}


def _results_of(folder: Path, weights: str, console: Console) -> list[ResultRow]:
    """Results in the run's folder, only those of the exported weights."""
    rows: list[ResultRow] = []
    for file in sorted({folder / RESULTS_FILE, *folder.glob(f"*/{RESULTS_FILE}")}):
        try:
            rows += read_rows(file, warn=lambda text: print_line(console, text, style="yellow"))
        except EvaluationError as error:
            print_line(console, f"the model card leaves out scores: {error}", style="yellow")
    return [row for row in newest(rows) if row.weights == weights]


# ---- the Hub ---------------------------------------------------------------------------------------------------------


def _hub() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MasslError(
            "--push_to_hub needs huggingface_hub; install it with: pip install 'massl[hf]', or leave it out"
        ) from None
    return HfApi(library_name="massl")


def _send(folder: Path, repository: str, hub: Any, console: Console) -> None:
    try:
        with working(console, f"sending {folder.name} to {repository}"):
            made = hub.create_repo(repository, private=True, exist_ok=True)
            name = str(getattr(made, "repo_id", repository))
            hub.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Model exported by massl")
    except Exception as error:  # each version of the client raises its own errors
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise MasslError(
            f"the folder {folder} is complete, but it could not be sent to {repository} ({reason}). Log in with `hf "
            f"auth login`, then send it with `hf upload {repository} {folder}`"
        ) from error
    print_line(console, f"sent to {name}; a new repository is private until you change that on its page")
