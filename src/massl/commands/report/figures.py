"""Opens the backbone of each run and has its pictures drawn."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from massl import keyed_random
from massl.commands.device import Device
from massl.commands.images import UnreadableLeftOut, open_images
from massl.commands.model import ModelSettings, model_on_device, ranges_of_run
from massl.commands.recipe import PretrainRecipe
from massl.config import read_yaml, validate
from massl.data.sources import label_doubt
from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.subset import SubsetSource
from massl.reports.page.sections.figures import EXPECTED_FAILURES, Drawn, draw_pictures, failure, picture_sections
from massl.reports.page.templates import Section
from massl.reports.pictures.run_features import RunFeatures, Sample

_NUM_IMAGES = 1500  # dots of a map
_NUM_DATABASE = 4000  # images searched for neighbours: a few seconds of a small network on a CPU


def figures_of(
    runs: Mapping[str, Path],  # label on the page -> folder
    *,
    data: str | None = None,
    device: Device = "auto",
) -> list[Section]:
    """The sections of pictures; what cannot be drawn is a sentence there.

    The images are those that the probe of training classified, or `data`. Runs on the same images show the same ones.
    """
    open_once = functools.cache(open_images)
    drawn: dict[str, Mapping[str, Drawn] | Drawn] = {}
    for label, folder in runs.items():
        try:
            with open_run(folder, data=data, device=device, open_source=open_once) as run:
                drawn[label] = draw_pictures(run, num_runs=len(runs))
        except EXPECTED_FAILURES as error:
            advice = "; other images can be named with --data" if isinstance(error, DataError) else ""
            drawn[label] = failure("No pictures", error, advice=advice)
    return picture_sections(drawn)


@contextmanager
def open_run(
    folder: Path,
    *,
    data: str | None,
    device: Device,
    num_images: int = _NUM_IMAGES,
    open_source: Callable[..., ImageSource] = open_images,
) -> Iterator[RunFeatures]:
    """The run's backbone on its device, seeing images as its probe does."""
    recipe = validate(PretrainRecipe, read_yaml(folder / "recipe.yaml"), origin=str(folder / "recipe.yaml"))
    rules = recipe.data.rules(ranges_of_run(str(folder)))
    # the recipe may be a stranger's: only images that the user named are downloaded
    open_as_run = functools.partial(open_source, rules=rules, may_download=data is not None)
    sample = choose_sample(recipe, data, num_images=num_images, open_source=open_as_run)
    probes = recipe.probes
    settings = ModelSettings(
        model=str(folder), device=device, image_size=recipe.views.global_size, crop_ratio=probes.crop_ratio
    )
    with model_on_device(settings, cache=None) as (extractor, console):

        def features_of(queries: ImageSource, database: ImageSource) -> RunFeatures:
            run = RunFeatures(
                extractor=extractor,
                sample=replace(sample, queries=queries, database=database),
                num_neighbours=probes.num_neighbours,
                temperature=probes.temperature,
            )
            run.require_readable()
            return run

        yield UnreadableLeftOut(console).run(features_of, sample.queries, sample.database)


def choose_sample(
    recipe: PretrainRecipe,
    data: str | None,
    *,
    num_images: int,
    open_source: Callable[[str], ImageSource] = open_images,
) -> Sample:
    """Images of `data`, or else those of the probe. The choice does not depend on the run, so that runs compare."""
    database_name = data or recipe.probes.database or recipe.data.source
    queries_name = data or recipe.probes.queries or database_name
    queries = open_source(queries_name)
    database = queries if database_name == queries_name else open_source(database_name)
    if queries_name == (data or recipe.data.source) and label_doubt(queries):  # images that nobody named as labelled
        chosen, others = (_subset(queries, num, labelled=False) for num in (num_images, max(num_images, _NUM_DATABASE)))
        return Sample(queries=chosen, database=others, is_own=True)
    chosen = _subset(queries, num_images)
    if database is queries or database.class_names != queries.class_names:
        return Sample(queries=chosen, database=_subset(queries, max(num_images, _NUM_DATABASE)), is_own=True)
    return Sample(queries=chosen, database=_subset(database, _NUM_DATABASE), is_own=False)


def _subset(source: ImageSource, num: int, *, labelled: bool = True) -> SubsetSource:
    """The first images of a random order; of a labelled source those with a label."""
    order = iter(keyed_random.permutation(len(source), 0, "figures").tolist())
    if labelled and source.class_names is not None:
        order = (index for index in order if source.label_of(index) is not None)
    indices = torch.tensor(list(itertools.islice(order, num)), dtype=torch.int64)
    return SubsetSource(source, indices, name=source.name, labelled=labelled)
