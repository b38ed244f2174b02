"""Evaluation, assembled: model -> features -> protocols -> results.jsonl and a table with the paper's figures beside
ours.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from massl import distributed
from massl.commands.arguments import parse
from massl.commands.console import print_line, print_table, require_writable, result_console
from massl.commands.evaluate.jobs import Job, MissingJob, digest_of, digest_of_images, jobs_of
from massl.commands.evaluate.settings import EvaluateSettings
from massl.commands.model import model_on_device
from massl.config import MasslError, changed, merge, validate
from massl.data.evaluation.views import PUBLISHED_CROP_RATIO
from massl.evaluations.base import EvaluationError, Measurement
from massl.evaluations.features import Extractor
from massl.evaluations.protocols import PROTOCOLS
from massl.evaluations.results import RESULTS_FILE, ResultRow, append_rows, newest, read_rows
from massl.nn.token_readout import UnsuitableModel
from massl.reports.tables import as_markdown, results_table, transfer_averages
from massl.weights.models import own_image_size

TABLE_FILE = "results.md"

DESCRIPTION = """Judge a model by the paper's protocols.

massl evaluate runs/a --protocol knn logreg --train demo:train --test demo:test --output results
massl evaluate runs/a --protocol knn --data CIFAR-10 Pets --data_root DATA --output results
massl evaluate runs/a --suite paper --data_root DATA --output results

Features are computed once and kept; the same command again measures only what is not there yet. Numbers go to
OUTPUT/results.jsonl, a table with the paper's figures beside them to the screen and OUTPUT/results.md. Several GPUs:
torchrun --nproc-per-node 4 -m massl ..."""


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    folder: Path
    rows: list[ResultRow]  # what was asked for, measured now or before
    missing: dict[str, str]  # of a suite: what could not be measured -> which files it lacks and how to get them
    failed: dict[str, str]  # of several jobs: what was stopped by an error -> the error


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
    return run_evaluation(validate(EvaluateSettings, merge(values, overrides or {}), origin="evaluate"))


def main(arguments: Sequence[str]) -> int:
    result = run_evaluation(parse(EvaluateSettings, "evaluate", DESCRIPTION, arguments))
    return 1 if result.failed or not result.rows else 0


def run_evaluation(settings: EvaluateSettings) -> EvaluateResult:
    """`evaluate` with all settings in one object, as the command line gives them."""
    with model_on_device(settings, cache=settings.cache_folder()) as (extractor, console):
        return _run(extractor, settings, Path(settings.output).expanduser(), console)


def _run(extractor: Extractor, settings: EvaluateSettings, folder: Path, console: Console) -> EvaluateResult:
    jobs, missing = jobs_of(settings)
    require_writable(folder)
    path = folder / RESULTS_FILE
    before = read_rows(path)
    distributed.barrier()  # all processes have read the same rows before one adds to them
    runs, failed = set(), {}
    for job in jobs:
        try:
            runs.add(_measure(job, extractor, folder, [] if settings.again else before, console))
        except MasslError as error:
            if len(jobs) == 1:
                raise
            if distributed.world_size() > 1 and not isinstance(error, UnsuitableModel):
                # Another process may be waiting for the share of this one, and must not get that of the next job. A
                # model is unsuitable for all of them alike.
                raise EvaluationError(
                    f"{job.title}: {error}. Results so far are kept; the same command continues"
                ) from error
            failed[job.title] = str(error)
            print_line(console, f"{job.title}: {error}", style="red")
    rows = read_rows(path)
    asked_for = newest(row for row in rows if row.run in runs)
    if distributed.is_main():
        _report(asked_for, missing, failed, folder)
    return EvaluateResult(
        folder=folder, rows=asked_for, missing={job.title: job.lacks for job in missing}, failed=failed
    )


def _measure(job: Job, extractor: Extractor, folder: Path, before: list[ResultRow], console: Console) -> str:
    """The job's numbers, added to the results together once all are there; returns the digest under which they are
    found.
    """
    model = extractor.model
    doubts: list[str] = []
    data = job.open(job.output_in(folder), doubts.append)
    for doubt in doubts:
        print_line(console, f"{job.title}: {doubt}", style="yellow")
    entry = PROTOCOLS[job.protocol]
    if not entry.sees_centre:
        # changes nothing there, and so is not to be seen in results
        extractor = replace(extractor, crop_ratio=PUBLISHED_CROP_RATIO)
    how = {
        "weights": model.fingerprint,
        "image_size": model.image_size,
        "feature": extractor.feature,
        "crop_ratio": extractor.crop_ratio,
    }
    images = digest_of_images(data)
    run = digest_of(
        job, data, images=images, model={**how, **extractor.settings.model_dump(include={"precision", "decoder"})}
    )
    is_new = all(row.run != run for row in before)
    if not distributed.largest_over_ranks(int(is_new), extractor.device):  # new for one process: all take part
        print_line(console, f"{job.title}: measured before, see {folder / RESULTS_FILE}; --again True measures it anew")
        return run
    began = time.perf_counter()
    remarks = [*_remarks(extractor), *changed(job.settings, besides=entry.named)]
    remarks += ["other images than published"] if doubts else []
    if data.train is not None and data.test is not None and data.train.fingerprint() == data.test.fingerprint():
        remarks.append("tested on the training images")
        print_line(
            console, f"{job.title}: the training images are the test images, so this measures nothing", style="yellow"
        )
    measurements = [_labelled(found, remarks) for found in entry.measure(extractor, data, job.settings)]
    seconds = time.perf_counter() - began
    if distributed.is_main():
        rows = [
            ResultRow(
                protocol=job.protocol,
                **asdict(measurement),
                seconds=round(seconds, 3),
                weights=model.fingerprint,
                model=model.name,
                architecture=model.architecture,
                precision=extractor.settings.precision,
                run=run,
                train="" if data.train is None else data.train.name,
                images=images,
            )
            for measurement in measurements
        ]
        append_rows(folder / RESULTS_FILE, rows)
        _write_table(newest(read_rows(folder / RESULTS_FILE)), folder)
    distributed.barrier()
    print_line(console, f"{job.title}: {len(measurements)} numbers in {seconds:.1f} s", style="green")
    return run


def _remarks(extractor: Extractor) -> list[str]:
    """In what the features are not the published ones."""
    own_size = own_image_size(extractor.model.backbone.model)
    remarks = {
        f"feature {extractor.feature}": extractor.feature is not None,
        f"crop ratio {extractor.crop_ratio:g}": extractor.crop_ratio != PUBLISHED_CROP_RATIO,
        f"{extractor.model.image_size} px": extractor.model.image_size != own_size,
        "JPEGs decoded by the GPU": extractor.settings.decoder == "gpu",
    }
    return [remark for remark, holds in remarks.items() if holds]


def _labelled(found: Measurement, remarks: list[str]) -> Measurement:
    """Named apart from the published setting, so that neither replaces the other and the paper's figure stands beside
    its own kind.
    """
    new = [remark for remark in remarks if remark not in found.setting]  # some protocols name their feature themselves
    name, *kind = re.split(r"( mean| deviation)$", found.setting)  # what tables join stays at the end
    setting = re.sub(r" \(as published\)(?=,)", "", ", ".join([name, *new]))  # what follows says in what it is not
    return replace(found, setting=setting + "".join(kind))


def _report(rows: list[ResultRow], missing: list[MissingJob], failed: Mapping[str, str], folder: Path) -> None:
    """What was asked for, on the screen."""
    plain = _told_apart(rows)
    screen = result_console()
    if plain:
        table = results_table([*plain, *transfer_averages(plain)])
        print_table(screen, table)
        for note in table.footnotes:
            print_line(screen, note)
    for job in missing:
        print_line(screen, f"not measured: {job.title}. {job.lacks}")
    for title, error in failed.items():
        print_line(screen, f"failed: {title}. {error}", style="red")
    if missing:
        print_line(
            screen,
            f"measured {len({(row.protocol, row.data) for row in rows})}, missing {len(missing)}, failed {len(failed)}",
        )
    if plain:
        print_line(screen, f"results: {folder / RESULTS_FILE}, {folder / TABLE_FILE}")


def _told_apart(rows: list[ResultRow]) -> list[dict[str, Any]]:
    """The rows as tables take them. Where one name stands for several sets of images, the training images stand beside
    it.
    """
    images: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        images.setdefault((row.protocol, row.data), set()).add(row.images)
    ambiguous = {key for key, digests in images.items() if len(digests) > 1}

    def name(row: ResultRow) -> str:
        return (
            f"{row.data} (train: {row.train}, images {row.images[:6]})"
            if (row.protocol, row.data) in ambiguous
            else row.data
        )

    return [{**asdict(row), "data": name(row)} for row in rows]


def _write_table(rows: list[ResultRow], folder: Path) -> None:
    """All results, of whatever model, as Markdown."""
    plain = _told_apart(rows)
    if plain:
        (folder / TABLE_FILE).write_text(
            as_markdown(results_table([*plain, *transfer_averages(plain)])) + "\n", encoding="utf-8"
        )
