"""Images with several labels (COMET trees, supplement S1.1): MultiMNIST, MultiFashionMNIST and CelebA.

No recipe trains on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels.papers.data.files import Tensors, as_bytes, import_optional, read
from moe_kernels.papers.data.images import LARGEST, mnist_bytes

SHIFT = 8  # pixels from one image's corner to the other's in MultiMNIST, both across and down
SEED = 0  # draws the pairs of images and the split of MultiMNIST
# The paper does not say to what size it scales CelebA's images of 178 x 218 pixels. At 112 x 112, six of the paper's
# experts (convolutions without padding) and a gate on the pixels take 22.03 MFLOPs an image; Table 6 has 22.02.
CELEBA_SIZE = 112


@dataclass(frozen=True)
class TaskImages(Tensors):
    """Each part is (x, y): images uint8 (n, C * H * W), labels int64 (n, tasks). image_shape is (C, H, W)."""

    name: str
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    tasks: tuple[str, ...]
    classes: int
    image_shape: tuple[int, int, int]

    def __str__(self) -> str:
        counts = f"{len(self.train[1])} training, {len(self.valid[1])} validation and {len(self.test[1])} test images"
        return f"{self.name}: {counts} {self.image_shape}, {len(self.tasks)} tasks of {self.classes} classes"


def multi_mnist(folder: str | Path, seed: int = SEED) -> TaskImages:
    """MultiMNIST from the four IDX files of MNIST in `folder`, or MultiFashionMNIST from those of Fashion-MNIST.

    An overlaid image is 8 pixels higher and wider than its two images. Every image is used twice at the top left, each
    time with a random other image of the same part at the bottom right. Pixels are added, up to 255. Five sixths of the
    training images train, the others validate. MNIST gives 100,000 overlaid images to train, 20,000 to validate and
    20,000 to test.

    Tasks: the label of the image at the top left, and that of the image at the bottom right.
    """
    train_x, train_y, *test = mnist_bytes(Path(folder))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train_y), generator=generator)
    count = len(order) * 5 // 6
    parts = [(train_x[rows], train_y[rows]) for rows in (order[:count], order[count:])]
    if min(len(y) for _, y in (*parts, test)) < 2:
        sizes = ", ".join(str(len(y)) for _, y in (*parts, test))
        raise ValueError(
            f"data: {folder}: expected 2 or more images in every part of MultiMNIST (train, valid, test), got {sizes}"
        )
    train, valid, found = (_overlaid(x, y, generator) for x, y in (*parts, test))
    height, width = (size + SHIFT for size in train_x.shape[1:])
    return TaskImages("multimnist", train, valid, found, ("top left", "bottom right"), 10, (1, height, width))


def _overlaid(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    n, height, width = x.shape
    first = torch.arange(n).repeat(2)
    second = (first + torch.randint(1, n, (2 * n,), generator=generator)) % n
    canvas = torch.zeros(2 * n, height + SHIFT, width + SHIFT, dtype=torch.int16)
    canvas[:, :height, :width] = x[first]
    canvas[:, SHIFT:, SHIFT:] += x[second]
    return canvas.clamp_(max=255).byte().flatten(1), torch.stack([y[first], y[second]], 1).long()


def celeba(folder: str | Path, size: int = CELEBA_SIZE) -> TaskImages:
    """CelebA with its 40 attributes: list_attr_celeba.txt, list_eval_partition.txt and img_align_celeba/*.jpg.

    Images are scaled to size x size; at 112 the whole set has 7.6 GB of pixels. A label is 1 if the image has the
    attribute, else 0. The paper uses ten attributes and does not name them: choose columns of y by `tasks`.

    Raises:
        ValueError: a file is missing or damaged, the two lists name different images, or a part has no images.
        ImportError: Pillow, which reads the JPEGs, is missing: pip install moe_kernels[bench].
    """
    place = Path(folder)
    import_optional("PIL.Image", "Pillow")  # raises before the lists are read
    _, header, *rows = _lines(place / "list_attr_celeba.txt")
    partition = _lines(place / "list_eval_partition.txt")
    if len(rows) != len(partition):
        raise ValueError(f"data: {place}: expected as many images in both lists; got {len(rows)}, {len(partition)}")
    tasks, parts = tuple(header), dict[str, list[tuple[Path, list[int]]]]({"0": [], "1": [], "2": []})
    for (name, *values), entry in zip(rows, partition, strict=True):
        if entry[0] != name or len(entry) != 2 or entry[1] not in parts or Path(name).name != name:
            raise ValueError(
                f"data: {place}: expected image {name} and a part from 0 to 2, got {' '.join(entry)[:60]}"
                + "; a name of an image must not name a folder" * (Path(name).name != name)
            )
        if len(values) != len(tasks) or not {"1", "-1"}.issuperset(values):
            raise ValueError(
                f"data: {place}: expected {len(tasks)} attributes of {name}, each 1 or -1; "
                f"got {len(values)}: {' '.join(values)[:60]}"
            )
        parts[entry[1]].append((place / "img_align_celeba" / name, [int(value == "1") for value in values]))
    if not all(parts.values()):
        empty = ", ".join(part for part, images in parts.items() if not images)
        raise ValueError(
            f"data: {place}: expected images of all three parts in list_eval_partition.txt; none of {empty}"
        )
    train, valid, test = (_pictures(part, size) for part in parts.values())
    return TaskImages("celeba", train, valid, test, tasks, 2, (3, size, size))


def _lines(file: Path) -> list[list[str]]:
    if not file.is_file():
        raise ValueError(
            "data: expected CelebA as list_attr_celeba.txt, list_eval_partition.txt and img_align_celeba; "
            f"there is no {file}"
        )
    lines = [line.split() for line in read(file).decode("utf-8", "replace").splitlines()]
    if len(lines) < 3 or not all(lines):
        raise ValueError(
            f"data: {file}: expected a line for each image, at least three and none empty; "
            f"got {len(lines)} lines, {sum(not line for line in lines)} of them empty"
        )
    return lines


def _pictures(part: list[tuple[Path, list[int]]], size: int) -> tuple[Tensor, Tensor]:
    image = import_optional("PIL.Image", "Pillow")
    x = torch.empty(len(part), size, size, 3, dtype=torch.uint8)
    for i, (file, _) in enumerate(part):
        try:
            with image.open(file, formats=("JPEG",)) as picture:
                if max(picture.size) > LARGEST:
                    raise ValueError(f"it has {picture.size} pixels")
                scaled = picture.convert("RGB").resize((size, size))
        except Exception as error:  # Pillow raises many kinds of errors for damaged pictures
            raise ValueError(f"data: {file} is no JPEG of at most {LARGEST} pixels a side: {error}") from error
        x[i] = as_bytes(scaled.tobytes()).view(size, size, 3)
    return x.movedim(3, 1).flatten(1), torch.tensor([values for _, values in part])
