"""Hedged instance embeddings of N-digit MNIST, beside the tables of Oh et al. (ICLR 2019).

Their encoders with their network: a point, one Gaussian (MoG-1) and two (MoG-2) in D dimensions,
trained on the 70% of the numbers that their released lists name, with a fifth of the digits
corrupt (hit by a black square of a side that is uniform from none to the whole), one seed each.
A step takes 64 pairs of images that match; each of the 128 images is paired with its match and 8
random others, and all encoders of a process train side by side: on a GPU, in one CUDA graph. They
took 500,000 steps of 128 images; `--steps` or `--seconds` say how many are taken here.

`--parts`: "tables" 1, 2 and 4 (N = 2 with D = 2, 3; N = 3 with D = 2, 3, 4); "beta", their table 5
and figure 12, by the weight of the KL divergence; "soft", figure 6, the soft contrastive loss and
the vanilla one by its margin M; "order", figures 10 and 11 in one dimension, how many of
99 neighbouring numbers, by their mean positions, have a digit in common; "settings", MoG-1 of
N = 2, D = 2 trained in other ways; "bounds", the share of numbers whose digits a classifier reads.

Tested on the numbers of training made of MNIST's test digits, by several readings of "corrupt",
named "queries in references": all digits corrupt, a fifth of them, or those of one side only.
Average precision (AP) of 10,000 pairs of a query and a reference, half of which match; accuracy of
the most frequent label of 5 neighbours, by the probability of a match among the 100 nearest means,
without the query itself and its twin; and Kendall's tau of both over 20 bins of the uncertainty.

`--plots` draws figures 3, 4, 7 and 8, and 10 and 11. The encoders of all parts but the tables are
trained equally long, to be compared. Trained ones in `--runs`, and what was measured of them, are
used again. Needs no Ray, MLflow or FAISS. RCIR_DATA names the data.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from common import parser, report, sized, spread

from rcir.data import DataConfig, ImageSet, data_root
from rcir.data.augmentation import occlude
from rcir.data.datasets.handwriting import join_tiles, list_released_classes
from rcir.data.datasets.small_images import read_mnist
from rcir.embedding import Embedding
from rcir.encoders import EmbeddedTuples, Encoder, EncoderConfig, build_encoder
from rcir.losses import PointLossOptions, point_tuple_loss
from rcir.losses.hedged import HedgedOptions

Set: TypeAlias = tuple[Embedding, NDArray[np.int64]]  # embedded images, and their numbers
SIDE, MIN_PER_CLASS = 28, 100
BINS = 20  # of uncertainties
COLUMNS = ("AP", "5-NN", "tau AP", "tau 5-NN")
NAMES = ("point", "MoG-1", "MoG-2")
# Of point, MoG-1 and MoG-2: AP, 5-NN and the two correlations, clean and corrupt.
PUBLISHED = {
    (2, 2, "clean"): (".987 .871 - -", ".989 .879 .74 .71", ".990 .888 .43 .57"),
    (2, 2, "corrupt"): (".880 .583 - -", ".907 .760 .81 .47", ".912 .757 .79 .43"),
    (2, 3, "clean"): (".996 .942 - -", ".996 .953 .68 .72", ".996 .939 .48 .47"),
    (2, 3, "corrupt"): (".913 .874 - -", ".926 .909 .86 .55", ".932 .885 .87 .52"),
    (3, 2, "clean"): (".978 .554 - -", ".981 .591 .63 .76", ".976 .540 .28 .29"),
    (3, 2, "corrupt"): (".886 .274 - -", ".899 .350 .82 .49", ".904 .351 .76 .50"),
    (3, 3, "clean"): (".987 .795 - -", ".989 .770 .51 .74", ".991 .766 .39 .54"),
    (3, 3, "corrupt"): (".901 .522 - -", ".922 .555 .85 .67", ".925 .598 .79 .34"),
    (3, 4, "clean"): (".996 .914 - -", ".996 .917 .35 .31", ".995 .922 .33 .32"),
    (3, 4, "corrupt"): (".942 .803 - -", ".944 .816 .79 .42", ".948 .809 .68 .35"),
}
# Readings of "corrupt": the images that are asked about, and those that are searched.
READINGS = (
    *("clean in clean", "corrupt in corrupt", "clean in corrupt", "corrupt in clean"),
    *("fifth in fifth", "corrupt in train", "unseen in unseen"),
)
SHARES = {"clean": 0.0, "corrupt": 1.0, "fifth": 0.2}  # of the digits of a test set that are hit
BATCH, TRAIN, TEST = sized((128, 100_000, 10_000), (32, 700, 700))
NEGATIVES, POOL = 8, 16  # others of an image, and the nearest of which near ones are drawn
CANDIDATES = sized(100, 10)


@dataclass(frozen=True)
class Case:
    """One training."""

    digits: int  # N
    dim: int  # D
    components: int  # Gaussians, 0 for a point
    kl: float = 1e-4  # weight of the KL divergence
    margin: float | None = None  # of the vanilla contrastive loss of a point
    near: int = 0  # of the 8 others of an image, drawn from its 16 nearest
    occlusion: float = 0.2  # share of the training digits that are hit
    backbone: str = "lenet"
    batch: int = BATCH

    @property
    def name(self) -> str:
        """Of the file of weights, and the beginning of the names of figures."""
        name = f"N{self.digits} D{self.dim} {NAMES[self.components]}"
        for field, value in vars(self).items():
            if field not in ("digits", "dim", "components") and value != getattr(Case, field):
                name += f" {field} {value}"
        return name

    def encoder(self) -> Encoder:
        """The untrained encoder."""
        options = {"components": self.components}
        config = EncoderConfig("hib", self.backbone, dim=self.dim, options=options)
        return build_encoder(config, 1, (SIDE, SIDE * self.digits))


HEDGED = Case(2, 2, 1)
PARTS = {
    "tables": [Case(n, dim, c) for n, dim, _ in list(PUBLISHED)[::2] for c in range(3)],
    "beta": [Case(2, 2, 1, kl) for kl in (0.0, 1e-4, 1e-3, 1e-2)]
    + [Case(3, 3, 1, kl) for kl in (0.0, 1e-4)],
    "soft": [Case(2, 2, 0)] + [Case(2, 2, 0, margin=m) for m in (0.25, 0.5, 1.0, 2.0, 4.0)],
    "order": [Case(2, 1, 0), Case(2, 1, 1)],
    "settings": [
        *(HEDGED, Case(2, 2, 1, near=4), Case(2, 2, 1, near=8)),
        *(Case(2, 2, 1, occlusion=0.5), Case(2, 2, 1, occlusion=1.0)),
        *(Case(2, 2, 1, backbone="resnet10"), Case(2, 2, 1, batch=4 * BATCH)),
    ],
    "bounds": [],
}
DRAWN = ("N2 D2 MoG-1", "N2 D2 MoG-2", "N3 D2 MoG-1", "N2 D1 point", "N2 D1 MoG-1")
TABLES = [case.name for case in PARTS["tables"]]
SHORT = [HEDGED, PARTS["soft"][1], PARTS["order"][1]]


def compose(
    pool: ImageSet,
    classes: NDArray[np.int64],
    digits: int,
    total: int,
    corrupt: float,
    rng: np.random.Generator,
) -> ImageSet:
    """Draw images of numbers; in a class and position no handwritten digit comes twice."""
    n = total // len(classes)
    if n < MIN_PER_CLASS:
        n = MIN_PER_CLASS
        classes = np.sort(rng.choice(classes, total // n, replace=False))
    labels = np.asarray(pool.labels)
    rows_of = [np.flatnonzero(labels == digit) for digit in range(10)]
    rows = [
        [rng.choice(rows_of[int(digit)], n, replace=False) for digit in f"{number:0{digits}d}"]
        for number in classes
    ]
    tiles = np.asarray(pool.images)[np.array(rows).transpose(0, 2, 1).reshape(-1, digits)]
    composed, _ = occlude(join_tiles(tiles), corrupt, rng)
    numbers = np.repeat(classes, n)
    return ImageSet(composed, numbers.astype(np.int64), [str(row) for row in range(len(numbers))])


@cache
def read(
    digits: int, unseen: bool = False, corrupt: float = 0.0, total_train: int = TRAIN
) -> tuple[ImageSet, ImageSet]:
    """Training and test images of N-digit MNIST, drawn by the rules of the released sets.

    An image is N digits of MNIST in a row. Those that test are made of MNIST's test digits, show
    the numbers of training unless `unseen`, and black squares hit a share of their digits.
    """
    trained = np.sort(list_released_classes(digits))
    tested = np.setdiff1d(np.arange(10**digits), trained) if unseen else trained
    mnist, rng = read_mnist(data_root(DataConfig())), np.random.default_rng(0)
    train = compose(mnist.train, trained, digits, total_train, 0.0, rng)
    return train, compose(mnist.queries, tested, digits, TEST, corrupt, rng)


def on_device(images: ImageSet, device: torch.device) -> Tensor:
    """Pixels (n, 1, 28, 28 N), uint8."""
    return torch.from_numpy(np.asarray(images.images)).to(device)[:, None]


class Training:
    """One training, step by step, without anything that waits for the device.

    There are `per_class` images of each number in `pixels`, number after number.
    """

    def __init__(self, case: Case, pixels: Tensor, per_class: int) -> None:
        self.case, self.pixels, self.per_class = case, pixels, per_class
        torch.manual_seed(0)
        self.encoder = case.encoder().to(pixels.device).train()
        rate = torch.tensor(0.0, device=pixels.device)  # in memory that a graph reads
        weights = self.encoder.parameters()
        self.optimizer = torch.optim.Adam(weights, rate, fused=True, capturable=pixels.is_cuda)
        self.loss: Callable[[EmbeddedTuples], Tensor]
        if case.margin is None:
            self.loss = partial(self.encoder.loss, options=HedgedOptions(case.kl))
        else:
            vanilla = PointLossOptions(case.margin, "contrastive-hadsell")
            self.loss = lambda tuples: point_tuple_loss(tuples.vectors, tuples.valid, vanilla)
        self.total = torch.zeros((), device=pixels.device)  # of the losses

    def step(self) -> None:
        """Draw a batch, and take a step."""
        device, n = self.pixels.device, self.case.batch // 2
        shown = torch.randint(len(self.pixels) // self.per_class, (n,), device=device)
        first = torch.randint(self.per_class, (n,), device=device)
        other = (first + torch.randint(1, self.per_class, (n,), device=device)) % self.per_class
        labels = shown.repeat(2)
        rows = labels * self.per_class + torch.cat([first, other])
        images = hide(self.pixels[rows], self.case.occlusion).float() / 255
        half = self.pixels.is_cuda  # processors are often slow in bfloat16
        with torch.autocast(device.type, torch.bfloat16, half, cache_enabled=False):
            embedding = self.encoder(images)
        loss = self.loss(self.tuples(embedding, labels)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.total += loss.detach()

    def tuples(self, embedding: Embedding, labels: Tensor) -> EmbeddedTuples:
        """Each image, its match, and others, of which those of its own number do not count."""
        n, near, device = len(labels), self.case.near, labels.device
        anchors = torch.arange(n, device=device)
        drawn = torch.randint(1, n, (n, NEGATIVES - near), device=device)
        others = (anchors[:, None] + drawn) % n
        if near:
            vectors = embedding.vectors.detach()
            distance = torch.cdist(vectors, vectors)
            distance = distance.masked_fill(labels == labels[:, None], torch.inf)
            nearest = distance.topk(POOL, largest=False).indices
            keys = torch.rand(n, POOL, device=device).topk(near).indices
            others = torch.cat([others, nearest.gather(1, keys)], dim=1)
        roles = torch.cat([anchors, anchors.roll(n // 2), others.flatten()])
        return EmbeddedTuples(embedding[roles], labels[others] != labels[:, None])


def hide(images: Tensor, share: float) -> Tensor:
    """Hide a share of the digits of images (n, 1, 28, 28 N) in part, as `occlude` does."""
    n, digits = len(images), images.shape[-1] // SIDE
    hit, side, *corner = torch.rand(4, n, digits, device=images.device)
    length = (side * (SIDE + 1)).floor() * (hit < share)
    places = torch.arange(SIDE, device=images.device)
    first = (torch.stack(corner) * (SIDE - length + 1)).floor()[..., None]
    down, across = (places >= first) & (places < first + length[..., None])
    hidden = down[..., :, None] & across[..., None, :]
    return images.masked_fill(hidden.transpose(1, 2).reshape(n, 1, SIDE, -1), 0)


def train(files: dict[Path, Case], asked: Any) -> None:
    """Train encoders side by side, and write them to files."""
    device = torch.device(asked.device)
    trainings = [Training(case, *resident(case.digits, device)) for case in files.values()]

    def step() -> None:
        for training in trainings:
            training.step()

    if device.type == "cuda":
        step = together(trainings)
    start, done, share = time.monotonic(), 0, 0.0
    while trainings and share < 1:
        if done % 100 == 0:  # up to the rate in a fiftieth of the time, then down to 0
            losses = [training.total.item() / max(1, done) for training in trainings]
            rate = asked.rate * min(1, share * 50 + 0.01) * (1 + np.cos(np.pi * share)) / 2
            for training in trainings:
                training.optimizer.param_groups[0]["lr"].fill_(rate)
            if done % 2000 == 0:
                print(f"step {done}, mean losses", *np.round(losses, 4), flush=True)
        step()
        done += 1
        share = max(done / asked.steps, (time.monotonic() - start) / asked.seconds)
    for file, training in zip(files, trainings, strict=True):
        weights = training.encoder.state_dict()
        saved = {
            "weights": {name: values.cpu() for name, values in weights.items()},
            "images": done * training.case.batch,
            "loss": training.total.item() / done,
        }
        torch.save(saved, file)


@cache
def resident(digits: int, device: torch.device) -> tuple[Tensor, int]:
    """Pixels of all training images on the device, and how many there are of each number."""
    images = read(digits)[0]
    return on_device(images, device), int(np.bincount(images.labels).max())


def together(trainings: list[Training]) -> Callable[[], None]:
    """A CUDA graph of one step of each training, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in trainings]

    def step() -> None:
        current = torch.cuda.current_stream()
        for stream, training in zip(streams, trainings, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                training.step()
        for stream in streams:
            current.wait_stream(stream)

    for _ in range(3):  # libraries choose their kernels; the learning rate is 0
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Tested:
    """Embedded test sets of a trained encoder by name, each made when it is first asked for."""

    def __init__(self, file: Path, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.encoder = case.encoder().to(device)
        self.encoder.load_state_dict(torch.load(file, weights_only=True)["weights"])
        self.of = cache(self._of)

    def _of(self, name: str) -> Set:
        digits = self.case.digits
        if name == "train":
            pixels = resident(digits, self.device)[0]
            every = max(1, len(pixels) // TEST)
            labels = read(digits)[0].labels[::every]
            return self.embed(hide(pixels[::every], self.case.occlusion)), labels
        unseen, few = name == "unseen", min(TRAIN, 7000)
        images = read(digits, unseen=unseen, corrupt=SHARES.get(name, 0.0), total_train=few)[1]
        return self.embed(on_device(images, self.device)), images.labels

    def embed(self, pixels: Tensor) -> Embedding:
        """Embed uint8 pixels on their device."""
        parts = [self.encoder.embed(part.float() / 255) for part in pixels.split(250)]
        return Embedding.concatenate(parts)

    def measure(self, readings: tuple[str, ...]) -> dict[str, float]:
        """Figures by reading and column."""
        figures = {}
        for reading in readings:
            found = scores(self.encoder, *map(self.of, reading.split(" in ")))
            figures |= {f"{reading} {column}": value for column, value in found.items()}
        if self.case.dim == 1:
            order = self.in_order()[0]
            common = (order[1:] // 10 == order[:-1] // 10) | (order[1:] % 10 == order[:-1] % 10)
            figures["neighbours with a common digit"] = float(common.sum())
        return figures

    def in_order(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """All numbers by their mean place in one dimension, and these places."""
        seen, unseen = self.of("clean"), self.of("unseen")
        of = np.concatenate([seen[1], unseen[1]])
        places = torch.cat([seen[0].vectors, unseen[0].vectors])[:, 0].cpu().numpy()
        numbers = np.unique(of)
        means = np.array([places[of == number].mean() for number in numbers])
        return numbers[means.argsort()], np.sort(means)


def scores(encoder: Encoder, asked: Set, searched: Set) -> dict[str, float]:
    """Average precision of pairs, accuracy of neighbours, and how uncertainty goes with them."""
    (queries, labels), (items, item_labels) = asked, searched
    twins = np.array_equal(labels, item_labels)
    near = neighbours(encoder, queries, items, twins)
    by_means, ranked = (item_labels[rows[:, :5]] for rows in near)
    right = voted_right(ranked, labels)
    figures = {
        "5-NN": float(right.mean()),
        "5-NN by means": float(voted_right(by_means, labels).mean()),
        "any of 5": float((ranked == labels[:, None]).any(1).mean()),
    }
    eta = None
    if queries.uncertainty is not None and items.uncertainty is not None:
        both = queries.uncertainty, items.uncertainty
        eta, of_items = (one.double().cpu().numpy() for one in both)
        figures["tau 5-NN"] = falling([right[rows].mean() for rows in binned(eta)])
    if not twins:
        return figures
    left, other = sample_pairs(labels, 10_000).T
    match = labels[left] == labels[other]
    pairs = queries[torch.from_numpy(left)], items[torch.from_numpy(other)]
    with torch.inference_mode():
        if encoder.reranks:
            score = -encoder.rerank(*pairs)[:, 0].cpu().numpy()
        else:
            score = -(pairs[0].vectors - pairs[1].vectors).norm(dim=1).cpu().numpy()
    figures["AP"] = float(average_precision_score(match, score))
    if eta is not None:
        bins = binned((eta[left] + of_items[other]) / 2)
        precisions = [average_precision_score(match[rows], score[rows]) for rows in bins]
        figures["tau AP"] = falling(precisions)
    return figures


@torch.inference_mode()
def neighbours(
    encoder: Encoder, queries: Embedding, items: Embedding, twins: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows (n, 100) of the nearest means, by their distance and by the probability of a match."""
    near, ranked = [], []
    for start in range(0, len(queries), 1000):
        part = queries[start : start + 1000]
        distance = torch.cdist(part.vectors, items.vectors)
        if twins:  # without the query itself
            rows = torch.arange(len(part), device=distance.device)
            distance[rows, rows + start] = torch.inf
        nearest = distance.topk(CANDIDATES, largest=False).indices
        near.append(nearest)
        if encoder.reranks:
            values = encoder.rerank(part, items[nearest.flatten()])
            nearest = nearest.gather(1, values.argsort(dim=1, stable=True))
        ranked.append(nearest)
    return torch.cat(near).cpu().numpy(), torch.cat(ranked).cpu().numpy()


def sample_pairs(labels: NDArray[np.int64], n_pairs: int) -> NDArray[np.int64]:
    """(n_pairs, 2) rows of random pairs, first as many that match, then as many that do not."""
    n, half, rng = len(labels), n_pairs // 2, np.random.default_rng(0)
    _, of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # Items in the order of their labels: those of one label are a run.
    order = np.argsort(of, kind="stable")
    size = np.repeat(counts, counts)
    start = np.repeat(np.cumsum(counts) - counts, counts)
    first = rng.choice(n, half, p=(size - 1) / (size - 1).sum())
    other = start[first] + rng.integers(0, size[first] - 1)
    matching = np.stack([first, other + (other >= first)], axis=1)
    first = rng.choice(n, half, p=(n - size) / (n - size).sum())
    other = rng.integers(0, n - size[first])
    other += np.where(other >= start[first], size[first], 0)
    return order[np.concatenate([matching, np.stack([first, other], axis=1)])]


def voted_right(neighbours: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(n,) whether the most frequent label of the neighbours is right; the nearest of several."""
    votes = (neighbours[:, :, None] == neighbours[:, None, :]).sum(axis=2)
    winner = np.take_along_axis(neighbours, votes.argmax(axis=1)[:, None], axis=1)
    return np.asarray(winner[:, 0] == labels)


def binned(uncertainty: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Rows in bins of equal count, from the least to the most uncertain."""
    return np.array_split(np.argsort(uncertainty, kind="stable"), BINS)


def falling(means: list[float]) -> float:
    """Minus Kendall's tau-b of the order of bins and what they reach."""
    return -float(stats.kendalltau(np.arange(len(means)), means).statistic)


def draw(tested: Tested, folder: Path) -> None:
    """Draw ellipses of two standard deviations, clean and corrupt; or the numbers on a line."""
    folder.mkdir(parents=True, exist_ok=True)
    name, flat = tested.case.name, tested.case.dim == 2
    figure = Figure((9, 4.5) if flat else (9, 1.5), layout="tight")
    for i, (number, place) in enumerate(() if flat else zip(*tested.in_order(), strict=True)):
        axes = figure.gca()
        axes.text(place, i % 5, f"{number:02d}", ha="center", fontsize=7)
        axes.set(ylim=(-0.5, 5.5), yticks=[], title=name)
        axes.update_datalim([(place, 0)])
        axes.autoscale_view(scaley=False)
    for state, axes in zip(SHARES, figure.subplots(1, 2), strict=False) if flat else ():
        embedding, labels = tested.of(state)
        for row in np.random.default_rng(0).permutation(len(labels))[:100]:
            parts = embedding[[row]].map(torch.Tensor.cpu).tensors
            means = parts.get("component_means", parts["vectors"][:, None])[0].tolist()
            variances = parts.get("component_variances", parts["variance"][:, None])[0]
            colour = f"C{labels[row] // 10 ** (tested.case.digits - 1)}"
            for mean, size in zip(means, (4 * variances.sqrt()).tolist(), strict=True):
                axes.add_patch(Ellipse(mean, *size, color=colour, alpha=0.25, lw=0))
                axes.text(*mean, f"{labels[row]}", ha="center", va="center", fontsize=6)
        axes.set(title=f"{name}, {state}")
        axes.autoscale_view()
    figure.savefig(folder / f"{name}.png", dpi=100)


def legible(root: Path) -> dict[str, float]:
    """The share of corrupt and of clean digits that a classifier of single ones reads."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    source = read_mnist(root)
    halves = source.train, source.queries
    tiles = [np.asarray(part.images).reshape(-1, SIDE, SIDE) for part in halves]
    train_labels, labels = (torch.from_numpy(part.labels) for part in halves)

    def pixels(images: NDArray[np.uint8], share: float = 1.0) -> Tensor:
        return torch.from_numpy(occlude(images, share, rng)[0][:, None]).float() / 255

    convolved = (
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
    )
    net = nn.Sequential(*convolved, nn.Flatten(), nn.LazyLinear(256), nn.ReLU(), nn.LazyLinear(10))
    net(torch.zeros(1, 1, SIDE, SIDE))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(sized(2, 1)):
        for rows in np.array_split(rng.permutation(len(tiles[0])), 468)[: sized(468, 3)]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(pixels(tiles[0][rows])), train_labels[rows])
            loss.backward()
            optimizer.step()
    read_shares = {}
    for name, share in (("corrupt", 1.0), ("clean", 0.0)):
        with torch.inference_mode():
            guesses = [net(pixels(part, share)).argmax(1) for part in np.array_split(tiles[1], 100)]
        read_shares[name] = float((torch.cat(guesses) == labels).float().mean())
    return read_shares


def main() -> None:
    """Train, measure, print and draw."""
    command = parser(__doc__)
    command.add_argument("--runs", type=Path, default=Path("runs", sized("oh2019", "oh2019-short")))
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    command.add_argument("--digits", type=int, nargs="+", default=[2, 3], help="N")
    command.add_argument(
        "--steps", type=int, default=sized(20_000, 3), help="of a training, at most"
    )
    command.add_argument("--seconds", type=float, default=np.inf, help="of all trainings, at most")
    command.add_argument("--rate", type=float, default=1.5e-3, help="learning rate")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--plots", type=Path, help="draw into this folder")
    asked = command.parse_args()
    torch.set_num_threads(1)
    files = {}
    for part in asked.parts:
        folder = asked.runs / ("tables" if part == "tables" else "compared")
        folder.mkdir(parents=True, exist_ok=True)
        for case in PARTS[part]:
            if case.digits in asked.digits and sized(True, case in SHORT):
                files[folder / f"{case.name}.pt"] = case
    train({file: case for file, case in files.items() if not file.exists()}, asked)
    figures, rows, differences = {}, [], defaultdict(list)
    for file, case in files.items():
        name = case.name if file.parent.name == "tables" else f"compared {case.name}"
        saved = torch.load(file, weights_only=True)
        if "figures" not in saved:
            tested = Tested(file, case, torch.device(asked.device))
            kinds = READINGS[: 3 if name != case.name else 7 if case.digits == 2 else 5]
            saved["figures"] = tested.measure(kinds)
            torch.save(saved, file)
        if asked.plots is not None and case.name in DRAWN:
            draw(Tested(file, case, torch.device(asked.device)), asked.plots)
        values = saved["figures"]
        figures |= {f"{name} {key}": value for key, value in values.items()}
        figures |= {f"{name} {key}": saved[key] for key in ("images", "loss")}
        published: list[str] = []
        for state in ("clean", "corrupt") if name in TABLES else ():
            published = PUBLISHED[case.digits, case.dim, state][case.components].split()
            rows.append((name, f"published, {state}", *published))
        for reading in [one for one in READINGS if f"{one} 5-NN" in values]:
            cells = [values.get(f"{reading} {column}") for column in COLUMNS]
            rows.append((name, reading, *map(spread, [[cell] for cell in cells])))
            for column, cell, there in zip(COLUMNS, cells, published, strict=False):
                if cell is not None and there != "-":
                    differences[f"{reading} {column}"].append(abs(cell - float(there)))
    figures |= {f"off corrupt, {name}": float(np.mean(one)) for name, one in differences.items()}
    if "bounds" in asked.parts:
        file = asked.runs / "bounds.pt"
        if not file.exists():
            torch.save(legible(data_root(DataConfig())), file)
        shares = torch.load(file, weights_only=True)
        for digits in asked.digits:
            mixed = 0.2 * shares["corrupt"] + 0.8 * shares["clean"]
            figures[f"N{digits} read, all corrupt"] = shares["corrupt"] ** digits
            figures[f"N{digits} read, a fifth corrupt"] = mixed**digits
    columns = ("encoder", "queries in references", *COLUMNS)
    report("N-digit MNIST, one seed", columns, rows, figures, asked.json)


if __name__ == "__main__":
    main()
