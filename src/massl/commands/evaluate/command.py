"""Evaluation: model -> features -> protocols -> results.jsonl and a table with the paper's figures beside ours."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from massl import distributed
from massl.commands.arguments import parse
from massl.commands.console import print_line, print_table, require_writable, result_console
from massl.commands.evaluate.jobs import Job, digest_of, digest_of_images, jobs_of, name_of_images
from massl.commands.evaluate.settings import EvaluateSettings, EvaluationRequest
from massl.commands.images import UnreadableLeftOut
from massl.commands.model import model_on_device, record_of_run
from massl.config import MasslError, changed, merge, validate
from massl.data.evaluation.views import PUBLISHED_CROP_RATIO
from massl.data.identity import identify
from massl.data.keys import stored_key
from massl.data.sources import ImageSource
from massl.data.sources.folder import FolderSource, folder_named
from massl.evaluations.base import EvaluationData
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import EvaluationError, Measurement
from massl.evaluations.protocols import PROTOCOLS
from massl.evaluations.results import RESULTS_FILE, ResultRow, append_rows, newest, read_rows, require_own_files
from massl.files import write_atomically
from massl.nn.token_readout import UnsuitableModel, has_class_token
from massl.reports.tables import ResultsTable, as_markdown, results_table, transfer_averages
from massl.weights.io import own_image_size

_TABLE_FILE = "results.md"
_SEEN = "caution: the run was trained on test images, so this does not tell how its features suit new ones"

DESCRIPTION = """Judge a model by the paper's protocols.

massl evaluate runs/a --protocol knn logreg --train demo:train --test demo:test --output results
massl evaluate runs/a --protocol knn --data CIFAR-10 Pets --data_root DATA --output results
massl evaluate runs/a --suite paper --data_root DATA --output results

Features are computed once and kept; the same command again measures only what is missing. Numbers go to
OUTPUT/results.jsonl, a table with the paper's figures beside them to the screen and OUTPUT/results.md. Several GPUs:
torchrun --nproc-per-node 4 -m massl ..."""


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    folder: Path
    rows: list[ResultRow]  # requested results, measured now or before
    missing: dict[str, str]  # job whose files are missing -> which, and how to get them
    failed: dict[str, str]  # job that failed -> the error; a single job raises instead


def evaluate(
    model: str | Path,
    *,
    output: str | Path,
    protocol: str | Sequence[str] = (),
    suite: str | None = None,
    train: str | Path | None = None,
    test: str | Path | None = None,
    data_root: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> EvaluateResult:
    """Judge a backbone by the paper's protocols.

    `model` is a run of massl, a weights file or a timm name; `protocol` one or several names of protocols, with images
    named by `train` and `test`, or `suite="paper"` for all whose data lie below `data_root`. `overrides` sets what else
    `massl evaluate --help` lists, e.g. {"knn.ks": [20], "precision": "bf16"}. Results are kept in the folder `output`.
    """
    named = {"model": model, "train": train, "test": test, "data_root": data_root, "output": output, "suite": suite}
    values: dict[str, Any] = {key: str(value) for key, value in named.items() if value is not None}
    values["protocol"] = [protocol] if isinstance(protocol, str) else list(protocol)
    merged = merge(values, overrides or {}, EvaluateSettings)
    return run_evaluation(validate(EvaluateSettings, merged, origin="evaluate"))


def main(arguments: Sequence[str]) -> int:
    result = run_evaluation(parse(EvaluateSettings, "evaluate", DESCRIPTION, arguments))
    return 1 if result.failed or not result.rows else 0


def run_evaluation(request: EvaluationRequest) -> EvaluateResult:
    """`evaluate` with all settings in one object, as the command line gives them."""
    with model_on_device(request, cache=request.cache_folder()) as (extractor, console):
        if extractor.feature is None and not has_class_token(extractor.model.backbone):
            extractor = replace(extractor, feature="pooled")  # a ResNet has no other; results name it
        extractor = replace(extractor, tries_unreadable=request.again)
        return _run(extractor, request, Path(request.output).expanduser(), console)


def _run(extractor: Extractor, request: EvaluationRequest, folder: Path, console: Console) -> EvaluateResult:
    jobs, missing = jobs_of(request)
    require_writable(folder)
    require_own_files(folder / RESULTS_FILE)  # before anything is measured
    rows = read_rows(folder / RESULTS_FILE, warn=lambda message: print_line(console, message, style="yellow"))
    distributed.barrier()  # all processes have read the same rows before one adds to them
    known = set() if request.again else {row.run for row in rows}
    unreadable = UnreadableLeftOut(console)
    runs, failed = set(), {}
    for job in jobs:
        try:
            run, measured = _run_job(job, extractor, folder, rows, known, unreadable, console)
            runs.add(run)
            rows += measured
        except MasslError as error:
            if len(jobs) == 1:
                raise
            if distributed.world_size() > 1 and not isinstance(error, UnsuitableModel):
                # Another process may be waiting for this one's share, and must not get that of the next job instead.
                # An unsuitable model fails in all processes alike.
                raise EvaluationError(
                    f"{job.title}: {error}. Results so far are kept; the same command continues"
                ) from error
            failed[job.title] = str(error)
            print_line(console, f"{job.title}: {error}", style="red")
    requested = newest(row for row in rows if row.run in runs)
    if distributed.is_main():
        _print_results(requested, missing, failed, folder)
    return EvaluateResult(folder=folder, rows=requested, missing=missing, failed=failed)


def _run_job(
    job: Job,
    extractor: Extractor,
    folder: Path,
    rows_before: Sequence[ResultRow],
    known: set[str],
    unreadable: UnreadableLeftOut,
    console: Console,
) -> tuple[str, list[ResultRow]]:
    """The job's digest, and its new results, which are written together; none if the digest is `known`."""
    entry, model = PROTOCOLS[job.protocol], extractor.model
    doubts: list[str] = []
    data = job.open(job.output_in(folder), doubts.append)
    is_seen = data.test is not None and _seen_in_training(model.name, data.test)
    for doubt in (*doubts, *([_SEEN] if is_seen else [])):
        print_line(console, f"{job.title}: {doubt}", style="yellow")
    if not entry.uses_centre_crop:
        extractor = replace(extractor, crop_ratio=PUBLISHED_CROP_RATIO)  # so that results do not mention the user's
    images = digest_of_images(data)
    run = digest_of(job, data, images=images, extractor=extractor)
    if not distributed.largest_over_ranks(int(run not in known), extractor.device):  # new for one process: all measure
        print_line(
            console, f"{job.title}: measured before, see {folder / RESULTS_FILE}; --again True measures it again"
        )
        return run, []
    if all(row.images != images for row in rows_before):  # rows of older versions name these images by that digest
        images = name_of_images(data)
    began = time.perf_counter()
    remarks = [*_feature_remarks(extractor), *changed(job.settings, besides=entry.unremarked)]
    remarks += ["other images than published"] if doubts else []
    remarks += ["test images seen in pre-training"] if is_seen else []
    if data.train is not None and data.test is not None and data.train.fingerprint() == data.test.fingerprint():
        remarks.append("tested on the training images")
        print_line(console, f"{job.title}: the training images are the test images", style="yellow")
    measurements, num_unreadable = _measure(job, extractor, data, unreadable)
    if num_unreadable:
        remarks.append(f"{num_unreadable} unreadable {'image' if num_unreadable == 1 else 'images'} left out")
    seconds = time.perf_counter() - began
    rows = [
        ResultRow(
            protocol=job.protocol,
            **vars(replace(measurement, setting=measurement.setting.with_remarks(remarks))),
            seconds=round(seconds, 3),
            weights=model.fingerprint,
            model=stored_key(model.name),
            architecture=model.architecture,
            precision=extractor.settings.precision,
            run=run,
            train="" if data.train is None else stored_key(data.train.name),
            images=images,
        )
        for measurement in measurements
    ]
    if distributed.is_main():
        append_rows(folder / RESULTS_FILE, rows)
        # Read again: others may have added results. Damaged lines were named at the start.
        _write_table(newest(read_rows(folder / RESULTS_FILE, warn=lambda message: None)), folder)
    distributed.barrier()
    print_line(console, f"{job.title}: {len(rows)} numbers in {seconds:.1f} s", style="green")
    return run, rows


def _measure(
    job: Job, extractor: Extractor, data: EvaluationData, unreadable: UnreadableLeftOut
) -> tuple[list[Measurement], int]:
    """What the protocol measures on the images that can be read, and the number of the others."""
    given = (data.train, data.test, data.validation)

    def measure(*readable: ImageSource | None) -> tuple[list[Measurement], int]:
        train, test, validation = readable
        chosen = replace(data, train=train, test=test, validation=validation)
        pairs = [(whole, rest) for whole, rest in zip(given, readable, strict=True) if whole and rest]
        # by identity: the training images may be the test images
        left_out = {id(whole): len(whole) - len(rest) for whole, rest in pairs}
        return list(PROTOCOLS[job.protocol].measure(extractor, chosen, job.settings)), sum(left_out.values())

    return unreadable.run(measure, *given)


def _seen_in_training(model: str, test: ImageSource) -> bool:
    """Whether the model is a run that was trained on these images, or on a folder that holds them.

    Also where data.hold_out kept some of them out.
    """
    record = record_of_run(model)
    if record is None:
        return False
    if isinstance(test, FolderSource):  # by place: uncompressed images often have equal names and sizes
        folder = folder_named(record.source)
        return folder is not None and test.root.resolve().is_relative_to(folder)
    return identify(test).digest in record.digests()


def _feature_remarks(extractor: Extractor) -> list[str]:
    """How the features deviate from the published ones."""
    own_size = own_image_size(extractor.model.backbone.model)
    remarks = {
        f"feature {extractor.feature}": extractor.feature is not None,
        f"crop ratio {extractor.crop_ratio:g}": extractor.crop_ratio != PUBLISHED_CROP_RATIO,
        f"{extractor.model.image_size} px": extractor.model.image_size != own_size,
        "JPEGs decoded by the GPU": extractor.settings.decoder == "gpu",
    }
    return [remark for remark, holds in remarks.items() if holds]


def _print_results(rows: list[ResultRow], missing: Mapping[str, str], failed: Mapping[str, str], folder: Path) -> None:
    screen = result_console()
    if rows:
        table = _table(rows)
        print_table(screen, table)
        for note in table.footnotes:
            print_line(screen, note)
    for title, lacks in missing.items():
        print_line(screen, f"not measured: {title}. {lacks}")
    for title, error in failed.items():
        print_line(screen, f"failed: {title}. {error}", style="red")
    if missing:
        num_measured = len({(row.protocol, row.data) for row in rows})
        print_line(screen, f"measured {num_measured}, missing {len(missing)}, failed {len(failed)}")
    if rows:
        print_line(screen, f"results: {folder / RESULTS_FILE}, {folder / _TABLE_FILE}")


def _write_table(rows: list[ResultRow], folder: Path) -> None:
    """All results in the folder, of any model, as Markdown."""
    if rows:
        write_atomically(folder / _TABLE_FILE, as_markdown(_table(rows)) + "\n")


def _table(rows: list[ResultRow]) -> ResultsTable:
    """Rows and transfer averages. Data names of several sets of images get their training images added."""
    images: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        images.setdefault((row.protocol, row.data), set()).add(row.images)
    named = [
        replace(row, data=f"{row.data} (train: {row.train}, images {row.images[:6]})")
        if len(images[row.protocol, row.data]) > 1
        else row
        for row in rows
    ]
    return results_table([*named, *transfer_averages(named)])
