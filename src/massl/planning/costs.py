"""What a run costs: seconds and device memory, as a trial measures them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Memory:
    """GiB on the GPU at the peak, of tensors and as taken from the device; of training and of a probe."""

    allocated: float
    reserved: float
    probe: float = 0.0  # peak of a probe, where it was measured apart
    probe_extra: float = 0.0  # what a probe needs beside what stays allocated

    @property
    def peak(self) -> float:
        """As metrics.jsonl counts it."""
        return max(self.allocated, self.probe)

    @property
    def needed(self) -> float:
        """To be free on the device: a recorded step keeps its memory while a probe runs."""
        return self.reserved + self.probe_extra


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds an image takes in training, in the first pass over the images and in later ones, and in a probe."""

    first_pass: float
    later: float
    probe: float = 0.0
    num_probed: int = 0  # images of one probe
    memory: Memory | None = None  # that the trial took; None on a CPU

    @property
    def images_per_second(self) -> float:
        return 1.0 / self.later

    def training_seconds(self, *, images_per_epoch: int, epochs: float) -> float:
        return images_per_epoch * (min(epochs, 1.0) * self.first_pass + max(0.0, epochs - 1.0) * self.later)

    def probe_seconds(self, *, epochs: float, every_epochs: float) -> float:
        """All probes: before training, then every so many epochs, and at the end."""
        num_probes = 0.0 if every_epochs == 0 else 1 + -(-epochs // max(every_epochs, 1e-9))
        return num_probes * self.num_probed * self.probe

    def epochs_in(self, seconds: float, *, images_per_epoch: int) -> float:
        """How many epochs fit, as a fraction; probes are not counted."""
        first = images_per_epoch * self.first_pass
        return seconds / first if seconds < first else 1.0 + (seconds - first) / (images_per_epoch * self.later)
