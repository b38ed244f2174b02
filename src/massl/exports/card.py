"""README.md of an export: a model card as the Hugging Face Hub reads it.

Names, recipes and results may come from a stranger: they are escaped, and folders of this machine are left out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from massl.evaluations.results import ResultRow
from massl.exports.job import ExportJob, Written
from massl.json_lines import read_json
from massl.reports.runs import PROBE_METRICS, Run

_LONGEST = 200  # characters of a value
_MOST_VALUES = 400  # of a recipe
_MOST_RESULTS = 500
_SHOWN = (
    *("method.name", "init.weights", "data.source"),
    *("trainer.epochs", "trainer.batch_size", "trainer.precision", "trainer.seed"),
    *("backbone.name", "backbone.image_size", "backbone.patch_size", "backbone.drop_path_rate"),
)
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#!|~&$])")


def escaped(text: str) -> str:
    """Text for a line of Markdown: one line, and no sign of it is markup."""
    plain = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    plain = plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]} ..."
    # a bare address, also one of e-mail, would become a link
    return _MARKUP.sub(r"\\\1", plain).replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")


def without_folders(text: str) -> str:
    """A path or an address of data without its folders: torchvision:CIFAR10?root=/home/me/sets -> ...?root=sets."""
    if text.startswith("joined:"):
        return "joined:" + "|".join(without_folders(part.strip()) for part in text[7:].split("|"))
    scheme = re.match(r"[A-Za-z][\w+-]*:(?!//)", text)
    if scheme is None:
        return _last(text)
    path, mark, query = text[scheme.end() :].partition("?")
    pairs = (pair.partition("=") for pair in query.split("&"))
    return scheme[0] + _last(path) + mark + "&".join(f"{_last(key)}{sign}{_last(value)}" for key, sign, value in pairs)


def _last(path: str) -> str:
    return PurePosixPath(path.replace("\\", "/")).name if re.search(r"[/\\]", path) else path


def shareable(value: Any) -> Any:
    """A value of a recipe that shows no folder: strings lose theirs, also inside lists and mappings."""
    if isinstance(value, str):
        return without_folders(value)[:_LONGEST]
    if isinstance(value, Mapping):
        return {str(key)[:_LONGEST]: shareable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float) else without_folders(str(value))[:_LONGEST]


def model_card(
    job: ExportJob,
    written: Written,
    *,
    name: str,
    folder: str,
    repository: str,
    run: Run | None,
    probe: Mapping[str, float],
    data: Mapping[str, Any] | None,
    results: Sequence[ResultRow],
    has_curves: bool,
) -> str:
    """The whole file. `folder` is the name of the folder alone; `repository` that on the Hub, "" if it is not sent."""
    model, download = job.model, ""
    snippet = written.snippet.replace("{image}", "photo.jpg")
    if repository and written.library in ("timm", "transformers"):
        snippet = snippet.replace("local-dir:{folder}", f"hf-hub:{repository}").replace("{folder}", repository)
    elif repository:
        download = f"Download the folder first: `hf download {repository} --local-dir {escaped(folder)}`. "
    num_weights = sum(parameter.numel() for parameter in job.backbone.model.parameters())
    method = f" by the method {escaped(run.method)}" if run is not None else ""
    difference = f"{written.difference:.1e}" if written.difference else "0"
    trained = f"trained with massl{method}"
    if model.imported is not None:
        trained = f"of another project, converted by massl ({escaped(model.imported)})"
    about = [
        f"A vision backbone, {trained}. It turns an image into {job.backbone.dim} features; it has no classifier.",
        _table(
            [
                ("architecture", f"{model.architecture} (timm: {job.architecture})"),
                ("parameters", f"{num_weights / 1e6:,.1f} million"),
                ("features", f"{job.backbone.dim}"),
                ("weights", f"{model.fingerprint} (massl's digest)"),
                ("image size", f"{job.size[0]} x {job.size[1]} px"),
                ("trained at", f"{model.image_size} px"),
            ]
        ),
    ]
    parts = [
        _front_matter(written, run),
        f"# {escaped(name)}",
        *about,
        "## Use it",
        _code(snippet.replace("{folder}", json.dumps(folder, ensure_ascii=False)[1:-1]), "python"),
        f"{download}{written.sizes} The exported model was opened and compared with massl on bundled images: features "
        f"differ by at most {difference} (float32).",
        "## Images",
        _preparation(job, written),
        *_scores(run, probe, results, has_curves=has_curves),
        *_training(run, data),
        "## Before you publish it",
        "State the licence of the weights and of the images, and whether people in the images agreed. massl adds no "
        "licence to what you train.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(written: Written, run: Run | None) -> str:
    tags = ["massl", "self-supervised-learning", "image-feature-extraction", "vision"]
    tags += [re.sub(r"[^a-z0-9-]", "-", run.method.lower())[:40]] if run is not None and run.method != "massl" else []
    values = {"library_name": written.library, "pipeline_tag": "image-feature-extraction", "tags": tags}
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _preparation(job: ExportJob, written: Written) -> str:
    prepared = job.preparation
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (prepared.mean, prepared.std))
    height, width = prepared.size
    if prepared.resized is None:
        first = f"Resize the whole image to {height} x {width} px (bicubic, with antialias)"
    else:
        first = (
            f"Resize the shorter side to {prepared.resized} px (bicubic, with antialias) and crop the centre, "
            f"{height} x {width} px"
        )
    crop = ""
    if written.library == "transformers" and prepared.resized is not None:
        crop = (
            " transformers rounds half a pixel of the crop's margin down, massl to even: for a quarter of all image "
            "shapes its crop is one pixel apart."
        )
    return (
        f"{first}; scale to [0, 1]; subtract the mean ({mean}) and divide by the deviation ({std}) of red, green and "
        f"blue. Libraries that resize in 8 bits round the pixels, so features differ slightly from `massl embed`.{crop}"
    )


def _scores(
    run: Run | None, probe: Mapping[str, float], results: Sequence[ResultRow], *, has_curves: bool
) -> list[str]:
    parts: list[str] = []
    if results:
        lines = [
            (row.protocol, without_folders(row.data), str(row.setting), row.metric, f"{row.value:.2f}", row.num_samples)
            for row in results[:_MOST_RESULTS]
        ]
        parts.append(_table(lines, heading=("protocol", "data", "setting", "metric", "value", "images")))
        if len(results) > _MOST_RESULTS:
            parts.append(f"{len(results) - _MOST_RESULTS:,} more results are left out.")
    if run is not None and probe:
        values = [(name.replace("_", " "), f"{probe[name]:.2f}") for name in PROBE_METRICS if name in probe]
        raw = [] if run.raw_pixel_knn is None else [("k-NN of the raw pixels", f"{run.raw_pixel_knn:.2f}")]
        parts += [f"Probe of the run at step {probe['step']:,.0f}:", _table([*values, *raw])]
    if has_curves:
        parts.append("![Loss and probes over training](curves.png)")
    return ["## Scores", *parts] if parts else []


def _training(run: Run | None, data: Mapping[str, Any] | None) -> list[str]:
    if run is None:
        return []
    settings = {str(key)[:_LONGEST]: value for key, value in list(run.settings.items())[:_MOST_VALUES]}
    lines = [(key, str(shareable(settings[key]))) for key in _SHOWN if settings.get(key) is not None]
    lines += [("images seen", f"{run.images_seen:,}"), ("epochs", run.progress), ("hardware", run.machine)]
    packages = run.environment.get("packages")
    if isinstance(packages, Mapping):
        lines += [(f"{name} version", str(packages[name])) for name in ("massl", "torch", "timm") if packages.get(name)]
    if data:
        lines += [
            ("training images", f"{without_folders(str(data['source']))}: {data['num_images']:,}"),
            ("digest of their names and sizes", str(data["digest"])),
        ]
        if data["changes"]:
            lines.append(("images changed during training", f"{len(data['changes'])} times"))
    recipe = yaml.safe_dump(shareable(settings), sort_keys=False, allow_unicode=False, width=110)
    return ["## Training", _table(lines), "Every setting, without folder names:", _code(recipe.rstrip(), "yaml")]


def _table(lines: Sequence[tuple[object, ...]], heading: Sequence[str] = ("", "")) -> str:
    rows = [heading, ["---"] * len(heading), *([escaped(str(cell)) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _code(text: str, language: str) -> str:
    """A block of code; its fence is longer than any run of back quotes inside."""
    longest = max((len(found) for found in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def data_facts(folder: Path) -> dict[str, Any] | None:
    """data.json of a run folder: digest, number and name of the images; None where it is missing or damaged."""
    try:
        known = read_json(folder / "data.json")
    except (OSError, ValueError):
        return None
    kinds = {"digest": str, "num_images": int, "source": str, "changes": list}
    fits = isinstance(known, dict) and all(type(known.get(key)) is kind for key, kind in kinds.items())
    return {key: known[key] for key in kinds} if fits else None
