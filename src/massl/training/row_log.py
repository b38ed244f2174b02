"""The rows of metrics.jsonl: completed by probes, judged, written and shown."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from massl.methods.base import Method, StepHyper
from massl.ops.scoring.finite import NotFinite
from massl.training.best import Chooser
from massl.training.loss_watch import LossWatch, NonFiniteLoss
from massl.training.metrics_log import MetricsLog
from massl.training.probes import NonFiniteFeatures, Probe, warnings_of
from massl.training.progress import ProgressDisplay
from massl.weights.io import BEST_FILE, is_readable


class RowLog:
    """Probes where asked, warns, and writes each row; only a log that was opened writes files."""

    def __init__(
        self,
        *,
        method: Method,
        probe: Probe | None,
        watch: LossWatch,
        display: ProgressDisplay,
        chooser: Chooser,
        settling_steps: int,  # no warnings before: embeddings of an untrained network are nearly equal
    ) -> None:
        self._method, self._probe, self._watch, self._display = method, probe, watch, display
        self._chooser, self._settling_steps = chooser, settling_steps
        self._file: MetricsLog | None = None
        # The row whose probe is under way. If a signal stops the probe, the checkpoint keeps the row, and the probe is
        # made when the run continues.
        self.unprobed: dict[str, float] | None = None

    def open(self, folder: Path, *, resume_step: int | None, cautions: Sequence[str]) -> None:
        """Continue the files of the folder after `resume_step`. `cautions`: warnings printed before training."""
        if resume_step is not None and self.unprobed is not None:
            resume_step -= 1  # the row of this step is written again
        self._file = MetricsLog(folder, resume_step=resume_step, warn=self._display.warn)
        for caution in cautions:
            self._file.caution(resume_step or 0, caution)
        if any("best_step" in row for row in self._file.probed) and not is_readable(folder / BEST_FILE):
            self._display.warn(f"{folder / BEST_FILE} is missing or damaged: the best is chosen among later probes")
            for row in self._file.probed:
                row.pop("best_step", None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(
        self, row: dict[str, float], hyper: StepHyper, *, probe: bool, between_batches: Callable[[], None]
    ) -> None:
        """`between_batches` may raise, to end the probe; `unprobed` then holds the row."""
        if probe and self._probe is not None:
            self.unprobed = row
            row = row | self._measure(self._probe, int(row["step"]), hyper, between_batches)
            self.unprobed = None
            if self._file is not None:
                row = self._judged(self._file, row, num_queries=self._probe.num_queries)
        if self._file is not None:
            self._file.write(row)
            if "effective_rank" in row:
                self._file.probed.append(row)
        self._display.log(row)

    def _measure(
        self, probe: Probe, done: int, hyper: StepHyper, between_batches: Callable[[], None]
    ) -> dict[str, float]:
        self._watch.check_weights(self._method, done=done)  # before the probe, which needs finite features
        try:
            # Not compiled: other shapes and float32 would take longer to compile than they save.
            with self._display.busy("probing", is_probe=True), torch.compiler.set_stance("force_eager"):
                return probe.measure(self._method, hyper, between_batches=between_batches)
        except (NonFiniteFeatures, NotFinite):
            step = max(0, done - 1)
            raise NonFiniteLoss(
                f"the features after step {step} are not finite", step=step, indices=self._watch.last_indices
            ) from None

    def _judged(self, file: MetricsLog, row: dict[str, float], *, num_queries: int) -> dict[str, float]:
        """The row with what the chooser adds; warns where it shows a problem, and keeps the best weights."""
        row = row | self._chooser.judge(row, file.probed, num_queries=num_queries)
        found = [self._chooser.warning(row, file.probed, num_queries=num_queries)]
        if row["step"] > self._settling_steps:
            found += warnings_of(self._method, row, before=file.probed, num_queries=num_queries)
        for warning in filter(None, found):
            self.warn(int(row["step"]), warning)
        return row

    def ended_early(self) -> str:
        """Why the run ends with its last probe; "" if it goes on. All processes must ask."""
        probed = [] if self._file is None else self._file.probed
        return self._chooser.ended(probed[-1] if probed else None)

    def warn(self, done: int, warning: str) -> None:
        """Show a warning and keep it in the run folder."""
        self._display.warn(warning)
        if self._file is not None:
            self._file.warn(done, warning)
