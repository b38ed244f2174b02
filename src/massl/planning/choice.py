"""The recipe `auto` for given images and a device: the rules applied, each value with its reason in plain words."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from massl.planning import rules
from massl.planning.facts import DeviceFacts, ImageFacts
from massl.planning.memory import computed_gib


@dataclass(kw_only=True)
class Plan:
    """Values by dotted key, and for each a line that says why."""

    given: Mapping[str, Any]  # by the user; other values follow from them
    num_images: int  # whose column of the rules holds
    network: rules.NetworkRow  # its options hold unless the user gave others
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any, why: str) -> Any:
        """Choose a value unless the user gave one or the network has its own; returns what holds."""
        is_given = key in self.given
        if key in self.network.options:
            measured = self.network.origin if key.startswith("backbone.") else self.network.basis
            value, why = self.network.options[key], measured if why else ""
        self.values[key] = self.given[key] if is_given else value
        self.reasons[key] = f"as you asked (auto: {_text(value)})" if is_given else why
        return self.values[key]

    def at(self, setting: str) -> Any:
        return rules.at(setting, self.num_images)

    def because(self, setting: str) -> str:
        return rules.because(setting, self.num_images)

    def lines(self) -> list[str]:
        return [f"{key} {_text(self.values[key])}: {why}" for key, why in self.reasons.items() if why]


def choose(
    images: ImageFacts,
    device: DeviceFacts,
    given: Mapping[str, Any],
    *,
    start: rules.NetworkRow | None = None,
    as_of: int | None = None,
) -> Plan:
    """A complete plan; `given` holds the user's own values by dotted key, which others follow.

    `start` is the network of the weights to start from. `as_of`: choose as for this number of images; default: by
    how many there are, and how often a given number of epochs shows them.
    """
    limits = rules.device_row(device.kind, device.memory_gib)
    num_images = min(images.num_images, limits.most_images, as_of or _as_a_whole_run(images.num_images, given))
    row = rules.view_row(min(images.side, rules.at("largest_view", num_images), limits.view))
    suits = {row.network: "images so small", limits.network: "this device"}
    short = "" if num_images in (images.num_images, limits.most_images) else " in so short a run"
    suits[rules.at("network", num_images)] = f"{images.num_images:,} images{short}"
    order = list(rules.NETWORKS)
    smallest = min(suits, key=order.index)
    suited = suits[smallest]
    if any(given.get(key) is not None for key in rules.OF_VITS):
        smallest = rules.NETWORKS[smallest].instead or smallest
    wanted = start or rules.NETWORKS[smallest]
    name = str(given.get("backbone.name", wanted.name))
    network = wanted if name == wanted.name else _other_network(name, row, given)
    plan = Plan(given=given, num_images=num_images, network=network)
    row = _choose_views(plan, images, limits, row)
    _choose_network(plan, wanted, network.origin if start else f"{wanted.kind} of the size that suits {suited}", row)
    _choose_trainer(plan, images, device, limits)
    _choose_method(plan, images, limits)
    _fit_memory(plan, images, device)
    _choose_schedule(plan, images)
    _choose_data(plan, images, device, row)
    plan.values |= {key: value for key, value in given.items() if key not in plan.values}
    return plan


def _as_a_whole_run(num_images: int, given: Mapping[str, Any]) -> int:
    """The images of a run of usual length that sees as many as the given epochs show: few steps are a small run."""
    epochs = int(given.get("trainer.epochs", rules.EPOCHS_OF_LONG_RUNS))
    return min(num_images, max(1, round(num_images * epochs / rules.EPOCHS_OF_LONG_RUNS)))


def _other_network(name: str, row: rules.ViewRow, given: Mapping[str, Any]) -> rules.NetworkRow:
    """One that the user names; a ResNet gets what was measured with ResNet-18."""
    if re.match(r"resnet\d", name):
        known = rules.NETWORKS[row.network if row.network == "resnet18 of thumbnails" else "resnet18"]
        has_small_stem = given.get("backbone.stem", known.options.get("backbone.stem")) == "small"
        reduction = 0 if has_small_stem else rules.REDUCTION
        return replace(known, name=name, kind="", reduction=reduction, basis="from massl's own runs with ResNet-18")
    return rules.NetworkRow(name=name, kind="", reduction=0 if name.startswith("vit_") else rules.REDUCTION)


def _choose_views(plan: Plan, images: ImageFacts, limits: rules.DeviceRow, row: rules.ViewRow) -> rules.ViewRow:
    n, least = images.num_images, round(plan.network.reduction * rules.LEAST_MAP[limits.kind])
    chosen = max(row.side, least)
    side = f"your images are typically {images.typical_size}"
    given = plan.given.get("backbone.patch_size") or 1
    chosen = _multiple(chosen, given)
    if patch := plan.network.options.get("backbone.patch_size"):
        patches = row.side // row.patch
        chosen = patches * patch
        side += f"; {patches} x {patches} patches of {patch} px"
    elif images.side > row.side:
        of = "this CPU" if limits.kind == "cpu" and limits.view <= plan.at("largest_view") else f"{n:,} images"
        side += f"; {row.side} px suit {of}"
    elif chosen > row.side:
        side += "; this network needs larger ones"
    size = plan.set("views.global_size", chosen, side)
    if size != chosen:
        row = rules.view_row(size)
    plan.set("views.num_global", 2, "the large crops that are compared")
    num_local = plan.set("views.num_local", plan.at("num_local"), plan.because("num_local"))
    local = max(row.local_size, least // 2)
    local = max(1, local // row.patch) * patch if patch else _multiple(local, given)
    local_why = f"{num_local} small crops beside the large ones" if num_local else ""
    plan.set("views.local_size", min(local, size), local_why)
    plan.set("views.global_scale", list(row.global_scale), "")
    plan.set("views.local_scale", list(row.local_scale), "")
    if row.blur_sigma:
        plan.set("views.blur_sigma", [0.1, row.blur_sigma], f"2 px at 224 px are {row.blur_sigma:g} px at {size} px")
    else:
        for key in ("first_global_blur", "second_global_blur", "local_blur", "solarise"):
            plan.set(f"views.{key}_probability", 0.0, "")
    return row


def _choose_network(plan: Plan, wanted: rules.NetworkRow, why: str, row: rules.ViewRow) -> None:
    """`wanted` is auto's own; the user may have given another."""
    name = plan.set("backbone.name", wanted.name, f"{why}; {wanted.reason}" if wanted.reason else why)
    if name.startswith("vit_") and "backbone.patch_size" not in plan.network.options:
        size = plan.values["views.global_size"]
        plan.set("backbone.image_size", size, "")
        plan.set("backbone.patch_size", row.patch, f"{(size // row.patch) ** 2} patches an image")
    plan.set("backbone.drop_path_rate", row.drop_path, "")
    for key, value in plan.network.options.items():
        plan.set(key, value, plan.reasons.get(key, ""))


def _choose_trainer(plan: Plan, images: ImageFacts, device: DeviceFacts, limits: rules.DeviceRow) -> None:
    n = images.num_images
    wanted, few = plan.at("batch_size"), n // rules.LEAST_STEPS_PER_EPOCH
    size = _power_of_two(min(wanted, limits.batch_size, max(few, rules.SMALLEST_BATCH)))
    why = plan.because("batch_size")
    if few < min(wanted, limits.batch_size):
        why = f"{rules.LEAST_STEPS_PER_EPOCH} steps or more in each pass over your {n:,} images"
    elif limits.batch_size < wanted:
        why = "a small batch, so that a CPU makes steps"
    if (processes := device.num_processes) > 1:  # equal shares
        size = processes * _power_of_two(size / processes)
    plan.set("trainer.batch_size", min(size, n), why)
    plan.set("trainer.accumulation_steps", 1, "")
    plan.set("trainer.activation_checkpointing", False, "")
    slow = "CPUs are fastest in fp32" if device.kind == "cpu" else "" if device.has_bf16 else "this GPU has no bfloat16"
    plan.set("trainer.precision", "fp32" if slow else "bf16", slow)
    passes = (
        f"{plan.because('epochs')}{'; a CPU is slow, so it gets fewer of them than a GPU' if limits.epochs < 1 else ''}"
    )
    epochs = rules.at("epochs", min(n, limits.most_images))  # of a whole run, also beside given ones
    plan.set("trainer.epochs", max(1, round(limits.epochs * epochs)), passes)


def _choose_method(plan: Plan, images: ImageFacts, limits: rules.DeviceRow) -> None:
    n, share = images.num_images, rules.MEMORY_SHARE
    most, quarter = plan.at("memory_rows"), max(n // share, 1)
    rows = max(_power_of_two(min(most, quarter), nearest=True), rules.SMALLEST_BLOCK)
    if rows < (batch := plan.values["trainer.batch_size"]):
        rows, why = batch, "as many as a batch: each step would replace a smaller one, and drop the rest"
    elif quarter <= most:
        why = f"about a quarter of your {n:,} images"
    else:
        why = f"less than a quarter of your {n:,} images: {plan.because('memory_rows')}"
    rows = plan.set("method.memory.num_rows", min(rows, n), why)
    plan.set("method.memory.block_size", max(1, rows // share), "a quarter of the memory, so that it has four blocks")
    plan.set("method.instance_weight", plan.at("instance_weight"), plan.because("instance_weight"))
    plan.set("method.head.batch_norm", plan.at("batch_norm"), plan.because("batch_norm"))
    plan.set("method.head.hidden_dim", limits.head[0], "")
    plan.set("method.head.out_dim", limits.head[1], "")


def _fit_memory(plan: Plan, images: ImageFacts, device: DeviceFacts) -> None:
    """Make a step fit the device, by count. Parts change what batch norm sees, so with it the batch gets smaller."""
    room = rules.DEVICE_SHARE * device.memory_gib
    key = "trainer.batch_size" if plan.values["method.head.batch_norm"] else "trainer.accumulation_steps"
    shrink = key == "trainer.batch_size"
    told = f"so that a step fits {device.memory_gib:.0f} GiB"
    while (
        needed := computed_gib(plan.values, device_kind=device.kind, num_processes=device.num_processes)
    ) is not None:
        if needed <= room:
            return
        batch, parts = plan.values["trainer.batch_size"], plan.values["trainer.accumulation_steps"]
        can_split = batch // parts >= 2 * max(rules.SMALLEST_BATCH * 2, device.num_processes) and key not in plan.given
        if can_split:
            plan.set(key, batch // 2 if shrink else parts * 2, told if shrink else f"{told}; the result is the same")
        elif not plan.values["trainer.activation_checkpointing"] and device.kind == "cuda":
            if "trainer.activation_checkpointing" in plan.given:
                return
            plan.set("trainer.activation_checkpointing", True, f"{told}, at some cost of time")
        else:
            return  # it may still fit: the count is rough, and the trial says so before the first step


def _choose_schedule(plan: Plan, images: ImageFacts) -> None:
    n, epochs, batch = images.num_images, plan.values["trainer.epochs"], plan.values["trainer.batch_size"]
    kind = "horizon_of_many_views" if plan.values["views.num_local"] else "horizon_of_two_views"
    horizon, (least, most) = plan.at(kind), rules.MOMENTUM
    momentum = round(min(most, max(least, 1 - batch / horizon)), 4)
    plan.set(
        "method.teacher.momentum",
        momentum,
        f"the teacher averages over {_rounded(horizon):,} images, {_rounded(horizon / batch):,} steps of {batch}; "
        f"{plan.because(kind)}",
    )
    temperature = round(plan.at("temperature"), 3)
    plan.set("method.teacher.temperature_start", 0.04, "")
    temperature = plan.set("method.teacher.temperature", temperature, plan.because("temperature"))
    share = plan.at("temperature_warmup_share")
    warm_up = round(share * epochs, 1) if temperature > 0.04 else 0.0
    plan.set(
        "method.teacher.temperature_warmup_epochs", warm_up, plan.because("temperature_warmup_share") if warm_up else ""
    )
    rate = plan.set("optimizer.learning_rate", round(plan.at("learning_rate"), 6), plan.because("learning_rate"))
    why = plan.reasons["optimizer.learning_rate"]
    plan.reasons["optimizer.learning_rate"] = (
        f"for a batch of 256; {rate * batch / 256:.3g} at your batch of {batch}; {why}"
    )
    warm = round(plan.at("warmup_share") * epochs, 2)
    plan.set("optimizer.warmup_epochs", warm, f"{plan.because('warmup_share')} ({warm:g} of {epochs} passes)")
    steps = max(1, n // batch)
    plan.set("probes.every_epochs", float(max(1, round(epochs / rules.PROBES_PER_RUN))), "about ten looks at the run")
    log_steps = min(rules.MOST_LOG_STEPS, max(1, steps * epochs // rules.LOGS_PER_RUN))
    plan.set("trainer.log_every_steps", log_steps, "")
    plan.set("trainer.checkpoint_every_steps", min(rules.CHECKPOINT_STEPS, max(1, steps * epochs // 4)), "")


def _choose_data(plan: Plan, images: ImageFacts, device: DeviceFacts, row: rules.ViewRow) -> None:
    plan.set("probes.crop_ratio", row.crop_ratio, "")
    max_side = plan.set("data.max_side", row.max_side, f"larger files are reduced to {row.max_side} px while decoding")
    num_read = images.num_images + images.num_probed
    needed = 0.0 if images.is_array else 1.05 * num_read * images.decoded_bytes(max_side) / 2**30
    cache = math.ceil(min(needed, rules.CACHE_SHARE * device.host_gib) * 10) / 10
    size = f"{needed:.1f} GiB" if needed >= 0.05 else "less than 0.1 GiB"
    why = f"all your images decoded, {size}: later passes decode nothing"
    if images.is_array:
        why = ""
    elif cache < needed:
        why = f"your images take {needed:,.0f} GiB decoded, more than this machine can keep; these decode only once"
    plan.set("data.cache_gib", cache, why)
    cores, is_photograph = device.num_cores, images.side >= rules.PHOTOGRAPH_SIDE and not images.is_array
    workers = 1 if device.kind == "cpu" and cores <= 2 else min(cores, rules.MOST_WORKERS)
    plan.set("data.num_workers", workers, f"this process has {cores} cores")
    many = cores >= rules.CORES_FOR_PROCESSES and is_photograph and cache < needed
    few = cores < rules.CORES_FOR_CPU_DECODER and is_photograph and device.kind == "cuda" and cache < needed
    decoder = plan.set("data.decoder", "gpu" if few else "cpu", "few cores: the GPU decodes JPEGs" if few else "")
    kind = "processes" if many and decoder == "cpu" else "threads"
    plan.set("data.worker_kind", kind, "photographs decode faster in processes" if kind == "processes" else "")


def _multiple(length: int, patch: int) -> int:
    return max(1, length // patch) * patch


def _power_of_two(number: float, *, nearest: bool = False) -> int:
    exponent = math.log2(max(1.0, number))
    return int(2 ** (round(exponent) if nearest else math.floor(exponent + 1e-9)))


def _rounded(number: float) -> int:
    """To two digits, for sentences."""
    scale = 10 ** max(0, math.floor(math.log10(max(number, 1))) - 1)
    return int(round(number / scale) * scale)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
