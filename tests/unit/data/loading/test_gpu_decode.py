"""The batch decoder's part of loading, with a stand-in for the GPU; what only a GPU can show is at the end."""

import io
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from massl.config import RecipeError
from massl.data.loading.cache import ImageCache
from massl.data.loading.decode import UnreadableImage, decode
from massl.data.loading.gpu_decode import jpeg_decoder, suits_gpu
from massl.data.loading.loader import ImageBatch, Loader
from massl.data.sources.base import EncodedImage


def picture(index: int) -> Image.Image:
    """A smooth image of its own size and colours."""
    small = np.random.default_rng(index).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((64 + 3 * index, 48 + 5 * index), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG" if options.pop("png", False) else "JPEG", **options)
    return buffer.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def broken(data: bytes) -> bytes:
    """Its header is fine and it ends as a JPEG does, but its Huffman tables are impossible."""
    start = data.index(b"\xff\xc4")
    return data[: start + 5] + b"\xff" * 16 + data[start + 21 :]


REFUSED = b"refused by the batch decoder"
NUM_PLAIN = 8
FILES = [jpeg(picture(index)) for index in range(NUM_PLAIN)]
UNSUITABLE = {
    "progressive": jpeg(picture(8), progressive=True),
    "turned": jpeg(picture(9), exif=turned()),
    "print colours": jpeg(picture(10).convert("CMYK")),
    "PNG": jpeg(picture(11), png=True),
    "large": jpeg(picture(12).resize((300, 50))),
    "trailing bytes": jpeg(picture(13)) + b"more",
}
FILES += UNSUITABLE.values()


class Files:
    name = "files"
    pixels = None
    class_names: tuple[str, ...] | None = None

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> EncodedImage:
        return EncodedImage(data=self.files[index], label=index, key=self.key_of(index))

    def label_of(self, index: int) -> int | None:
        return index

    def key_of(self, index: int) -> str:
        return f"file-{index}"


class FakeDecoder:
    """Decodes to the negative, so that the decoder can be told from the pixels."""

    def __init__(self) -> None:
        self.num_files: list[int] = []

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        self.num_files.append(len(files))
        contents = [file.numpy().tobytes() for file in files]
        if any(REFUSED in content for content in contents):
            raise RuntimeError("Failed to decode batch: 4")
        return [255 - on_cpu(content) for content in contents]


def on_cpu(data: bytes) -> Tensor:
    return decode(EncodedImage(data=data, label=None, key=""), max_side=200)


def load(
    files: list[bytes],
    decoder: Callable[[list[Tensor]], list[Tensor]] | None,
    *,
    num_steps: int = 1,
    num_workers: int = 2,
    cache: ImageCache | None = None,
    on_skip: Callable[[str], None] = print,
    device: torch.device | None = None,
) -> list[ImageBatch]:
    loader = Loader(
        Files(files),
        order_at=lambda step: torch.arange(len(files)).roll(step),
        seed=0,
        num_workers=num_workers,
        max_side=200,
        batch_decoder=decoder,
        cache=cache,
        device=device,
        on_skip=on_skip,
    )
    with closing(loader):
        return [loader.at(step) for step in range(num_steps)]


def image_of(batch: ImageBatch, position: int) -> Tensor:
    start, (height, width) = int(batch.images.offsets[position]), batch.images.sizes[position].tolist()
    return batch.images.pixels[start : start + 3 * height * width].view(3, height, width)


@pytest.mark.parametrize("kind", UNSUITABLE)
def test_what_decoders_may_see_differently_is_left_to_the_cpu(kind: str) -> None:
    assert not suits_gpu(UNSUITABLE[kind], max_side=200)


def test_plain_colour_files_suit_the_gpu_and_grey_or_truncated_ones_do_not() -> None:
    assert not suits_gpu(jpeg(picture(0).convert("L")), max_side=200)
    for data in (jpeg(picture(0)), jpeg(picture(0), subsampling=0), jpeg(picture(0), exif=Image.Exif())):
        assert suits_gpu(data, max_side=200)
        assert not any(suits_gpu(data[:length], max_side=200) for length in range(0, len(data), 17))


@pytest.mark.parametrize("num_workers", [0, 3])
def test_plain_files_go_to_the_batch_decoder_together_and_the_rest_to_the_cpu(num_workers: int) -> None:
    decoder = FakeDecoder()
    (batch,) = load(FILES, decoder, num_workers=num_workers)
    assert decoder.num_files[0] == NUM_PLAIN
    for position, data in enumerate(FILES):
        expected = 255 - on_cpu(data) if position < NUM_PLAIN else on_cpu(data)
        assert torch.equal(image_of(batch, position), expected)
    assert batch.labels.tolist() == list(range(len(FILES)))


def test_a_refused_file_comes_from_the_cpu_and_the_others_of_its_batch_do_not() -> None:
    refused = jpeg(picture(2), comment=REFUSED)
    assert suits_gpu(refused, max_side=200)
    decoder, messages = FakeDecoder(), list[str]()
    for batch in load([*FILES[:2], refused, *FILES[3:5]], decoder, num_steps=3, num_workers=0, on_skip=messages.append):
        for position, index in enumerate(batch.indices.tolist()):
            expected = on_cpu(refused) if index == 2 else 255 - on_cpu(FILES[index])
            assert torch.equal(image_of(batch, position), expected)
    assert messages == []
    # the whole batch, each alone, and from then on without the refused one
    assert decoder.num_files == [5, 1, 1, 1, 1, 1, 4, 4]


def test_a_refused_file_that_no_decoder_reads_is_named_and_replaced_as_ever() -> None:
    bad = broken(jpeg(picture(1), comment=REFUSED))
    assert suits_gpu(bad, max_side=200)
    with pytest.raises(UnreadableImage):
        on_cpu(bad)
    files = [jpeg(picture(index % 8)) for index in range(40)]
    files[7] = bad
    messages: list[str] = []
    with_decoder = load(files, FakeDecoder(), num_steps=3, on_skip=messages.append)
    without = load(files, None, num_steps=3)
    assert len(messages) == 1
    assert messages[0].startswith("file-7: ")
    for batch, expected in zip(with_decoder, without, strict=True):
        assert torch.equal(batch.labels, expected.labels)  # the same replacement
        # and, in every epoch, from the batch decoder
        assert torch.equal(batch.images.pixels, 255 - expected.images.pixels)


@pytest.mark.parametrize("max_gib", [1.0, 60_000 / 2**30])
def test_batches_of_the_batch_decoder_are_the_same_with_a_cache(max_gib: float) -> None:
    files = [*FILES, jpeg(picture(3), comment=REFUSED)]
    expected = load(files, FakeDecoder(), num_steps=3, num_workers=0)
    decoder = FakeDecoder()
    for batch, wanted in zip(
        load(files, decoder, num_steps=3, num_workers=0, cache=ImageCache(max_gib=max_gib)), expected, strict=True
    ):
        assert torch.equal(batch.images.pixels, wanted.images.pixels)
        assert torch.equal(batch.labels, wanted.labels)
    if max_gib == 1.0:
        assert sum(decoder.num_files) == 2 * (NUM_PLAIN + 1)  # the first epoch's failure and single tries; then nothing


def test_lack_of_memory_is_no_refusal() -> None:
    def exhausted(files: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("Error while decoding JPEG images: CUDA out of memory. Tried to allocate")

    with pytest.raises(RuntimeError, match="out of memory"):
        load(FILES, exhausted)


def test_a_gpu_decoder_without_a_gpu_says_what_to_choose() -> None:
    assert jpeg_decoder("cpu", torch.device("cpu")) is None
    with pytest.raises(RecipeError, match=r"data.decoder cpu"):
        jpeg_decoder("gpu", torch.device("cpu"))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("subsampling", [0, 2])
def test_nvjpeg_agrees_with_the_cpu_within_a_few_grey_levels(subsampling: int) -> None:
    decode_jpegs = jpeg_decoder("gpu", torch.device("cuda", 0))
    assert decode_jpegs is not None
    files = [jpeg(picture(index), subsampling=subsampling, quality=90) for index in range(12)]
    for data, decoded in zip(
        files, decode_jpegs([torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]), strict=True
    ):
        expected = on_cpu(data).int()
        assert decoded.is_cuda
        assert decoded.shape == expected.shape
        difference = (decoded.cpu().int() - expected).abs()
        # Halved chroma: nvJPEG repeats it where the CPU interpolates; in these colourful images that is 3.6 levels on
        # average, 20 at most.
        assert difference.float().mean() < (5 if subsampling else 1.5)
        assert difference.max() <= (32 if subsampling else 6)


@pytest.mark.gpu
def test_batches_delivered_to_the_gpu_hold_the_bytes_of_the_cpu() -> None:
    files = [*FILES, *[jpeg(picture(index)) for index in range(40)]]
    for there, here in zip(
        load(files, None, num_steps=20, device=torch.device("cuda", 0)),
        load(files, None, num_steps=20, device=torch.device("cpu")),
        strict=True,
    ):
        assert there.images.pixels.is_cuda
        assert {
            tensor.device.type for tensor in (there.images.sizes, there.images.offsets, there.indices, there.labels)
        } == {"cpu"}
        assert torch.equal(there.images.pixels.cpu(), here.images.pixels)
        assert torch.equal(there.labels, here.labels)


@pytest.mark.gpu
def test_mixed_batches_of_both_decoders_are_repeatable_on_the_gpu() -> None:
    device = torch.device("cuda", 0)
    decoder = jpeg_decoder("gpu", device)
    batches = [load(FILES, decoder, num_steps=10, num_workers=num_workers, device=device) for num_workers in (0, 4)]
    for step, (first, second) in enumerate(zip(*batches, strict=True)):
        assert torch.equal(first.images.pixels, second.images.pixels)
        for position, index in enumerate(first.indices.tolist()):
            difference = (image_of(first, position).cpu().int() - on_cpu(FILES[index]).int()).abs().float().mean()
            assert difference < 5 if index < NUM_PLAIN else difference == 0, (step, index)


@pytest.mark.gpu
def test_pixels_outlive_their_batch_until_the_training_stream_has_read_them() -> None:
    """Kernels queued behind a slow one read the pixels of batches that were freed long before."""
    device = torch.device("cuda", 0)
    files = [jpeg(picture(index % 16)) for index in range(64)]
    expected = load(files, None)[0].images.pixels.long().sum()
    loader = Loader(
        Files(files),
        order_at=lambda step: torch.arange(64).roll(step),
        seed=0,
        num_workers=4,
        max_side=10_000,
        batch_decoder=jpeg_decoder("gpu", device),
        device=device,
        on_skip=print,
    )
    sums = []
    with closing(loader):
        reference = loader.at(0).images.pixels.long().sum()
        for step in range(30):
            batch = loader.at(step).to(device)
            torch.cuda._sleep(20_000_000)
            sums.append(batch.images.pixels.long().sum())
            del batch
    assert torch.equal(torch.stack(sums), reference.expand(30))
    assert abs(int(reference) - int(expected)) < 0.02 * int(expected)


@pytest.mark.gpu
def test_a_truncated_file_is_refused_by_nvjpeg_or_shown_in_full_size() -> None:
    """Why `suits_gpu` looks at the end of a file: nvJPEG itself need not complain."""
    decode_jpegs = jpeg_decoder("gpu", torch.device("cuda", 0))
    assert decode_jpegs is not None
    data = jpeg(picture(3))
    try:
        (decoded,) = decode_jpegs([torch.frombuffer(bytearray(data[: len(data) // 2]), dtype=torch.uint8)])
    except RuntimeError:
        return
    assert decoded.shape == on_cpu(data).shape
