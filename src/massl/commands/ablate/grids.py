"""The runs of an ablation, planned and checked before anything is trained.

The paper's grids (Section 5; ViT-S/16, 100 epochs; K=65,536 and N_b=16,384 elsewhere), scaled to the recipe:

    memory-size      K from 1/8 to 2 times the default, with blocks of a quarter of the default (N_b=4,096 in the text)
    block-size       N_b from 1/32 to 2 times the default, at the default K
    block-sampling   N_b from 1/32 to 1/4 of the default, at the default K, with random and with contiguous blocks
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from massl.commands.recipe import PretrainRecipe
from massl.config import RecipeError, validate
from massl.methods.massl import MaSSLSettings
from massl.nn.memory import MemorySettings
from massl.reports.ablation.records import ABLATIONS, AblationName, Strategy, paper_points, scaled

_BLOCK_KEY = "method.memory.block_size"
_BLOCK_SHARE_OF_MEMORY_GRID = 4_096 / 16_384  # Section 5.1 has N_b=4,096, the rest of the paper 16,384
_FEWEST_ROWS = 2  # in a block: a softmax over one row is always 1


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a grid."""

    value: int  # K or N_b, whichever varies
    strategy: Strategy
    seed: int
    folder: Path
    recipe: PretrainRecipe

    @property
    def memory(self) -> MemorySettings:
        return massl_settings(self.recipe).memory


@dataclass(frozen=True, kw_only=True)
class Grid:
    kind: AblationName
    default: int  # the recipe's own K or N_b
    runs: tuple[PlannedRun, ...]
    cautions: tuple[str, ...]


def massl_settings(recipe: PretrainRecipe) -> MaSSLSettings:
    """The method's settings; raises for methods without a memory."""
    if not isinstance(recipe.method, MaSSLSettings):
        raise RecipeError(
            f"the ablations vary the memory of massl, but this recipe trains {recipe.method.name}; name one of massl"
        )
    return recipe.method


def plan_grid(
    kind: AblationName,
    base: PretrainRecipe,
    *,
    output: Path,
    values: Sequence[int] = (),
    seeds: Sequence[int] = (),
    overridden: Collection[str] = (),
    num_images: int,
) -> Grid:
    """All runs of an ablation with validated recipes, and cautions about doubtful ones.

    `base` is the recipe with the user's overrides, whose keys are `overridden`; `values` replaces the paper's grid.
    """
    ablation, memory = ABLATIONS[kind], massl_settings(base).memory
    _refuse_overrides(kind, overridden)
    default = memory.num_rows if kind == "memory-size" else memory.block_size
    fixed, cautions = _fixed(kind, memory, overridden)
    chosen, left_out = (sorted(set(values)), []) if values else _paper_values(kind, default, fixed)
    runs = []
    for seed in sorted(set(seeds)) or [base.trainer.seed]:  # outermost: the first seed gives the whole curve
        for strategy in ablation.strategies:
            for value in chosen:
                folder = output / _folder_of(kind, value, strategy, seed=seed, own_seed=base.trainer.seed)
                recipe = _with_memory(base, {**memory.model_dump(), **fixed, **_own(kind, value, strategy)}, seed=seed)
                runs.append(PlannedRun(value=value, strategy=strategy, seed=seed, folder=folder, recipe=recipe))
    cautions += left_out + _cautions_of(runs, num_images=num_images)
    return Grid(kind=kind, default=default, runs=tuple(runs), cautions=tuple(cautions))


def _refuse_overrides(kind: AblationName, overridden: Collection[str]) -> None:
    """Raise if --set names what the grid varies."""
    instead = {ABLATIONS[kind].key: "give --values", "trainer.seed": "give --seeds"}
    if kind == "block-sampling":
        instead["method.memory.random_blocks"] = "leave it out, both are run"
    for key, advice in instead.items():
        if key in overridden:
            raise RecipeError(f"{kind} varies {key} itself; instead of --set {key}=... {advice}")


def _fixed(kind: AblationName, memory: MemorySettings, overridden: Collection[str]) -> tuple[dict[str, int], list[str]]:
    """The size that does not vary, and a caution if it is not the recipe's."""
    if kind != "memory-size":
        return {"num_rows": memory.num_rows}, []
    if _BLOCK_KEY in overridden:
        return {"block_size": memory.block_size}, []
    size = max(_FEWEST_ROWS, round(memory.block_size * _BLOCK_SHARE_OF_MEMORY_GRID))
    caution = (
        f"all runs have blocks of N_b={size:,} rows, a quarter of the recipe's {memory.block_size:,}, because the "
        f"paper's text has 4,096 here and 16,384 elsewhere; --set {_BLOCK_KEY}=... chooses another size"
    )
    return {"block_size": size}, [caution]


def _paper_values(kind: AblationName, default: int, fixed: Mapping[str, int]) -> tuple[list[int], list[str]]:
    """The paper's grid scaled to the recipe, and a caution about values that do not fit."""
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


def _folder_of(kind: AblationName, value: int, strategy: Strategy, *, seed: int, own_seed: int) -> Path:
    """Block-sampling shares its runs with random blocks with block-size.

    The recipe's own seed is not part of the name, so that more seeds can be added to existing runs.
    """
    suffix = "" if seed == own_seed else f"-seed-{seed}"
    if strategy == "blockwise":
        return Path("block-sampling") / f"blockwise-N_b-{value}{suffix}"
    shared: AblationName = "block-size" if kind == "block-sampling" else kind
    return Path(shared) / f"{ABLATIONS[kind].symbol}-{value}{suffix}"


def _own(kind: AblationName, value: int, strategy: Strategy) -> dict[str, int | bool]:
    """The MemorySettings that distinguish a run from the others."""
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
    """What is doubtful about some of the runs."""
    found = []
    larger = sorted({run.memory.num_rows for run in runs if run.memory.num_rows > num_images})
    if larger:
        sizes = ", ".join(f"{num_rows:,}" for num_rows in larger)
        found.append(
            f"the memory is larger than the data set ({num_images:,} images) at K={sizes}: "
            "it holds several embeddings of the same image, so a view is matched with its own past"
        )
    uneven = sorted(
        {(run.memory.num_rows, run.memory.block_size) for run in runs if run.memory.num_rows % run.memory.block_size}
    )
    if uneven:
        pairs = ", ".join(f"K={rows:,} N_b={size:,} ({rows % size:,})" for rows, size in uneven)
        found.append(f"K is not a multiple of N_b, so some rows are unused in each step: {pairs}")
    return found
