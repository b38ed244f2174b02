"""The training loop: the same in one process and in many, resumable at any step."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from massl import distributed
from massl.config import RecipeError
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.views import ViewBatch, ViewSettings
from massl.methods.base import Method, StepHyper, StepOutput, combine
from massl.training.bad_steps import BadSteps, origin_in
from massl.training.best import Chooser
from massl.training.checkpoint import CheckpointStore
from massl.training.checkpoint_times import CheckpointTimes
from massl.training.execution import choose_execution, peak_memory
from massl.training.graphed_step import GraphedStep
from massl.training.loss_watch import LossWatch, NonFiniteLoss
from massl.training.optimizers import build_optimizer
from massl.training.probes import Probe
from massl.training.progress import ProgressDisplay
from massl.training.ranks import require_equal_steps, require_even_parts, stop_together
from massl.training.row_log import RowLog
from massl.training.run_folder import RunFolder
from massl.training.schedules import Schedules
from massl.training.settings import TrainerSettings
from massl.training.step import TrainingStep
from massl.training.stop_request import StepAbandoned, StopRequest
from massl.training.view_maker import ViewMaker
from massl.weights.io import BACKBONE_FILE, BEST_FILE, backbone_bytes, is_readable


@dataclass(frozen=True, kw_only=True)
class FitResult:
    step: int  # updates done
    finished: bool  # False: stopped by a signal; the same command continues the run
    signal_number: int | None
    ended_early: str = ""  # why it finished before its last step


class Trainer:
    """Trains a method on a loader's images and writes its run folder."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        method: Method,
        loader: Loader,
        views: ViewSettings,
        schedules: Schedules,
        probe: Probe | None,
        crop_ratio: float,  # of evaluations; kept with the backbone
        folder: RunFolder,
        device: torch.device,
    ) -> None:
        require_even_parts(settings)
        self.settings, self.views, self.schedules, self.folder, self.device = settings, views, schedules, folder, device
        self.loader, self.probe, self.crop_ratio = loader, probe, crop_ratio
        self.method = method.to(device).train()
        self.method.set_activation_checkpointing(settings.activation_checkpointing)
        self.execution = choose_execution(
            self.method,
            kernels=settings.kernels,
            bf16=settings.precision == "bf16",
            float32_stream=settings.residual == "fp32",
            cuda_graph=settings.cuda_graph,
            device=device,
        )
        self.optimizer = build_optimizer(self.method, schedules.optimizer, rate_scales=schedules.rate_scales(method))
        step = TrainingStep(
            method=self.method,
            parallel=distributed.data_parallel(self.method, device),
            optimizer=self.optimizer,
            bf16=settings.precision == "bf16",
            device=device,
        )
        self._plain_step, self.step = step, GraphedStep(step) if self.execution.cuda_graph else step
        self._make_views = ViewMaker(views, seed=settings.seed, bf16=settings.precision == "bf16", device=device)
        self.store = CheckpointStore(folder.checkpoints, settings.keep_checkpoints)
        self.times = CheckpointTimes(settings, steps_per_epoch=schedules.steps_per_epoch, device=device)
        self.bad_steps = BadSteps(folder, loader, allowed=settings.skip_bad_steps, origin_of=self._origin_of)
        self.watch = LossWatch(device, on_bad=lambda error: self.bad_steps.add(error, warn=self.rows.warn))
        self.end_step = min(settings.max_steps or schedules.num_steps, schedules.num_steps)
        self.display = ProgressDisplay(
            num_steps=self.end_step,
            steps_per_epoch=schedules.steps_per_epoch,
            batch_size=settings.batch_size,
            probe_every_steps=self._probe_steps,
            visible=distributed.is_main(),
        )
        self.rows = RowLog(
            method=self.method,
            probe=probe,
            watch=self.watch,
            display=self.display,
            chooser=Chooser(settings, has_start=lambda: folder.has_start, keep=self._keep_best),
            settling_steps=max(schedules.steps_per_epoch, schedules.num_steps // 10),
        )
        self.stop = StopRequest(self._acknowledge, device=device)

    def fit(self, *, cautions: Sequence[str] = ()) -> FitResult:
        """Train from the newest checkpoint, or the start, to the end or a signal; the run folder keeps `cautions`."""
        with stop_together():
            start_step = self._resume()
        require_equal_steps(start_step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # an earlier run of this process may have used more
        if start_step is not None and start_step >= self.end_step and self.rows.unprobed is None:
            return FitResult(step=start_step, finished=True, signal_number=None)
        if distributed.is_main():
            self.rows.open(self.folder.path, resume_step=start_step, cautions=cautions)
        try:
            with self.stop, self.display:
                try:
                    return self._loop(start_step)
                except StepAbandoned as abandoned:
                    return self._after_abandoned(abandoned)
        except NonFiniteLoss as error:
            self.bad_steps.end(error, steps_saved=self.store.steps())
        finally:
            self.rows.close()
            self.loader.close()

    def _loop(self, start_step: int | None) -> FitResult:
        if start_step is None:
            self._log_start()
            start_step = 0
        elif self.rows.unprobed is not None:
            self._write_row(self.rows.unprobed, self.schedules.at(start_step - 1), probe=True)
            self.save(start_step)  # without the row
        if ended := self.rows.ended_early():
            return FitResult(step=start_step, finished=True, signal_number=None, ended_early=ended)
        self.display.start(start_step)
        self.times.restart()
        clock, logged_step = time.perf_counter(), start_step
        for step in range(start_step, self.end_step):
            hyper = self.schedules.at(step)
            with self.stop.waiting_for_images(step):
                images = self.loader.at(step)
            output = self._update(images, hyper)
            done = step + 1
            self.display.advance(done, loss=self.watch.last_loss)
            should_probe, should_save = self._is_probe_step(done), self.times.is_due(done)
            should_log = should_probe or done % self.settings.log_every_steps == 0 or done == self.end_step
            signal_number = self.stop.agreed()
            if should_log:
                seconds, num_images = time.perf_counter() - clock, (done - logged_step) * self.settings.batch_size
                self._log(output, hyper, done, images_per_second=num_images / seconds, probe=should_probe)
                clock, logged_step = time.perf_counter(), done
            ended = self.rows.ended_early() if should_probe else ""
            if should_save or signal_number or ended or done == self.end_step:
                self.save(done)
            if signal_number or ended:
                finished = bool(ended) or done == self.end_step
                return FitResult(step=done, finished=finished, signal_number=signal_number or None, ended_early=ended)
        return FitResult(step=self.end_step, finished=True, signal_number=None)

    def _after_abandoned(self, abandoned: StepAbandoned) -> FitResult:
        step = abandoned.step
        is_saved = distributed.gather_objects(step in self.store.steps())[0]  # as the writing process sees it
        if step and not is_saved:  # before the first update there is nothing to save
            self.save(step)
        return FitResult(step=step, finished=False, signal_number=abandoned.signal_number)

    def _acknowledge(self) -> None:
        """Answer a signal; called by its handler, between two instructions of the loop."""
        if distributed.world_size() > 1:
            when = "as soon as all processes know"
        elif self.rows.unprobed is not None:
            when = "after this batch of the probe"
        else:
            in_parts = self.device.type == "cpu" and self.settings.accumulation_steps > 1
            when = "after this part of the step" if in_parts else "after this step"
        self.display.say(f"stopping {when}; press Ctrl-C again to stop now", style="yellow")

    def _update(self, images: ImageBatch, hyper: StepHyper) -> StepOutput:
        num_parts = self.settings.accumulation_steps
        try:
            output = self.step(self._view_parts(images, hyper), hyper, num_parts=num_parts)
        except StepAbandoned:  # on a CPU, between two parts
            self.optimizer.zero_grad(set_to_none=True)
            self._plain_step.guard.restore()
            raise
        self.watch.push(int(hyper.step), output.loss, images.indices, is_finite=output.is_finite)
        return output

    def _origin_of(self, step: int) -> str:
        """Repeat a step that was not finite, to name the first layer that is not."""
        hyper, num_parts = self.schedules.at(step), self.settings.accumulation_steps
        with self.display.busy(f"repeating step {step} to name the layer"):
            images = self.loader.at(step)
            return origin_in(self._plain_step, lambda: self._view_parts(images, hyper), hyper, num_parts=num_parts)

    def _view_parts(self, images: ImageBatch, hyper: StepHyper) -> Iterator[ViewBatch]:
        """The views of each part of the batch. A generator: only one part's views are in memory at a time."""
        num_parts = self.settings.accumulation_steps
        size = len(images.indices) // num_parts
        for part in range(num_parts):
            if self.device.type == "cpu":  # where a part can take minutes: show it, and stop here if asked
                if part:
                    self.stop.abandon_if_agreed(int(hyper.step))
                self.display.advance(int(hyper.step) + part / num_parts, loss=self.watch.last_loss)
            yield self._make_views(images.slice(part * size, (part + 1) * size), epoch=hyper.epoch)

    def _is_probe_step(self, done: int) -> bool:
        return self._probe_steps > 0 and (done % self._probe_steps == 0 or done == self.end_step)

    @property
    def _probe_steps(self) -> int:
        """Steps between probes; 0: no probes."""
        if self.probe is None:
            return 0
        return max(1, round(self.probe.settings.every_epochs * self.schedules.steps_per_epoch))

    def _log_start(self) -> None:
        """Log step 0: the loss of the first batch and a probe, both before any training."""
        hyper = self.schedules.at(0)
        with self.display.busy("first batch, before training"), torch.no_grad():
            with self.stop.waiting_for_images(0):
                images = self.loader.at(0)
            with torch.compiler.set_stance("force_eager"):
                output = combine([self.step.forward(views, hyper) for views in self._view_parts(images, hyper)])
        if self.settings.skip_bad_steps == 0:  # otherwise it is judged as the first step
            self.watch.push(0, distributed.mean_over_ranks(output.loss.detach()), images.indices)
        self._log(output, hyper, 0, images_per_second=0.0, probe=True)
        self.stop.abandon_if_agreed(0, now=True)

    def _log(self, output: StepOutput, hyper: StepHyper, done: int, *, images_per_second: float, probe: bool) -> None:
        self.watch.flush()
        row: dict[str, float] = {
            "step": done,
            "epoch": done // self.schedules.steps_per_epoch,
            "loss": float(distributed.mean_over_ranks(output.loss.detach())),
            "lr": float(hyper.learning_rate),
            "weight_decay": float(hyper.weight_decay),
            **{name: float(value) for name, value in hyper.own.items()},
            "images_per_second": round(images_per_second, 1),
            **peak_memory(self.device),
            **{name: float(distributed.mean_over_ranks(value)) for name, value in output.metrics.items()},
            **({"skipped_steps": len(self.bad_steps.skipped)} if self.bad_steps.skipped else {}),
        }
        self._write_row(row, hyper, probe=probe)

    def _write_row(self, row: dict[str, float], hyper: StepHyper, *, probe: bool) -> None:
        done = int(row["step"])
        self.rows.write(row, hyper, probe=probe, between_batches=lambda: self.stop.abandon_if_agreed(done, now=True))

    def save(self, done: int) -> None:
        """Write the checkpoint and the backbone after `done` steps; 0: the weights that the run starts from."""
        self.watch.flush()
        self.watch.check_weights(self.method, done=done)
        if distributed.is_main():
            state = {
                "step": done,
                "recipe": self.folder.binding_text(),
                "data": self.folder.data_digest,
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.portable_state(),
            }
            if self.rows.unprobed is not None:
                state["unprobed"] = self.rows.unprobed
            if self.bad_steps.skipped:
                state["skipped_steps"] = self.bad_steps.skipped
            # The backbone first: a run whose last checkpoint exists counts as finished and must have its backbone. The
            # first checkpoint before it: a backbone without a checkpoint tells that the checkpoints were lost.
            kept = self.times.milestone_steps
            writes = (self._write_backbone, lambda: self.store.save(done, state, milestone_every=kept))
            for write in writes if self.store.steps() else reversed(writes):
                write()
        distributed.barrier()
        self.times.restart()

    def _write_backbone(self, name: str = BACKBONE_FILE) -> None:
        backbone, mean, std = self.method.backbone_to_evaluate(), self.views.mean, self.views.std
        about: dict[str, Any] = {"timm_arguments": backbone.timm_arguments, "image_size": self.views.global_size}
        content = backbone_bytes(backbone.model, **about, mean=mean, std=std, crop_ratio=self.crop_ratio)
        self.folder.write_bytes(name, content)

    def _keep_best(self) -> None:
        self._write_backbone(BEST_FILE)

    def _resume(self) -> int | None:
        """Load the newest checkpoint; returns its step, or None for a new run."""
        own = {"method": self.method.state_dict(), "optimizer": self.optimizer.portable_state()}
        state = self.store.load_latest(self.display.warn, like={"step": 0, "recipe": "", **own})
        if state is None:
            return None
        if differences := self.folder.differences_from(state["recipe"], data_digest=state.get("data", "")):
            raise RecipeError(
                f"the checkpoint in {self.folder.path} belongs to another recipe ({'; '.join(differences)}); "
                "choose another --output"
            )
        self.method.load_state_dict(state["method"])
        self.optimizer.load_portable_state(state["optimizer"])
        self.rows.unprobed, self.bad_steps.skipped = state.get("unprobed"), list(state.get("skipped_steps", []))
        step = int(state["step"])
        if distributed.is_main() and not is_readable(self.folder.path / BACKBONE_FILE):
            self.display.warn(f"{self.folder.path / BACKBONE_FILE} is missing or damaged: written anew")
            self._write_backbone()
        if step == 0:  # weights to start from, nothing is trained yet
            return None
        if step < self.end_step:
            self.display.say(f"continuing at step {step} of {self.end_step}")
        return step
