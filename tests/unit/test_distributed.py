from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch.distributed as dist
from timm.layers.norm_act import BatchNormAct2d, SyncBatchNormAct
from torch import nn

import massl
from massl import distributed
from massl.distributed import synchronise_batch_norms


def test_synchronised_batch_norms_keep_their_activations() -> None:
    model = timm.create_model("efficientnet_b0", num_classes=0)
    before = [type(norm.act) for norm in model.modules() if isinstance(norm, BatchNormAct2d)]
    synchronised = synchronise_batch_norms(nn.ModuleDict({"model": model, "head": nn.BatchNorm1d(4)}))
    after = [norm for norm in synchronised.modules() if isinstance(norm, nn.SyncBatchNorm)]
    assert [type(norm.act) for norm in after if isinstance(norm, SyncBatchNormAct)] == before
    assert nn.SiLU in before
    assert len(after) == len(before) + 1  # plain ones too


@pytest.fixture
def group_of_the_user() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_process_group_of_someone_else_is_used_and_left_alone(
    group_of_the_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    distributed.start("cpu")
    distributed.stop()
    assert dist.is_initialized()


def test_a_process_group_of_our_own_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def init_alone(backend: str, **options: object) -> None:
        init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    init_process_group = dist.init_process_group
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", init_alone)
    distributed.start("cpu")
    assert dist.is_initialized()
    distributed.stop()
    assert not dist.is_initialized()
    distributed.stop()  # a second time: nothing to do


def test_pretrain_and_embed_leave_a_process_group_of_the_user_alone(group_of_the_user: None, tmp_path: Path) -> None:
    overrides = {"trainer": {"max_steps": 1, "batch_size": 8, "device": "cpu"}, "probes.every_epochs": 0}
    result = massl.pretrain(recipe="demo-vit", data="demo:test", output=tmp_path / "run", overrides=overrides)
    assert result.finished
    assert dist.is_initialized()
    images = tmp_path / "images.npz"
    np.savez(images, images=np.zeros((2, 28, 28), np.uint8))
    massl.embed(result.folder, data=images, output=tmp_path / "features.npz", overrides={"device": "cpu"})
    assert dist.is_initialized()
