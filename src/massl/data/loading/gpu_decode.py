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

# Whole files as uint8 [num_bytes] on the CPU -> uint8 [3, H, W] each; a RuntimeError says that not all of them can be
# decoded.
JpegDecoder = Callable[[list[Tensor]], list[Tensor]]
_RGB_MODE = 3  # torchvision's ImageReadMode.RGB
_END_OF_IMAGE = b"\xff\xd9"


def jpeg_decoder(decoder: Literal["cpu", "gpu"], device: torch.device) -> JpegDecoder | None:
    """The batch decoder that `data.decoder` asks for; None: the loader's threads decode on the CPU."""
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
        # The operator writes from a stream of its own without waiting for the one that is current here (pytorch/vision
        # pull request 9606). Memory that this thread has freed but that the current stream still uses could be
        # overwritten, so nothing may be under way on it.
        torch.cuda.current_stream(device).synchronize()
        decoded: list[Tensor] = torch.ops.image.decode_jpegs_cuda(files, _RGB_MODE, device)
        return decoded

    trial = io.BytesIO()
    Image.new("RGB", (64, 64)).save(trial, "JPEG")
    try:
        import torchvision.io  # noqa: F401  # registers the operator

        decode([as_tensor(trial.getvalue())])
    except (
        ImportError,
        OSError,
        AttributeError,
        RuntimeError,
    ) as error:  # at the start, not as a thousand refused images
        reason = str(error).partition("\n")[0]
        raise RecipeError(
            f"data.decoder is gpu, but JPEGs cannot be decoded on {device} ({reason}); choose data.decoder cpu"
        ) from None
    return decode


def suits_gpu(data: bytes, *, max_side: int) -> bool:
    """Whether a file is left to the batch decoder.

    Progressive files are not: nvJPEG decodes them one after another on a single core, while the loader has many. Grey
    files are not: with sampling factors of 2, which mean nothing for a single component, nvJPEG's pixels are far from
    the CPU's. A file that does not end as a JPEG does may be truncated, which nvJPEG does not say: it shows grey where
    pixels are missing.
    """
    return data.endswith(_END_OF_IMAGE) and is_plain_jpeg(data, max_side=max_side, for_gpu=True)


def decode_what_can_be(decode_jpegs: JpegDecoder, files: Sequence[Tensor]) -> list[Tensor | None]:
    """All files decoded; None for those that the decoder refuses. One of them fails its whole batch, so all are then
    tried alone.
    """
    try:
        return list(decode_jpegs(list(files)))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise
        return [None] if len(files) == 1 else [decode_what_can_be(decode_jpegs, [file])[0] for file in files]
