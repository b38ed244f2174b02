"""Shared by all benchmarks: timing of steps, peak memory, the card's matrix rate, printing of results.

Standard output carries one JSON line per case and nothing else; the environment, remarks and the final table go to
standard error.
"""

import contextlib
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

GIB = 2.0**30
MIB = 2.0**20

Step = Callable[[int], object]  # runs step i; the result is ignored


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured case. `extras` holds values of single benchmarks, e.g. a share of the matrix rate."""

    case: str
    images_per_second: float
    peak_gib: float | None  # None on the CPU, where it is not counted
    milliseconds: float
    extras: Mapping[str, float | str | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, float | str | None]:
        own: dict[str, float | str | None] = {
            "case": self.case,
            "images_per_second": round(self.images_per_second, 1),
            "peak_gib": _rounded(self.peak_gib, 3),
            "milliseconds": round(self.milliseconds, 3),
        }
        return own | dict(self.extras)


def case_from(values: Mapping[str, float | str | None]) -> Case:
    """Read a case from the JSON line of another process."""
    own = ("case", "images_per_second", "peak_gib", "milliseconds")
    peak = values["peak_gib"]
    return Case(
        case=str(values["case"]),
        images_per_second=float(values["images_per_second"] or 0.0),
        peak_gib=None if peak is None else float(peak),
        milliseconds=float(values["milliseconds"] or 0.0),
        extras={name: value for name, value in values.items() if name not in own},
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """GiB of device memory; `reserved` is what the process held, the others count tensors."""

    at_start: float
    warmup_peak: float
    steady_peak: float
    reserved: float

    @property
    def peak(self) -> float:
        """The larger peak: replaying a CUDA graph allocates nothing, so its memory shows only during the warm-up."""
        return max(self.warmup_peak, self.steady_peak)

    def as_extras(self) -> dict[str, float]:
        return {
            "steady_peak_gib": round(self.steady_peak, 3),
            "warmup_peak_gib": round(self.warmup_peak, 3),
            "reserved_gib": round(self.reserved, 3),
        }


@dataclass(frozen=True, kw_only=True)
class Timing:
    median_milliseconds: float
    mean_milliseconds: float
    slowest_milliseconds: float
    memory: Memory | None  # None on the CPU

    def case(
        self,
        name: str,
        *,
        num_images: int,
        extras: Mapping[str, float | str | None] | None = None,
        steady_memory: bool = False,
    ) -> Case:
        """A case by the median. `steady_memory` ignores the warm-up's peak, for code that captures no CUDA graph."""
        memory = self.memory
        return Case(
            case=name,
            images_per_second=1e3 * num_images / self.median_milliseconds,
            peak_gib=None if memory is None else memory.steady_peak if steady_memory else memory.peak,
            milliseconds=self.median_milliseconds,
            extras={
                "slowest_milliseconds": round(self.slowest_milliseconds, 3),
                **({} if memory is None else memory.as_extras()),
                **(extras or {}),
            },
        )


class StepWatch:
    """Times steps from outside: call `end_warmup()`, then `mark()` before the first timed step and after each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []
        self._warmup_peak = 0.0
        if self._on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._at_start = torch.cuda.memory_allocated(device) / GIB

    def end_warmup(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            self._warmup_peak = torch.cuda.max_memory_allocated(self._device) / GIB
            torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self) -> None:
        """On a GPU this records an event without blocking, so the host can run ahead as it does in training."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())

    def timing(self) -> Timing:
        """The measured times; waits for the device once."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            pairs = zip(self._events, self._events[1:], strict=False)
            intervals = [before.elapsed_time(after) for before, after in pairs]
        else:
            intervals = [
                1e3 * (after - before) for before, after in zip(self._seconds, self._seconds[1:], strict=False)
            ]
        return Timing(
            median_milliseconds=statistics.median(intervals),
            mean_milliseconds=statistics.fmean(intervals),
            slowest_milliseconds=max(intervals),
            memory=self._memory() if self._on_gpu else None,
        )

    def _memory(self) -> Memory:
        return Memory(
            at_start=self._at_start,
            warmup_peak=self._warmup_peak,
            steady_peak=torch.cuda.max_memory_allocated(self._device) / GIB,
            reserved=torch.cuda.max_memory_reserved(self._device) / GIB,
        )


def timed_steps(step: Step, *, num_warmup: int, num_timed: int, device: torch.device) -> Timing:
    """Run step(0), step(1) ...; the first `num_warmup` steps are not timed."""
    watch = StepWatch(device)
    for number in range(num_warmup):
        step(number)
    watch.end_warmup()
    watch.mark()
    for number in range(num_warmup, num_warmup + num_timed):
        step(number)
        watch.mark()
    return watch.timing()


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a square bfloat16 matrix product, measured on this card.

    Random operands: on zeros the card draws less power and clocks higher.
    """
    size = 8192 if device.type == "cuda" else 256
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    num_warmup, num_timed = (20, 50) if device.type == "cuda" else (1, 3)
    timing = timed_steps(
        lambda _: torch.mm(left, right, out=product), num_warmup=num_warmup, num_timed=num_timed, device=device
    )
    return 2.0 * size**3 / (timing.median_milliseconds * 1e9)


def benchmark_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def free_memory() -> None:
    """Call between two cases, so that memory of the first does not count for the second."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def survives_lack_of_memory(case: str) -> Iterator[None]:
    """Report and skip a case that does not fit on the card."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        remark(f"{case}: skipped, not enough device memory ({str(error).splitlines()[0]})")


def remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def announce(environment: Mapping[str, object]) -> None:
    """Print what belongs beside every number: card, versions, commit, command."""
    facts = ", ".join(f"{name} {value}" for name, value in environment.items())
    remark(f"# {facts}, command: {shlex.join(sys.argv)}")


def emit(case: Case) -> Case:
    """Print the JSON line at once, so that an interrupted run keeps its results."""
    print(json.dumps(case.as_dict()), flush=True)
    return case


def print_table(cases: Sequence[Case], *, extra_columns: Sequence[str] = ()) -> None:
    columns = ["case", "images_per_second", "milliseconds", "peak_gib", *extra_columns]
    rows = [columns, *[[_cell(case.as_dict().get(column)) for column in columns] for case in cases]]
    widths = [max(len(row[position]) for row in rows) for position in range(len(columns))]
    remark("")
    for row in rows:
        padded = [
            row[0].ljust(widths[0]),
            *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)],
        ]
        remark("  ".join(padded).rstrip())


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"
