"""Which runs an ablation consists of, and whether they can be run at all: decided before anything is trained.

The paper's grids (Section 5; ViT-S/16, 100 epochs; K=65,536 and N_b=16,384 elsewhere), scaled by the ratios to the
recipe's K and N_b:

    memory-size      K from 1/8 to 2 times the default, all with blocks of a quarter of the default (the text has N_b=4,096)
    block-size       N_b from 1/32 to 2 times the default, all at the default K
    block-sampling   N_b from 1/32 to 1/4 of the default at the default K, rows dealt at random and in the order of storage
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from massl.commands.recipe import PretrainRecipe
from massl.config import RecipeError, validate
from massl.methods.massl import MaSSLSettings
from massl.nn.memory import MemorySettings
from massl.reports.ablation.records import ABLATIONS, Kind, Strategy, paper_points, scaled

_BLOCK_KEY = "method.memory.block_size"
_BLOCK_SHARE_OF_MEMORY_GRID = 4_096 / 16_384  # Section 5.1: N_b=4,096, where all else of the paper has 16,384
_FEWEST_ROWS = 2  # of a block: over one row a softmax is 1, whatever the network says


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a grid."""

    value: int  # of what varies
    strategy: Strategy
    seed: int
    folder: Path
    recipe: PretrainRecipe

    @property
    def memory(self) -> MemorySettings:
        return massl_settings(self.recipe).memory


@dataclass(frozen=True, kw_only=True)
class Grid:
    kind: Kind
    default: int  # the recipe's own value of what varies
    runs: tuple[PlannedRun, ...]
    cautions: tuple[str, ...]


def massl_settings(recipe: PretrainRecipe) -> MaSSLSettings:
    """The method's settings; other methods have no memory that these grids could vary."""
    if not isinstance(recipe.method, MaSSLSettings):
        raise RecipeError(
            f"the ablations vary the memory of massl, but this recipe trains {recipe.method.name}: name one of massl's"
        )
    return recipe.method


def plan_grid(
    kind: Kind,
    base: PretrainRecipe,
    *,
    output: Path,
    values: Sequence[int] = (),
    seeds: Sequence[int] = (),
    overridden: Collection[str] = (),
    num_images: int,
) -> Grid:
    """All runs of an ablation, their recipes validated; what cannot be is refused, what is doubtful told.

    `base` is the recipe with the user's overrides, whose keys are `overridden`; `values` replaces the paper's grid.
    """
    ablation, memory = ABLATIONS[kind], massl_settings(base).memory
    _refuse_overrides(kind, overridden)
    default = memory.num_rows if kind == "memory-size" else memory.block_size
    fixed, cautions = _fixed(kind, memory, overridden)
    chosen, left_out = (sorted(set(values)), []) if values else _paper_values(kind, default, fixed)
    runs = []
    for seed in sorted(set(seeds)) or [base.trainer.seed]:  # outermost: after the first seed the whole curve is there
        for strategy in ablation.strategies:
            for value in chosen:
                folder = output / _folder_of(kind, value, strategy, seed=seed, own_seed=base.trainer.seed)
                recipe = _with_memory(base, {**memory.model_dump(), **fixed, **_own(kind, value, strategy)}, seed=seed)
                runs.append(PlannedRun(value=value, strategy=strategy, seed=seed, folder=folder, recipe=recipe))
    cautions += left_out + _cautions_of(runs, num_images=num_images)
    return Grid(kind=kind, default=default, runs=tuple(runs), cautions=tuple(cautions))


def _refuse_overrides(kind: Kind, overridden: Collection[str]) -> None:
    """What the grid itself sets cannot be set for all of its runs."""
    instead = {ABLATIONS[kind].key: "--values", "trainer.seed": "--seeds"}
    if kind == "block-sampling":
        instead["method.memory.random_blocks"] = "nothing, as both ways are run"
    for key, option in instead.items():
        if key in overridden:
            raise RecipeError(f"{kind} varies {key} itself; instead of --set {key}=... give {option}")


def _fixed(kind: Kind, memory: MemorySettings, overridden: Collection[str]) -> tuple[dict[str, int], list[str]]:
    """The size that does not vary, and where it is not the recipe's, why."""
    if kind != "memory-size":
        return {"num_rows": memory.num_rows}, []
    if _BLOCK_KEY in overridden:
        return {"block_size": memory.block_size}, []
    size = max(_FEWEST_ROWS, round(memory.block_size * _BLOCK_SHARE_OF_MEMORY_GRID))
    return {"block_size": size}, [
        f"all runs have blocks of N_b={size:,} rows, a quarter of the recipe's {memory.block_size:,}: the paper's text has 4,096 here, and "
        f"16,384 elsewhere; --set {_BLOCK_KEY}=... chooses another size"
    ]


def _paper_values(kind: Kind, default: int, fixed: Mapping[str, int]) -> tuple[list[int], list[str]]:
    """The paper's grid in the recipe's size; values that have no room there are left out, and said."""
    ablation = ABLATIONS[kind]
    paper_values = sorted({point.value for point in paper_points(kind)})
    ours = {scaled(value, default=default, paper_default=ablation.paper_default): value for value in paper_values}
    fewest, most = (fixed["block_size"], None) if kind == "memory-size" else (_FEWEST_ROWS, fixed["num_rows"])
    fitting = [value for value in ours if value >= fewest and (most is None or value <= most)]
    left_out = [f"{ablation.symbol}={value:,} (the paper's {ours[value]:,})" for value in ours if value not in fitting]
    bound = f"{fewest:,} to {'any number of' if most is None else f'{most:,}'} rows fit"
    if not fitting:
        raise RecipeError(
            f"none of the paper's values fits this recipe ({', '.join(left_out)}; {bound}): give --values"
        )
    return fitting, [f"left out of the paper's grid: {', '.join(left_out)}; {bound}"] if left_out else []


def _folder_of(kind: Kind, value: int, strategy: Strategy, *, seed: int, own_seed: int) -> Path:
    """A run with random blocks is the one that block-size makes, so both ablations share it.

    The recipe's own seed is not part of the name: further seeds join the runs that are there.
    """
    suffix = "" if seed == own_seed else f"-seed-{seed}"
    if strategy == "blockwise":
        return Path("block-sampling") / f"blockwise-N_b-{value}{suffix}"
    shared: Kind = "block-size" if kind == "block-sampling" else kind
    return Path(shared) / f"{ABLATIONS[kind].symbol}-{value}{suffix}"


def _own(kind: Kind, value: int, strategy: Strategy) -> dict[str, int | bool]:
    """What a run of the grid has of its own, by the names of MemorySettings."""
    if kind == "memory-size":
        return {"num_rows": value}
    return {"block_size": value, **({"random_blocks": strategy == "random"} if kind == "block-sampling" else {})}


def _with_memory(base: PretrainRecipe, values: Mapping[str, Any], *, seed: int) -> PretrainRecipe:
    memory = validate(MemorySettings, values, origin="--values")
    if memory.block_size < _FEWEST_ROWS:
        raise RecipeError(
            f"--values: a block of {memory.block_size} row is too small; a softmax needs at least {_FEWEST_ROWS}"
        )
    method = massl_settings(base).model_copy(update={"memory": memory})
    return base.model_copy(update={"method": method, "trainer": base.trainer.model_copy(update={"seed": seed})})


def _cautions_of(runs: Sequence[PlannedRun], *, num_images: int) -> list[str]:
    """Doubts that hold for some runs, once each."""
    found = []
    larger = sorted({run.memory.num_rows for run in runs if run.memory.num_rows > num_images})
    if larger:
        found.append(
            f"the memory is larger than the data set ({num_images:,} images) at K={_listed(larger)}: it holds several embeddings of "
            "the same image, and a view is asked to match its own past"
        )
    uneven = sorted(
        {(run.memory.num_rows, run.memory.block_size) for run in runs if run.memory.num_rows % run.memory.block_size}
    )
    if uneven:
        pairs = ", ".join(f"K={rows:,} N_b={size:,} ({rows % size:,})" for rows, size in uneven)
        found.append(f"K is no multiple of N_b, so some rows stay unused each step: {pairs}")
    return found


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
