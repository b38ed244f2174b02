"""What `massl evaluate` has to do, as a list: from protocols and images named by the user, or from the paper's suite."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from massl.commands.evaluate.settings import EvaluateSettings
from massl.config import Settings, fingerprint, merge, validate
from massl.data.sources import open_source
from massl.data.sources.file_stamps import digest_of_files, files_below
from massl.evaluations.base import EvaluationData, EvaluationError
from massl.evaluations.datasets import look_up, missing_data, open_data
from massl.evaluations.protocols import PROTOCOLS
from massl.evaluations.protocols.linear import HEAD_FILE
from massl.evaluations.suite import SuiteItem, plan_suite

_FORMAT = 1  # raise when the same protocol on the same data would give other numbers

Warn = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One protocol on one data set."""

    protocol: str
    data_name: str
    settings: Settings
    open: Callable[[Path, Warn], EvaluationData]  # given the folder for its heads and figures, and who hears of doubts

    @property
    def title(self) -> str:
        return f"{self.protocol} on {self.data_name}"

    def output_in(self, folder: Path) -> Path:
        return folder / re.sub(r"[^\w.-]+", "_", self.data_name).strip("_")


@dataclass(frozen=True)
class MissingJob:
    """What cannot be done, and what it lacks."""

    title: str
    lacks: str


def jobs_of(settings: EvaluateSettings) -> tuple[list[Job], list[MissingJob]]:
    if settings.suite is not None:
        return _jobs_of_suite(settings)
    if settings.data:
        return _jobs_on_known_data(settings)
    return [_job_on_given_data(settings, protocol) for protocol in settings.protocol], []


def _jobs_of_suite(settings: EvaluateSettings) -> tuple[list[Job], list[MissingJob]]:
    assert settings.data_root is not None
    jobs, missing = [], []
    has_head = Path(str(getattr(_with_head(settings.backgrounds, settings), "head", ""))).is_file()
    for item in plan_suite(Path(settings.data_root).expanduser(), has_head=has_head):
        if item.missing is not None:
            missing.append(MissingJob(f"{item.protocol} on {item.data_name}", item.missing))
            continue
        given = settings.of_protocol(item.protocol)
        # What the user set stands; the suite fills in what was left at its default.
        default = type(given)()
        changes = {
            key: value
            for key, value in item.settings.items()
            if getattr(given, key.split(".")[0]) == getattr(default, key.split(".")[0])
        }
        chosen = validate(type(given), merge(given.model_dump(mode="json"), changes), origin=item.protocol)
        jobs.append(
            Job(
                protocol=item.protocol,
                data_name=item.data_name,
                settings=_with_head(chosen, settings),
                open=_opener(item),
            )
        )
    return jobs, missing


def _opener(item: SuiteItem) -> Callable[[Path, Warn], EvaluationData]:
    return lambda output, warn: item.open(output, warn=warn)


def _jobs_on_known_data(settings: EvaluateSettings) -> tuple[list[Job], list[MissingJob]]:
    wanted = [
        _job_on_known_data(settings, protocol, look_up(name))
        for name in settings.data
        for protocol in settings.protocol
    ]
    jobs = [job for job in wanted if isinstance(job, Job)]
    missing = [job for job in wanted if isinstance(job, MissingJob)]
    if not jobs:
        raise EvaluationError(" ".join(f"{job.title}: {job.lacks}" for job in missing))
    return jobs, missing


def _job_on_known_data(settings: EvaluateSettings, protocol: str, name: str) -> Job | MissingJob:
    assert settings.data_root is not None
    root = Path(settings.data_root).expanduser()
    needs = PROTOCOLS[protocol].needs
    lacks = missing_data(name, root, parts=needs)
    parts = (*needs, "validation") if missing_data(name, root, parts=("validation",)) is None else needs
    if lacks is not None:
        return MissingJob(f"{protocol} on {name}", lacks)
    return Job(
        protocol=protocol,
        data_name=name,
        settings=_with_head(settings.of_protocol(protocol), settings),
        open=lambda output, warn: open_data(name, root, parts=parts, output=output, warn=warn),
    )


def _job_on_given_data(settings: EvaluateSettings, protocol: str) -> Job:
    for need in PROTOCOLS[protocol].needs:
        if getattr(settings, need) is None:
            raise EvaluationError(f"{protocol} needs --{need}: {EvaluateSettings.model_fields[need].description}")
    uses_folder = "folder" in PROTOCOLS[protocol].needs
    folder = Path(settings.folder or "").expanduser().absolute()  # absolute: "." has no name
    if uses_folder and not folder.is_dir():
        raise EvaluationError(
            f"{protocol}: there is no folder {folder}; --folder names the data set in its published layout"
        )
    name = settings.name or str(folder.name if uses_folder else settings.test)

    def open_given(output: Path, _: Warn) -> EvaluationData:
        if uses_folder:
            return EvaluationData(name=name, folder=folder, output=output)
        train, test, validation = (
            None if uri is None else open_source(uri) for uri in (settings.train, settings.test, settings.validation)
        )
        return EvaluationData(name=name, train=train, test=test, validation=validation, output=output)

    return Job(
        protocol=protocol,
        data_name=name,
        settings=_with_head(settings.of_protocol(protocol), settings),
        open=open_given,
    )


def _with_head(chosen: Settings, settings: EvaluateSettings) -> Settings:
    """ImageNet-9 is judged by the head that the linear probe on ImageNet has left in the same output folder, unless
    another is named.
    """
    if getattr(chosen, "head", None) != "":
        return chosen
    return chosen.model_copy(update={"head": str(Path(settings.output).expanduser() / "ImageNet" / HEAD_FILE)})


def digest_of_images(data: EvaluationData) -> str:
    """Digest of all images of an evaluation."""
    sources = {part: getattr(data, part) for part in ("train", "test", "validation")}
    return fingerprint(
        {
            **{part: None if source is None else source.fingerprint() for part, source in sources.items()},
            "folder": None if data.folder is None else digest_of_files(data.folder, files_below(data.folder)),
        }
    )


def digest_of(job: Job, data: EvaluationData, *, images: str, model: dict[str, object]) -> str:
    """Digest of all that decides the job's numbers; a result kept under it need not be measured again."""
    named = [getattr(job.settings, name, "") for name in ("head", "points_model")]
    files = [
        Path(name).expanduser() for name in (*named, *getattr(job.settings, "lists", ()))
    ]  # whose content counts, not only their names
    whitening = getattr(job.settings, "whitening", "")
    return fingerprint(
        {
            "protocol": job.protocol,
            "settings": job.settings.model_dump(mode="json"),
            "images": images,
            "files": [digest_of_files(path.parent, [path.name]) for path in files if path.is_file()],
            "whitening": open_source(whitening).fingerprint() if whitening else None,
            "format": _FORMAT,
            "name": data.name,
            **model,
        }
    )
