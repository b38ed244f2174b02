import pytest
import torch

from massl.data.loading.packing import pack, pack_equal, side_stream
from massl.ops.image_ops import RaggedImages


def images() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randint(0, 256, (3, height, width), dtype=torch.uint8) for height, width in ((4, 7), (1, 1), (9, 3))]


def test_packing_equals_the_plain_definition_whatever_the_memory_of_an_image() -> None:
    plain = images()
    interleaved = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in plain]
    expected = RaggedImages.from_list(plain)
    for given in (plain, interleaved):
        packed = pack(given, device=None, pin=False)
        assert torch.equal(packed.pixels, expected.pixels)
        assert torch.equal(packed.offsets, expected.offsets)
        assert torch.equal(packed.sizes, expected.sizes)
        assert packed.sizes.dtype == packed.offsets.dtype == torch.int64


@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 5, 6, 3)])
def test_an_array_is_packed_as_its_images_are(shape: tuple[int, ...]) -> None:
    array = torch.randint(0, 256, shape, dtype=torch.uint8)
    one_by_one = [(image[..., None].expand(5, 6, 3) if image.ndim == 2 else image).permute(2, 0, 1) for image in array]
    packed, expected = pack_equal(array.numpy(), device=None, pin=False), pack(one_by_one, device=None, pin=False)
    assert torch.equal(packed.pixels, expected.pixels)
    assert torch.equal(packed.offsets, expected.offsets)
    assert torch.equal(packed.sizes, expected.sizes)


def test_without_a_gpu_there_is_no_stream_to_wait_for() -> None:
    for device in (None, torch.device("cpu")):
        with side_stream(device):
            pass


@pytest.mark.gpu
def test_images_of_the_cpu_and_the_gpu_share_a_batch() -> None:
    device = torch.device("cuda", 0)
    plain = images()
    mixed = [plain[0], plain[1].to(device), plain[2]]
    with side_stream(device):
        packed = pack(mixed, device=device, pin=True)
    assert packed.pixels.is_cuda
    assert torch.equal(packed.pixels.cpu(), RaggedImages.from_list(plain).pixels)
