"""Optimiser state that a checkpoint can carry from one device to another."""

from copy import deepcopy
from typing import Any

from torch.optim import Optimizer


class PortableState(Optimizer):
    """An optimiser whose state is saved without what belongs to this device and this step."""

    def portable_state(self) -> dict[str, Any]:
        """`state_dict` without what belongs to this device and this step."""
        state = self.state_dict()
        own = ("lr", "capturable")
        groups = [{key: value for key, value in group.items() if key not in own} for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}

    def load_portable_state(self, state: dict[str, Any]) -> None:
        present = self.state_dict()["param_groups"]
        groups = [{**now, **saved} for now, saved in zip(present, state["param_groups"], strict=True)]
        # A copy: torch keeps the very tensors it is given, and each step would then change them for whoever else holds them.
        self.load_state_dict({"state": deepcopy(state["state"]), "param_groups": groups})
