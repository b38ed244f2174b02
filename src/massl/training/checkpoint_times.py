"""When a run writes checkpoints: every so many steps or minutes, and at milestones."""

import time

import torch

from massl import distributed
from massl.training.exchange import Exchange
from massl.training.settings import TrainerSettings


class CheckpointTimes:
    """Steps count from the start of the run, minutes from the last checkpoint."""

    def __init__(self, settings: TrainerSettings, *, steps_per_epoch: int, device: torch.device) -> None:
        self.milestone_steps = settings.milestone_every_epochs * steps_per_epoch  # 0: no milestones
        self._every_steps, self._every_seconds = settings.checkpoint_every_steps, 60 * settings.checkpoint_every_minutes
        self._ranks = Exchange(device)
        self.restart()

    def restart(self) -> None:
        """Count the minutes from now on."""
        self._since = time.monotonic()

    def is_due(self, done: int) -> bool:
        """Whether to save after `done` steps: the same on all ranks, which must call this after every step."""
        is_milestone = self.milestone_steps > 0 and done % self.milestone_steps == 0
        is_late = self._are_minutes_over()
        return is_milestone or is_late or done % self._every_steps == 0

    def _are_minutes_over(self) -> bool:
        if self._every_seconds == 0:
            return False
        is_over = time.monotonic() - self._since >= self._every_seconds
        # The clocks of ranks differ. All follow the first one whose minutes are over.
        return is_over if distributed.world_size() == 1 else bool(self._ranks.largest(int(is_over), now=False))
