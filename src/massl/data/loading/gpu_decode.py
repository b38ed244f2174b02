"""JPEG decoding on an NVIDIA GPU (nvJPEG, through torchvision), for whole batches."""

import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from massl.config import RecipeError
from massl.data.loading.decode import as_tensor, is_plain_jpeg

# whole files as uint8 [num_bytes] on the CPU -> uint8 [3, H, W] each; RuntimeError: not all of them can be decoded
JpegDecoder = Callable[[list[Tensor]], list[Tensor]]
_RGB_MODE = 3  # torchvision's ImageReadMode.RGB
_END_OF_IMAGE = b"\xff\xd9"


def jpeg_decoder(decoder: Literal["cpu", "gpu"], device: torch.device) -> JpegDecoder | None:
    """The batch decoder for `data.decoder`; None: the loader's threads decode on the CPU."""
    if decoder == "cpu":
        return None
    if device.type != "cuda":
        raise RecipeError(
            f"data.decoder is gpu, but the device is {device.type}; choose data.decoder cpu, or trainer.device cuda"
        )
    return _nvjpeg(device)


@cache
def _nvjpeg(device: torch.device) -> JpegDecoder:
    def decode(files: list[Tensor]) -> list[Tensor]:
        # The operator writes from its own stream without waiting for the current one (pytorch/vision pull request
        # 9606). It could overwrite memory that this thread freed but the current stream still uses, so wait for that.
        torch.cuda.current_stream(device).synchronize()
        decoded: list[Tensor] = torch.ops.image.decode_jpegs_cuda(files, _RGB_MODE, device)
        return decoded

    trial = io.BytesIO()
    Image.new("RGB", (64, 64)).save(trial, "JPEG")
    try:
        import torchvision.io  # noqa: F401  # registers the operator

        decode([as_tensor(trial.getvalue())])
    except (ImportError, OSError, AttributeError, RuntimeError) as error:  # now, not as a thousand refused images
        reason = str(error).partition("\n")[0]
        raise RecipeError(
            f"data.decoder is gpu, but JPEGs cannot be decoded on {device} ({reason}); choose data.decoder cpu"
        ) from None
    return decode


def suits_gpu(data: bytes, *, max_side: int) -> bool:
    """Whether a file is left to the batch decoder.

    Progressive files are not: nvJPEG decodes them one after another on a single core. Grey files are not: with sampling
    factors of 2, which mean nothing for one component, nvJPEG's pixels are far from the CPU's. Files without an end
    marker are not: they may be truncated, and nvJPEG silently fills the missing pixels with grey.
    """
    return data.endswith(_END_OF_IMAGE) and is_plain_jpeg(data, max_side=max_side, for_gpu=True)


def decode_or_none(decode_jpegs: JpegDecoder, files: Sequence[Tensor]) -> list[Tensor | None]:
    """All files decoded, None for refused ones. One refused file fails the batch, so each is then tried alone."""
    try:
        return list(decode_jpegs(list(files)))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise
        return [None] if len(files) == 1 else [decode_or_none(decode_jpegs, [file])[0] for file in files]
