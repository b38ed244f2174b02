"""The jobs of `massl evaluate`: protocols on images named by the user, or the paper's suite."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from massl.commands.evaluate.settings import EvaluationRequest
from massl.commands.images import open_images
from massl.config import Settings, fingerprint, merge, validate
from massl.data.identity import identify
from massl.data.keys import stored_key
from massl.data.sources import DataError, ImageSource, open_source
from massl.data.sources.file_stamps import digest_of_files, sizes_of_files
from massl.data.sources.listing import files_below
from massl.evaluations.base import EvaluationData
from massl.evaluations.datasets import look_up, missing_data, open_data
from massl.evaluations.features import Extractor
from massl.evaluations.measurement import EvaluationError
from massl.evaluations.protocols import PROTOCOLS
from massl.evaluations.protocols.linear import HEAD_FILE
from massl.evaluations.suite import plan_suite

_FORMAT = 1  # increase when the same protocol on the same data gives other numbers
_NUM_COMPARED = 32  # images of a source whose content counts in its name

Warn = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One protocol on one data set."""

    protocol: str
    data_name: str
    settings: Settings
    open: Callable[[Path, Warn], EvaluationData]  # from the folder for heads and figures, and a receiver of warnings

    @property
    def title(self) -> str:
        return f"{self.protocol} on {self.data_name}"

    def output_in(self, folder: Path) -> Path:
        return folder / re.sub(r"[^\w.-]+", "_", self.data_name).strip("_")


def jobs_of(request: EvaluationRequest) -> tuple[list[Job], dict[str, str]]:
    """The jobs to do, and for the title of each job that lacks files: which, and how to get them."""
    if request.data_root is None:
        # all protocols judge the same images
        open_once = functools.cache(functools.partial(open_images, rules=request.rules(), may_download=True))
        return [_job_on_given_data(request, protocol, open_once) for protocol in request.protocol], {}
    root = Path(request.data_root).expanduser()
    planned = list(_jobs_of_suite(request, root) if request.suite else _jobs_on_known_data(request, root))
    jobs = [job for job, lacks in planned if lacks is None]
    missing = {job.title: lacks for job, lacks in planned if lacks is not None}
    if not jobs and not request.suite:
        raise EvaluationError(" ".join(f"{title}: {lacks}" for title, lacks in missing.items()))
    return jobs, missing


def _jobs_of_suite(request: EvaluationRequest, root: Path) -> Iterator[tuple[Job, str | None]]:
    head = getattr(_settings_of("backgrounds", request), "head", "")
    for entry, lacks in plan_suite(root, has_head=Path(head).is_file()):
        given = _settings_of(entry.protocol, request)
        default = type(given)()  # the suite's settings apply only where the user left the default
        changes = {key: value for key, value in entry.settings.items() if getattr(given, key) == getattr(default, key)}
        chosen = validate(
            type(given), merge(given.model_dump(mode="json"), changes, type(given)), origin=entry.protocol
        )
        yield _job_below(root, entry.protocol, entry.data, chosen, parts=entry.parts), lacks


def _jobs_on_known_data(request: EvaluationRequest, root: Path) -> Iterator[tuple[Job, str | None]]:
    for name in map(look_up, request.data):
        for protocol in request.protocol:
            needs = PROTOCOLS[protocol].needs
            has_validation = missing_data(name, root, parts=("validation",)) is None
            parts = (*needs, "validation") if has_validation else needs
            job = _job_below(root, protocol, name, _settings_of(protocol, request), parts=parts)
            yield job, missing_data(name, root, parts=needs)


def _job_below(root: Path, protocol: str, name: str, settings: Settings, *, parts: tuple[str, ...]) -> Job:
    return Job(
        protocol=protocol,
        data_name=name,
        settings=settings,
        open=lambda output, warn: open_data(name, root, parts=parts, output=output, warn=warn),
    )


def _job_on_given_data(request: EvaluationRequest, protocol: str, open_once: Callable[[str], ImageSource]) -> Job:
    for need in PROTOCOLS[protocol].needs:
        if getattr(request, need) is None:
            raise EvaluationError(f"{protocol} needs --{need}: {EvaluationRequest.model_fields[need].description}")
    uses_folder = "folder" in PROTOCOLS[protocol].needs
    folder = Path(request.folder or "").expanduser().absolute()  # absolute: "." has no name
    if uses_folder and not folder.is_dir():
        raise EvaluationError(
            f"{protocol}: --folder {folder} does not exist; name the data set in its published layout"
        )
    # as results can store it
    name = stored_key(request.name or str(folder.name if uses_folder else request.test))

    def open_given(output: Path, _: Warn) -> EvaluationData:
        if uses_folder:
            return EvaluationData(name=name, folder=folder, output=output)
        train, test, validation = (
            None if uri is None else open_once(uri) for uri in (request.train, request.test, request.validation)
        )
        return EvaluationData(name=name, train=train, test=test, validation=validation, output=output)

    return Job(protocol=protocol, data_name=name, settings=_settings_of(protocol, request), open=open_given)


def _settings_of(protocol: str, request: EvaluationRequest) -> Settings:
    """The protocol's settings; ImageNet-9's default head is the one that the linear probe left in the output folder."""
    settings: Settings = getattr(request, protocol.replace("-", "_"))
    if getattr(settings, "head", None) != "":
        return settings
    return settings.model_copy(update={"head": str(Path(request.output).expanduser() / "ImageNet" / HEAD_FILE)})


def digest_of_images(data: EvaluationData) -> str:
    """Digest of all images of an evaluation, which a file that is merely touched or copied changes, too.

    It decides what need not be measured again: no write to a file can escape it.
    """
    return _digest_of_parts(data, lambda source: source.fingerprint(), digest_of_files)


def name_of_images(data: EvaluationData) -> str:
    """Digest that names the images in results: equal for copies of the files, and after chmod or a checkout."""
    return _digest_of_parts(data, _name_of_source, lambda *files: sizes_of_files(*files).hex())


def _digest_of_parts(
    data: EvaluationData, of_source: Callable[[ImageSource], str], of_files: Callable[[Path, Iterator[str]], str]
) -> str:
    sources = {part: getattr(data, part) for part in ("train", "test", "validation")}
    return fingerprint(
        {
            **{part: None if source is None else of_source(source) for part, source in sources.items()},
            "folder": None if data.folder is None else of_files(data.folder, files_below(data.folder)),
        }
    )


def _name_of_source(source: ImageSource) -> str:
    """Names and sizes, and the content of a few files: uncompressed images of two sets may have equal sizes."""
    identity = identify(source)
    digest = hashlib.sha256(identity.digest.encode())
    step = -(-len(source) // _NUM_COMPARED)
    for index in range(0, len(source), step) if identity.files else ():
        with suppress(DataError, OSError):  # unreadable images are left out later
            digest.update(bytes(source.read(index).data))
    return digest.hexdigest()


def digest_of(job: Job, data: EvaluationData, *, images: str, extractor: Extractor) -> str:
    """Digest of all that decides the job's numbers; a result kept under it need not be measured again."""
    named = [getattr(job.settings, name, "") for name in ("head", "points_model")]
    # files whose content counts, not only their names
    files = [Path(name).expanduser() for name in (*named, *getattr(job.settings, "lists", ()))]
    whitening = getattr(job.settings, "whitening", "")
    return fingerprint(
        {
            "protocol": job.protocol,
            "settings": job.settings.model_dump(mode="json"),
            "images": images,
            "files": [digest_of_files(path.parent, [path.name]) for path in files if path.is_file()],
            "whitening": open_source(whitening, may_download=True).fingerprint() if whitening else None,
            "format": _FORMAT,
            "name": data.name,
            "weights": extractor.model.fingerprint,
            "image_size": extractor.model.image_size,
            "feature": extractor.feature,
            "crop_ratio": extractor.crop_ratio,
            "precision": extractor.settings.precision,
            "decoder": extractor.settings.decoder,
        }
    )
