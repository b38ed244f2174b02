"""The live display of a run: a progress bar on a terminal, log lines elsewhere."""

import datetime
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class ProgressDisplay:
    """Shows step, loss, images per second and time left; messages appear above the bar."""

    def __init__(self, *, num_steps: int, batch_size: int, visible: bool) -> None:
        self._console = Console(stderr=True, quiet=not visible, highlight=False)
        self._num_steps = num_steps
        self._batch_size = batch_size
        self._bar = Progress(
            BarColumn(bar_width=30),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=num_steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, message: str, *, style: str | None = None) -> None:
        self._console.print(message, style=style, markup=False, emoji=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}", style="yellow")

    def advance(self, row: Mapping[str, float]) -> None:
        step, images_per_second = int(row["step"]), row["images_per_second"]
        seconds_left = (self._num_steps - step) * self._batch_size / images_per_second if images_per_second else 0.0
        left = datetime.timedelta(seconds=round(seconds_left))
        text = (
            f"step {step}/{self._num_steps}  epoch {int(row['epoch'])}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"{images_per_second:,.0f} img/s  {left} left"
        )
        if "effective_rank" in row:
            knn = f"k-NN {row['knn_top1']:.1f} %  " if "knn_top1" in row else ""
            health = f"{knn}effective rank {row['effective_rank']:.1f}  loss {row['loss']:.4f}"
            self.say(f"step {step}/{self._num_steps}  {health}", style="green")
        elif not self._console.is_terminal:
            self.say(text)
        self._bar.update(self._task, completed=step, description=text)
