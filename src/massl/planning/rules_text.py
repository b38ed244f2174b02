"""The rules in words, for `massl recipes auto`."""

from typing import Any

from massl.planning.rules import DEVICES, IMAGES, NETWORKS, TABLE, VIEWS


def rules_text() -> str:
    lines = ["auto chooses every value for your images and machine. Between the columns it interpolates.", ""]
    lines.append(f"{'images':<26}" + "".join(f"{number:>11,}" for number in IMAGES))
    for name, row in TABLE.items():
        lines.append(f"{name:<26}" + "".join(f"{_cell(value):>11}" for value in row.values))
        lines.append(f"    {row.reason}. Measured: {row.measured}")
    lines += ["", "The smallest network that images, their number and the device suggest, with its own values:"]
    for name, network in NETWORKS.items():
        lines.append(f"{name}: {network.name}")
        lines += [f"    {key} {value}" for key, value in network.options.items()]
        lines.append(f"    Measured: {network.measured}")
    lines += ["", "By the shorter side of the images:"]
    for view in VIEWS:
        blur = f"blur up to {view.blur_sigma:g} px" if view.blur_sigma else "no blur"
        lines.append(
            f"from {view.side:>3} px: patches of {view.patch} px, small crops of {view.local_size} px, large crops "
            f"from {view.global_scale[0]:.0%} of the area, {blur}, files reduced to {view.max_side} px, at most "
            f"{view.network}"
        )
    lines += ["", "By the device:"]
    for device in DEVICES:
        name = f"GPU from {device.gib:g} GiB" if device.kind == "cuda" else "CPU"
        lines.append(
            f"{name}: views of at most {device.view} px, batch of at most {device.batch_size:,}, head "
            f"{device.head[0]:,} to {device.head[1]}, {device.epochs:.0%} of the epochs, at most {device.network}"
        )
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)
