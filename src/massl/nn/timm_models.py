"""Builds timm models: a recipe or a weights file chooses the architecture, within bounds, and nothing else.

Recipes and weights files may come from strangers, and timm also takes arguments that read files, contact hosts and
unpickle. What is not listed here never reaches timm.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from massl import keyed_random
from massl.config import RecipeError, closest
from massl.nn.positions import RESAMPLING_RULE, RESAMPLING_RULES
from massl.nn.stems import use_small_image_stem

# Suggested before others that a mistyped name is as near to.
_COMMON = (*(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")), "resnet18", "resnet50")
MAX_ELEMENTS = 2**31  # of a model: 8 GiB in float32, twice timm's ViT-g
_MAKERS = {
    *(torch.empty, torch.zeros, torch.ones, torch.full),
    *(torch.rand, torch.randn, torch.arange, torch.linspace),
}
_ELEMENTS_WITHOUT_TRIAL = 2**26  # building so much takes a second
_ELEMENTS_ON_META = 2**12  # smaller tensors are made in a trial too: timm reads values from some of them


@dataclass(frozen=True)
class _Whole:
    low: int
    high: int

    def admits(self, value: Any) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True)
class _Stages:
    """One number a stage."""

    of_one: _Whole

    def admits(self, value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) == 4 and all(self.of_one.admits(one) for one in value)

    def __str__(self) -> str:
        return f"a list of 4, each {self.of_one}"


@dataclass(frozen=True)
class _Number:
    low: float
    high: float

    def admits(self, value: Any) -> bool:
        return type(value) in (int, float) and self.low <= value <= self.high  # false for NaN

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class _Word:
    words: tuple[str, ...]

    def admits(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return "one of " + ", ".join(word or "''" for word in self.words)


class _YesNo:
    def admits(self, value: Any) -> bool:
        return type(value) in (bool, int) and value in (0, 1)

    def __str__(self) -> str:
        return "true or false"


_Rule = _Whole | _Stages | _Number | _Word | _YesNo
_POOLS = ("", "avg", "avgmax", "catavgmax", "max", "token", "map", "fast", "fastavg")
_ACTIVATIONS = (
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "prelu", "silu", "swish", "mish", "sigmoid", "tanh"),
    *("gelu", "gelu_tanh", "gelu_erf", "quick_gelu", "hard_sigmoid", "hard_swish", "hard_mish", "identity"),
)
_NORMS = (
    *(
        "batchnorm",
        "batchnorm2d",
        "batchnorm1d",
        "groupnorm",
        "groupnorm1",
        "layernorm",
        "layernorm2d",
        "layernormfp32",
    ),
    *("rmsnorm", "rmsnorm2d", "rmsnormfp32", "simplenorm", "simplenorm2d", "frozenbatchnorm2d"),
)


def _each(names: str, rule: _Rule) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


OPTIONS: dict[str, _Rule] = {
    "img_size": _Whole(1, 8192),
    "patch_size": _Whole(1, 1024),
    "in_chans": _Whole(3, 3),  # images have three channels everywhere in massl
    "num_classes": _Whole(0, 100_000),
    **_each("embed_dim num_features head_hidden_size", _Whole(1, 16_384)),
    "depth": _Whole(1, 256),
    **_each("layers depths", _Stages(_Whole(1, 64))),  # of ResNets, of ConvNeXts
    **_each("channels dims", _Stages(_Whole(1, 4096))),
    **_each("num_heads cardinality base_width stem_width stem_size head_dim group_size", _Whole(1, 4096)),
    **_each("reg_tokens num_reg_tokens", _Whole(0, 1024)),
    "swiglu_align_to": _Whole(0, 1024),
    **_each("window_size kernel_size kernel_sizes", _Whole(1, 63)),
    **_each("output_stride block_reduce_first down_kernel_size expand_ratio growth_rate", _Whole(1, 64)),
    **_each("mlp_ratio attn_ratio head_init_scale width_factor", _Number(0.0, 64.0)),
    **_each("init_values ls_init_value layer_scale_init_value norm_eps", _Number(0.0, 10.0)),
    "rope_temperature": _Number(1.0, 1e6),
    **_each("drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate", _Number(0.0, 1.0)),
    **_each("drop_path_rate drop_block_rate", _Number(0.0, 1.0)),
    **_each("class_token no_embed_class pre_norm final_norm fc_norm pool_include_prefix", _YesNo()),
    **_each("dynamic_img_size dynamic_img_pad strict_img_size qkv_bias qk_norm proj_bias fix_init", _YesNo()),
    **_each("scale_attn_norm scale_mlp_norm scale_norm swiglu_mlp use_rot_pos_emb use_abs_pos_emb", _YesNo()),
    **_each("zero_init_last avg_down replace_stem_pool conv_mlp conv_bias use_grn head_norm_first", _YesNo()),
    "global_pool": _Word(_POOLS),
    "pos_embed": _Word(("", "none", "learn")),
    "position_resampling": _Word(RESAMPLING_RULES),  # of massl, not of timm
    "weight_init": _Word(("", "jax", "jax_nlhb", "moco", "reset")),
    "stem_type": _Word(("", "deep", "deep_tiered", "patch", "overlap", "overlap_tiered", "overlap_act")),
    "pad_type": _Word(("", "same", "valid")),
    "act_layer": _Word(_ACTIVATIONS),
    **_each("norm_layer embed_norm_layer", _Word(_NORMS)),
}


def checked_options(arguments: Mapping[str, Any], *, prefix: str) -> tuple[str, dict[str, Any]]:
    """The model's name and the options that may go to timm; the rest is refused. `prefix` stands before keys."""
    name = arguments.get("model_name")
    if not isinstance(name, str) or not re.fullmatch(r"\w{1,100}(\.\w{1,100})?", name) or not timm.is_model(name):
        suggestion = closest(name, [*_COMMON, *timm.list_models()]) if isinstance(name, str) and len(name) < 200 else ""
        raise RecipeError(f"timm has no model {_short(name)}.{suggestion} `timm.list_models()` lists them all.")
    # `pretrained` is in recipes and files of older runs; their weights come from the checkpoint or the file
    others = ("model_name", "stem", "pretrained")
    options = {key: value for key, value in arguments.items() if key not in others and value is not None}
    for key, value in options.items():
        rule = OPTIONS.get(key)
        if rule is None:
            raise RecipeError(
                f"{prefix}{_short(key)[1:-1]} is no option of the architecture.{closest(key[:99], OPTIONS)} massl "
                f"hands only these to timm: {', '.join(sorted(OPTIONS))}"
            )
        if not rule.admits(value):
            raise RecipeError(f"{prefix}{key} is {_short(value)}; give {rule}")
    return name, options


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."


def create_timm_model(
    arguments: Mapping[str, Any],
    *,
    drop_path_rate: float = 0.0,
    seed: int = 0,
    max_elements: int = MAX_ELEMENTS,
    prefix: str = "backbone.timm_options.",
) -> nn.Module:
    """The one call of timm.create_model without weights: checked options and bounded size.

    Two more arguments are massl's own: `stem`, and `position_resampling`, the rule for other image sizes. `prefix`
    stands before the options in errors.
    """
    name, options = checked_options(arguments, prefix=prefix)
    rule = options.pop("position_resampling", RESAMPLING_RULE)
    if drop_path_rate > 0.0:
        options["drop_path_rate"] = drop_path_rate
    _refuse_large_model(name, options, max_elements=max_elements)
    with torch.random.fork_rng(devices=[]), _ElementLimit(max_elements, what=name):
        torch.manual_seed(keyed_random.seed_from(seed, "backbone"))
        try:
            model = timm.create_model(name, **options)
        except _TooManyElements:
            raise
        except Exception as error:  # options that do not fit together: each architecture raises its own errors
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            reason = f"it has no {unknown[1]}; leave that out" if unknown else error
            raise RecipeError(f"timm cannot build {name} with {json.dumps(options)}: {reason}") from error
    if arguments.get("stem") == "small":
        use_small_image_stem(model, name=name, seed=seed)
    if rule != RESAMPLING_RULE:
        model.position_resampling = rule
    return model


class _TooManyElements(RecipeError):
    """A model has more parameters than it may."""


class _ElementLimit(TorchFunctionMode):
    """Refuses to create more elements than `limit`, before memory is taken.

    `is_trial`: large tensors get no memory at all; the model then only shows its size, in milliseconds.
    """

    def __init__(self, limit: int, *, what: str, is_trial: bool = False) -> None:
        super().__init__()
        self.limit, self.what, self.is_trial = limit, what, is_trial
        self.num_elements = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _MAKERS:
            made = func(*args, **{**options, "device": "meta"})
            self._count(made.numel(), in_all=True)
            if self.is_trial and made.numel() > _ELEMENTS_ON_META:
                return made
        elif self.is_trial and re.fullmatch(r".*[a-z]_", func.__name__) and args and getattr(args[0], "is_meta", False):
            return args[0]  # initial values of a tensor without memory
        else:
            # relative positions: every position minus every other
            shapes = [value.shape for value in args if isinstance(value, torch.Tensor)]
            if len(shapes) == 2 and shapes[0] != shapes[1] and len(args) == 2:
                self._count(_broadcast_elements(*shapes), in_all=False)
        return func(*args, **options)

    def _count(self, num_elements: int, *, in_all: bool) -> None:
        self.num_elements += num_elements if in_all else 0
        if max(num_elements, self.num_elements) > self.limit:
            raise _TooManyElements(f"{self.what} has more than {self.limit:,} parameters; choose a smaller model")


def _refuse_large_model(name: str, options: Mapping[str, Any], *, max_elements: int) -> None:
    """Build the model once without memory for its large tensors, to see its size in milliseconds."""
    if max_elements <= _ELEMENTS_WITHOUT_TRIAL:
        return
    try:
        with torch.random.fork_rng(devices=[]), _ElementLimit(max_elements, what=name, is_trial=True):
            timm.create_model(name, **options)
    except _TooManyElements:
        raise
    except Exception:
        pass  # some networks compute with what the trial leaves empty; the real building is limited too, or explains


def _broadcast_elements(first: Sequence[int], second: Sequence[int]) -> int:
    """Elements of the sum of tensors of these shapes; 0 if they cannot be added."""
    pairs = [*itertools.zip_longest(reversed(first), reversed(second), fillvalue=1)]
    return math.prod(max(pair) for pair in pairs) if all(1 in pair or pair[0] == pair[1] for pair in pairs) else 0
