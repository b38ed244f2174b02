import timm
from timm.layers.norm_act import BatchNormAct2d, SyncBatchNormAct
from torch import nn

from massl.distributed import synchronise_batch_norms


def test_synchronised_batch_norms_keep_their_activations() -> None:
    model = timm.create_model("efficientnet_b0", num_classes=0)
    before = [type(norm.act) for norm in model.modules() if isinstance(norm, BatchNormAct2d)]
    synchronised = synchronise_batch_norms(nn.ModuleDict({"model": model, "head": nn.BatchNorm1d(4)}))
    after = [norm for norm in synchronised.modules() if isinstance(norm, nn.SyncBatchNorm)]
    assert [type(norm.act) for norm in after if isinstance(norm, SyncBatchNormAct)] == before
    assert nn.SiLU in before
    assert len(after) == len(before) + 1  # plain ones too
