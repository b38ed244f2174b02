import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from massl.config import MasslError
from massl.data.loading.loader import Loader
from massl.data.sources import open_source
from massl.data.sources.base import DataError, ImageSource
from massl.data.sources.torchvision_set import TorchvisionSource


class FewImages:
    """A set in the manner of torchvision: images, what comes with each, and whatever attributes a test gives it."""

    def __init__(self, images: list[Image.Image], items: list[object], /, **attributes: object) -> None:
        self.images, self.items = images, items
        self.num_reads = 0
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, object]:
        self.num_reads += 1
        return self.images[index], self.items[index]


def grey_images(count: int) -> list[Image.Image]:
    return [Image.new("L", (4, 3), 10 * index) for index in range(count)]


def labels(source: ImageSource) -> list[int | None]:
    return [source.label_of(index) for index in range(len(source))]


def test_a_set_on_disk_gives_images_labels_and_class_names(tmp_path: Path) -> None:
    for class_name, colour in (("cat", (1, 2, 3)), ("dog", (4, 5, 6))):
        folder = tmp_path / "country211" / "train" / class_name
        folder.mkdir(parents=True)
        Image.new("RGB", (5, 4), colour).save(folder / "x.png")
    source = open_source(f"torchvision:Country211?root={tmp_path}")
    assert source.class_names == ("cat", "dog")
    image = source.read(1)
    assert isinstance(image.data, np.ndarray)
    assert image.data.shape == (4, 5, 3)
    assert image.data[0, 0].tolist() == [4, 5, 6]
    assert (image.label, image.key) == (1, "Country211/1")


@pytest.mark.parametrize("attribute", ["targets", "_labels", "labels", "y", "samples", "_samples"])
def test_labels_come_from_the_list_of_the_set_without_reading_images(attribute: str) -> None:
    listed = [("a.jpg", 2), ("b.jpg", 0), ("c.jpg", 1)] if "samples" in attribute else [2, 0, 1]
    dataset = FewImages(grey_images(3), [2, 0, 1], **{attribute: listed})
    source = TorchvisionSource(dataset, name="few")
    num_reads = dataset.num_reads
    assert labels(source) == [2, 0, 1]
    assert dataset.num_reads == num_reads


def test_a_set_without_a_list_of_labels_is_asked_image_by_image() -> None:
    source = TorchvisionSource(FewImages(grey_images(5), [2, 0, 1, 1, 2]), name="few")
    assert labels(source) == [source.read(index).label for index in range(5)] == [2, 0, 1, 1, 2]
    assert source.class_names == ("0", "1", "2")


def test_boxes_and_negative_numbers_are_no_labels() -> None:
    boxes = TorchvisionSource(FewImages(grey_images(2), [{"box": 1}, {"box": 2}]), name="boxes")
    assert (boxes.class_names, labels(boxes)) == (None, [None, None])
    unlabelled = TorchvisionSource(FewImages(grey_images(2), [-1, -1], labels=np.array([-1, -1])), name="stl")
    assert (unlabelled.class_names, labels(unlabelled)) == (None, [None, None])


def test_synonyms_of_a_class_become_one_name() -> None:
    dataset = FewImages(grey_images(2), [0, 1], targets=[0, 1], classes=[("tench", "Tinca tinca"), ("goldfish",)])
    assert TorchvisionSource(dataset, name="imagenet").class_names == ("tench, Tinca tinca", "goldfish")


def test_an_array_of_the_set_is_used_only_if_it_holds_what_the_set_delivers() -> None:
    images = grey_images(3)
    same = np.stack([np.asarray(image) for image in images])
    assert TorchvisionSource(FewImages(images, [0, 0, 0], data=same), name="few").pixels is same
    assert TorchvisionSource(FewImages(images, [0, 0, 0], data=same[::-1].copy()), name="few").pixels is None
    assert TorchvisionSource(FewImages(images, [0, 0, 0], data=same[:2]), name="few").pixels is None
    assert TorchvisionSource(FewImages(images, [0, 0, 0]), name="few").pixels is None


@pytest.mark.parametrize("size", [(4, 5), (3, 3)])
def test_an_array_with_channels_first_is_shown_with_channels_last(size: tuple[int, int]) -> None:
    planes = np.random.default_rng(0).integers(0, 256, (3, 3, *size), dtype=np.uint8)  # as STL10 and SVHN keep them
    images = [Image.fromarray(image.transpose(1, 2, 0)) for image in planes]
    source = TorchvisionSource(FewImages(images, [0, 1, 0], labels=np.array([0, 1, 0]), data=planes), name="stl")
    assert source.pixels is not None
    assert all(np.array_equal(source.pixels[index], np.asarray(image)) for index, image in enumerate(images))
    with closing(
        Loader(source, order_at=lambda _: torch.tensor([2, 0]), seed=0, num_workers=0, max_side=8, on_skip=pytest.fail)
    ) as loader:
        assert torch.equal(loader.at(0).images.pixels.view(2, 3, *size), torch.from_numpy(planes[[2, 0]]))


def test_stl10_itself_is_held_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    stored = np.random.default_rng(0).integers(0, 256, (2, 3, 96, 96), dtype=np.uint8)  # planes, column by column
    stored.tofile(folder / "test_X.bin")
    np.array([3, 10], dtype=np.uint8).tofile(folder / "test_y.bin")
    (folder / "class_names.txt").write_text("\n".join("abcdefghij"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchvision.datasets.STL10._check_integrity", lambda self: True)
        source = open_source(f"torchvision:STL10?root={tmp_path}&split=test")
    assert source.pixels is not None
    assert np.array_equal(source.pixels, stored.transpose(0, 3, 2, 1))
    assert labels(source) == [2, 9]
    image = source.read(1)
    assert isinstance(image.data, np.ndarray)
    assert np.array_equal(image.data, source.pixels[1])


def test_the_fingerprint_of_a_set_in_memory_is_that_of_its_pixels_and_labels() -> None:
    images = grey_images(3)
    pixels = np.stack([np.asarray(image) for image in images])

    def fingerprint(pixels: np.ndarray, targets: list[int]) -> str:
        return TorchvisionSource(
            FewImages(images, list(targets), targets=targets, data=pixels), name="few"
        ).fingerprint()

    changed = pixels.copy()
    changed[2, 0, 0] += 1
    assert fingerprint(pixels, [0, 1, 2]) == fingerprint(pixels.copy(), [0, 1, 2])
    assert len({fingerprint(pixels, [0, 1, 2]), fingerprint(changed, [0, 1, 2]), fingerprint(pixels, [0, 2, 1])}) == 3


def test_the_fingerprint_of_a_set_on_disk_changes_with_its_files(tmp_path: Path) -> None:
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / "country211" / folder).mkdir(parents=True)
        Image.new("RGB", (5, 4)).save(tmp_path / "country211" / folder / "x.png")
    first = open_source(f"torchvision:Country211?root={tmp_path}").fingerprint()
    assert open_source(f"torchvision:Country211?root={tmp_path}").fingerprint() == first
    assert open_source(f"torchvision:Country211?root={tmp_path}&split=test").fingerprint() != first
    Image.new("RGB", (5, 4), (1, 2, 3)).save(tmp_path / "country211" / "train" / "dog" / "x.png")
    assert open_source(f"torchvision:Country211?root={tmp_path}").fingerprint() != first


def test_only_the_folder_of_the_set_itself_counts_for_its_fingerprint(tmp_path: Path) -> None:
    own, below = tmp_path / "own", tmp_path / "cifar"
    for folder in (own, below, tmp_path / "other"):
        folder.mkdir()
        (folder / "images").write_bytes(b"1")

    def fingerprint(**attributes: object) -> str:
        return TorchvisionSource(
            FewImages(grey_images(2), [0, 1], root=str(tmp_path), **attributes), name="few"
        ).fingerprint()

    kinds: list[dict[str, object]] = [{"_base_folder": own}, {"_data_path": str(own)}, {"base_folder": "cifar"}, {}]
    before = [fingerprint(**attributes) for attributes in kinds]
    (tmp_path / "other" / "images").write_bytes(b"22")
    assert [fingerprint(**attributes) == old for attributes, old in zip(kinds, before, strict=True)] == [
        True,
        True,
        True,
        False,
    ]
    (own / "images").write_bytes(b"22")
    (below / "images").write_bytes(b"22")
    assert not any(fingerprint(**attributes) == old for attributes, old in zip(kinds, before, strict=True))


def test_which_file_is_which_image_counts_for_the_fingerprint(tmp_path: Path) -> None:
    def fingerprint(files: list[str]) -> str:
        return TorchvisionSource(
            FewImages(grey_images(2), [0, 0], root=tmp_path, _image_files=files), name="few"
        ).fingerprint()

    assert fingerprint(["a", "b"]) == fingerprint(["a", "b"]) != fingerprint(["b", "a"])


def test_the_fingerprint_of_a_set_without_files_is_that_of_its_images() -> None:
    few = [
        TorchvisionSource(FewImages([Image.new("L", (2, 2), grey)], [0]), name="few").fingerprint()
        for grey in (1, 1, 2)
    ]
    assert few[0] == few[1] != few[2]


def test_parameters_are_read_as_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    class MNIST(FewImages):
        def __init__(self, root: str, train: bool = True, size: object = None) -> None:
            super().__init__(grey_images(2), [0, 1])
            given.extend((root, train, size))

    monkeypatch.setattr("torchvision.datasets.MNIST", MNIST)
    assert len(open_source("torchvision:MNIST?root=2021&train=false&size=[3, 6, 4]")) == 2
    assert given == ["2021", False, [3, 6, 4]]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("torchvision:CIFAR11", "Did you mean 'CIFAR10'"),
        ("torchvision:CIFAR10?trian=3", "Did you mean 'train'"),
        ("torchvision:CIFAR10?root=/nowhere", "'/nowhere'.*download=true"),
        ("torchvision:CIFAR10?root=2021", "below '2021'"),  # a name, though YAML would make it a number
        ("torchvision:ImageFolder?root=/nowhere", "give the folder itself.*--data /nowhere"),
        ("torchvision:RenderedSST2?root=/nowhere", "'/nowhere'; root=DIR chooses another folder"),
        ("torchvision:OxfordIIITPet?root=/nowhere&split=trainvall", "split"),
        ("torchvision:VisionDataset", "no set 'VisionDataset'"),
        ("torchvision:DatasetFolder?root=/nowhere", "no set 'DatasetFolder'"),
        ("torchvision:wrap_dataset_for_transforms_v2", "no set 'wrap_dataset"),
        ("torchvision:__class__", "no set '__class__'"),
        ("torchvision:", "no set ''"),
        ("torchvision:CIFAR10?transform=str", "no parameter 'transform'"),
        ("torchvision:FakeData?size=3", "no set 'FakeData'"),
        ("torchvision:LSUN?root=/nowhere&classes=val", "no set 'LSUN'.*folder"),
        ("torchvision:LSUNClass?root=/nowhere", "no set 'LSUNClass'"),
        ("torchvision:EuroSAT?root=/nowhere&loader=open", "no parameter 'loader'"),
        ("torchvision:EMNIST?root=/nowhere&split=[3, a, b]", "EMNIST.*cannot be opened"),
        ("torchvision:EMNIST?root=/nowhere&split={a: b}", "EMNIST.*cannot be opened"),
        ("torchvision:CIFAR10?download=maybe", "download=true"),
        ("torchvision:MNIST?root=a\0b", "zero byte"),
    ],
)
def test_what_cannot_be_opened_says_what_to_change(uri: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(uri)


def test_a_value_that_is_not_yaml_names_its_parameter() -> None:
    with pytest.raises(MasslError, match=r"train.*YAML"):
        open_source("torchvision:CIFAR10?train=[[")


def test_nothing_is_downloaded_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class CIFAR10:
        def __init__(self, root: str, download: bool = True) -> None:
            asked.append(download)
            raise RuntimeError("no files")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", CIFAR10)
    fetch = "torchvision:CIFAR10?download=true"
    for uri in ("torchvision:CIFAR10", fetch, f"joined:{fetch}|{fetch}"):
        with pytest.raises(DataError, match="no files"):
            open_source(uri, may_download=True)
    assert asked == [False, True, True]
    for uri in (fetch, f"joined:{fetch}|{fetch}"):  # of a recipe
        with pytest.raises(DataError, match=r"no files.*not followed.*as an option"):
            open_source(uri)
    assert asked == [False, True, True, False, False]


def test_opening_a_set_reads_no_pickle_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LSUN of torchvision unpickles _cache_... in the working folder."""

    class Environment:
        def begin(self, write: bool) -> "Environment":
            return self

        def __enter__(self) -> "Environment":
            return self

        def __exit__(self, *_: object) -> None: ...

        def stat(self) -> dict[str, int]:
            return {"entries": 1}

    (tmp_path / "_cache_dbbedroomtrainlmdb").write_bytes(b"cos\nmkdir\n(S'owned'\ntR.")
    monkeypatch.chdir(tmp_path)
    fake = SimpleNamespace(open=lambda *_, **__: Environment())
    monkeypatch.setitem(sys.modules, "lmdb", fake)  # type: ignore[arg-type]
    with pytest.raises(MasslError):
        open_source("torchvision:LSUN?root=db&classes=[bedroom_train]")
    assert not (tmp_path / "owned").exists()


def test_an_image_that_a_set_cannot_decode_is_an_unreadable_file() -> None:
    class Broken(FewImages):
        def __getitem__(self, index: int) -> tuple[Image.Image, object]:
            if index == 1:
                raise SyntaxError("broken PNG file")
            return super().__getitem__(index)

    source = TorchvisionSource(Broken(grey_images(2), [0, 1], labels=[0, 1]), name="broken")
    with pytest.raises(OSError, match="broken PNG"):
        source.read(1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_scipy(root: str) -> None:
        raise ModuleNotFoundError("No module named 'scipy'")

    monkeypatch.setattr(
        "torchvision.datasets.SVHN", type("SVHN", (), {"__init__": lambda self, root: needs_scipy(root)})
    )
    with pytest.raises(DataError, match="scipy"):
        open_source("torchvision:SVHN")


def test_a_set_that_delivers_no_images_is_refused() -> None:
    with pytest.raises(DataError, match="delivers no single images"):
        TorchvisionSource(FewImages([], []), name="empty")


def test_postscript_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\n: > {tmp_path / 'started'}\n")
    program.chmod(0o755)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # not looked for yet
    folder = tmp_path / "eurosat" / "2750" / "a"
    folder.mkdir(parents=True)
    (folder / "0.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(DataError):
        open_source(f"torchvision:EuroSAT?root={tmp_path}")
    assert not (tmp_path / "started").exists()
