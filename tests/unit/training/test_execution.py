from typing import Any

import pytest
import torch
from torch import nn

from massl.config import RecipeError
from massl.methods.massl import MaSSL, MaSSLHeadSettings, MaSSLSettings
from massl.nn.backbone import BackboneSettings
from massl.nn.memory import MemorySettings
from massl.training.execution import Execution, choose_execution

ON_GPU = torch.device("cuda", 0)


def method(name: str) -> MaSSL:
    settings = MaSSLSettings(
        head=MaSSLHeadSettings(hidden_dim=16, out_dim=8), memory=MemorySettings(num_rows=8, block_size=4)
    )
    if name == "resnet18":
        return MaSSL(settings, BackboneSettings(name=name, stem="small", drop_path_rate=0.0), seed=0)
    options: dict[str, int | float | bool | str] = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    return MaSSL(
        settings,
        BackboneSettings(name=name, image_size=8, patch_size=4, drop_path_rate=0.0, timm_options=options),
        seed=0,
    )


def chosen(name: str, device: torch.device, *, bf16: bool = True, float32_stream: bool = False) -> Execution:
    return choose_execution(
        method(name), kernels="fused", bf16=bf16, float32_stream=float32_stream, cuda_graph=True, device=device
    )


def test_the_choice_is_described_with_its_reason() -> None:
    assert chosen("vit_tiny_patch16_224", ON_GPU) == Execution(networks="fused, bf16 residual stream", cuda_graph=True)
    assert chosen("vit_tiny_patch16_224", ON_GPU, float32_stream=True).networks == "fused, fp32 residual stream"
    assert chosen("vit_tiny_patch16_224", ON_GPU, bf16=False).networks == "plain (fused ones need a GPU and bf16)"
    assert chosen("resnet18", ON_GPU).networks == "plain (the backbone is no vision transformer)"
    assert chosen("vit_small_patch16_dinov3", ON_GPU).networks == (
        "plain, which is slower (its blocks rotate queries and keys)"
    )
    assert chosen("vit_giant_patch14_dinov2", ON_GPU).networks == (
        "plain, which is slower (its blocks have a SwiGLU MLP)"
    )
    assert chosen("vit_small_patch14_reg4_dinov2", ON_GPU).networks == "fused, bf16 residual stream"
    assert chosen("vit_tiny_patch16_224", torch.device("cpu")) == Execution(
        networks="plain (fused ones need a GPU and bf16)", cuda_graph=False
    )


@pytest.mark.parametrize(
    ("name", "is_fused"), [("vit_giant_patch14_dinov2", False), ("vit_small_patch14_reg4_dinov2", True)]
)
def test_swiglu_is_computed_by_the_plain_path_and_registers_and_layer_scale_by_the_kernels(
    name: str, is_fused: bool
) -> None:
    trained = method(name)
    choose_execution(trained, kernels="fused", bf16=True, float32_stream=False, cuda_graph=True, device=ON_GPU)
    assert [backbone.fused_kernels for backbone in trained.backbones()] == [is_fused, is_fused]


@pytest.mark.parametrize("device", [ON_GPU, torch.device("cpu")])
def test_convolutions_keep_the_channels_of_a_pixel_together(device: torch.device) -> None:
    trained = method("resnet18")
    images = torch.randn(2, 3, 16, 16)
    trained.eval()
    before = trained.student.backbone.pooled([images])
    choose_execution(trained, kernels="fused", bf16=True, float32_stream=False, cuda_graph=True, device=device)
    for encoder in (trained.student, trained.teacher):
        weight = encoder.backbone.model.get_parameter("layer1.0.conv1.weight")
        assert weight.is_contiguous(memory_format=torch.channels_last)
    layouts = []
    trained.student.backbone.model.get_submodule("conv1").register_forward_pre_hook(
        lambda module, inputs: layouts.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    torch.testing.assert_close(trained.student.backbone.pooled([images]), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(trained.student.backbone(images).pooled, before, rtol=1e-4, atol=1e-4)
    assert layouts == [True, True]


# torch's own reading of a block's input
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_compiled_networks_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured and differentiated as torch.compile does it; its code generator, which takes a minute, is left out."""
    inplace, compiled = nn.Module.compile, []

    def capture_only(module: nn.Module, **options: Any) -> None:
        compiled.append(type(module).__name__)
        inplace(module, backend="aot_eager", fullgraph=True, **options)

    monkeypatch.setattr(nn.Module, "compile", capture_only)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    images = torch.randn(2, 3, 16, 16) if name == "resnet18" else torch.randn(2, 3, 8, 8)
    plain, trained = method(name), method(name)
    choose_execution(
        trained, kernels="compiled", bf16=False, float32_stream=False, cuda_graph=False, device=torch.device("cpu")
    )
    assert compiled == {"resnet18": ["ResNet"] * 2, "vit_tiny_patch16_224": ["Block"] * 4}[name]
    pooled = [each.student.backbone(images).pooled for each in (plain, trained)]
    torch.testing.assert_close(pooled[1], pooled[0], rtol=1e-4, atol=1e-5)
    for each in pooled:
        each.square().sum().backward()
    gradients = [
        {key: value.grad for key, value in each.student.backbone.named_parameters() if value.grad is not None}
        for each in (plain, trained)
    ]
    assert gradients[1].keys() == gradients[0].keys()
    for key, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "variable", "told"),
    [
        (torch.device("cpu"), "CXX", r"a C\+\+ compiler.*g\+\+, clang\+\+"),
        (ON_GPU, "CC", "a C compiler.*gcc, clang, cc"),
    ],
)
def test_compiled_networks_need_a_compiler(
    device: torch.device, variable: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose() -> None:
        choose_execution(
            method("resnet18"), kernels="compiled", bf16=True, float32_stream=False, cuda_graph=True, device=device
        )

    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RecipeError, match=told):
        choose()
    monkeypatch.setenv(variable, "mine")
    with pytest.raises(RecipeError, match=rf"trainer\.kernels.*{variable}=mine"):
        choose()
    monkeypatch.setattr("shutil.which", lambda name: "/opt/mine" if name == "mine" else None)
    choose()
