"""Checkpoints, backbones and cached features: written and read as massl does, and without a digest, in turns.

    python benchmarks/files.py

The plain way is torch.save or safetensors with the same flush to disk, and zip's own check sums on reading a
checkpoint. Times are wall time of one call; `ratio` is massl's median over that of the plain way. Run it on a machine
with nothing else to do: the digest is arithmetic of all cores, and waits where they are busy.
"""

import argparse
import os
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import ours
import safetensors.torch
import torch
from measure import Case, announce, emit, print_table
from torch import Tensor

Pair = tuple[Callable[[Path], object], Callable[[Path], object]]  # plain, massl's


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    parser = argparse.ArgumentParser(description="Files with and without a digest.")
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm model")
    parser.add_argument("--rows", default=65_536, type=int, help="features in a file of the cache")
    parser.add_argument("--repetitions", default=9, type=int, help="timed calls of each")
    chosen = parser.parse_args(arguments)
    announce(ours.environment(torch.device("cpu")))
    weights = ours.untrained_weights(chosen.model)
    state = training_state(weights)
    rows = ours.unit_rows(chosen.rows, 384, device=torch.device("cpu"), seed=0)
    pairs: dict[str, Pair] = {
        "write checkpoint": (lambda path: save_plain(state, path), lambda path: ours.save_checkpoint(state, path)),
        "read checkpoint": (load_plain, ours.load_checkpoint_file),
        "write backbone": (lambda path: save_tensors(weights, path), lambda path: ours.write_tensors(path, weights)),
        "read backbone": (load_tensors, lambda path: total(ours.read_tensors(path)[0])),
        "write features": (lambda path: save_tensors({"rows": rows}, path), lambda path: ours.write_rows(path, rows)),
        "read features": (load_tensors, lambda path: total({"rows": ours.read_rows(path, num_rows=len(rows))})),
    }
    with tempfile.TemporaryDirectory() as folder:
        places = {kind: Path(folder) / kind for kind in ("checkpoint", "backbone", "features")}
        cases = [measure(name, pair, places[name.split()[1]], chosen.repetitions) for name, pair in pairs.items()]
    print_table(cases, extra_columns=["plain_milliseconds", "ratio"])
    return cases


def measure(name: str, pair: Pair, place: Path, num_repetitions: int) -> Case:
    """Both ways in turns, each with its own file."""
    times: tuple[list[float], list[float]] = ([], [])
    paths = [place.with_name(f"{place.name}_{way}") for way in ("plain", "massl")]
    for path in paths:
        path.mkdir(exist_ok=True)
    for _ in range(num_repetitions + 1):
        for call, path, taken in zip(pair, paths, times, strict=True):
            begin = time.perf_counter()
            call(path / "step_000000001.pt")
            taken.append(1e3 * (time.perf_counter() - begin))
    plain, own = (statistics.median(taken[1:]) for taken in times)  # the first warms up
    extras = {"plain_milliseconds": round(plain, 1), "ratio": round(own / plain, 3)}
    return emit(Case(case=name, images_per_second=1e3 / own, peak_gib=None, milliseconds=own, extras=extras))


def training_state(weights: dict[str, Tensor]) -> dict[str, object]:
    """Student, teacher and AdamW's averages, as in a checkpoint."""
    networks = {f"{name}.{key}": value.clone() for name in ("student", "teacher") for key, value in weights.items()}
    averages = {
        number: {name: torch.randn_like(value) for name in ("exp_avg", "exp_avg_sq")}
        for number, value in enumerate(weights.values())
    }
    return {"step": 1, "method": networks, "optimizer": {"state": averages}}


def save_plain(state: dict[str, object], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_plain(path: Path) -> object:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return torch.load(path, map_location="cpu", weights_only=True)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    safetensors.torch.save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load_tensors(path: Path) -> float:
    return total(safetensors.torch.load_file(path))


def total(tensors: dict[str, Tensor]) -> float:
    """Touches all values: files are mapped into memory and read only where they are used."""
    return sum(float(tensor.sum()) for tensor in tensors.values())


if __name__ == "__main__":
    main()
