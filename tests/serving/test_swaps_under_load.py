"""Answers while versions are replaced: each is that of exactly one version, and none is refused."""

import itertools
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
import torch

import rcir
from calibration import recalibrate
from rcir.data import Preprocessing
from rcir.data.records import ImageSet
from rcir.encoders import build_encoder
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher
from tests.methods import CERTAIN, TRAINED, config_of

THREADS, CLASSES, QUERIES, SHAPE = 16, 5, 12, (8, 16)
ALPHA, DELTA = 0.3, 0.1


@dataclass(frozen=True)
class Load:
    """Methods, minimum seconds, queries and swaps, and seconds between swaps and between queries of
    a thread.
    """

    methods: tuple[str, ...]
    seconds: float
    queries: int
    swaps: int
    pause: float
    rest: float


# Of the three kinds of rankings: with draws, by an uncertainty of the encoder, without any.
FEW = ("mc-dropout", "btl", "deterministic")
LOADS = [
    pytest.param(Load(FEW, 0.3, 100, 9, 0.0, 0.3), id="short"),
    pytest.param(Load(tuple(TRAINED), 30.0, 5000, 10, 2.0, 0.0), id="long", marks=pytest.mark.slow),
]


def images(n, seed, prefix):
    """Noisy pictures of a few labels, which networks with random weights tell apart roughly."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).uniform(0, 255, (CLASSES, *SHAPE))
    labels = rng.integers(CLASSES, size=n)
    pixels = patterns[labels] + 110 * rng.standard_normal((n, *SHAPE))
    ids = [f"{prefix} {row}" for row in range(n)]
    return ImageSet(pixels.clip(0, 255).astype(np.uint8), labels, ids)


GALLERY, TUNING, CALIBRATION = images(60, 1, "old"), images(40, 2, "t"), images(80, 3, "c")
ADDED = images(50, 4, "new")
PICTURES = images(QUERIES, 5, "query").images
REMOVED = [*GALLERY.ids[20:40], *ADDED.ids[:20]]


def built(method):
    """A calibrated retriever with random weights, which is left in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TRAINED.index(method))
        encoder = build_encoder(config_of(method, dim=6), 1, SHAPE)
    if method == "lam":
        encoder.prior_precision.fill_(1.0)  # as if it was fitted: it then has an uncertainty
    retriever = Retriever.build(encoder, Preprocessing(), GALLERY, depth=40)
    retriever.calibrate_splits(
        retriever.search_labelled(TUNING),
        retriever.search_labelled(CALIBRATION),
        "learned",
        query_uncertainty="cosine" if method in CERTAIN else "encoder",
    )
    encoder.train()
    return retriever


def exchange(retriever):
    with retriever.update() as next_version:
        next_version.remove(GALLERY.ids[:20])  # moves the others to other positions
        next_version.add(ADDED.images, ADDED.ids, ADDED.labels)


def versions_of(retriever):
    """The retriever, then with other items, and then with fewer."""
    exchanged = copy(retriever)
    exchange(exchanged)
    shrunk = copy(exchanged)
    with shrunk.update() as next_version:
        next_version.remove(REMOVED)
    return [retriever, exchanged, shrunk]


def answers_of(retriever):
    """What the retriever answers to each query, alone."""
    return [retriever.retrieve(picture, ALPHA, DELTA).to_dict() for picture in PICTURES]


def differences(answer, expected):
    """The parts in which an answer differs from an expected one by more than rounding."""
    differing = {name for name in ("ids", "guarantee") if answer[name] != expected[name]}
    for name in ("distances", "uncertainty"):
        values = [np.asarray(each[name]) for each in (answer, expected)]
        if values[0].shape != values[1].shape or not np.allclose(*values, rtol=1e-4, atol=1e-5):
            differing.add(name)
    return differing


@cache
def expected(method):
    """The retriever in its versions, and the answers of each, which differ in every query."""
    versions = versions_of(built(method))
    answers = [answers_of(version) for version in versions]
    for one, other in itertools.combinations(answers, 2):
        parts = [differences(*pair) for pair in zip(one, other, strict=True)]
        assert all(parts)
        assert set.union(*parts) >= {"ids", "distances", "guarantee"}
    return versions, answers


@contextmanager
def interleaved():
    """Threads that take turns often, and searches that wait, so that many queries are under way
    whenever a version is replaced.
    """
    candidates, interval = Searcher.candidates, sys.getswitchinterval()

    def slowly(*arguments):
        time.sleep(0.02)
        results = candidates(*arguments)
        time.sleep(0.02)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Searcher, "candidates", slowly)
        sys.setswitchinterval(1e-5)
        yield
        sys.setswitchinterval(interval)


def under_load(ask, swaps, load):
    """Make swaps, one after the other, while many threads call `ask(rng)`.

    Returns the outcomes, to which errors belong.
    """
    began, n_swaps, outcomes, done = time.monotonic(), 0, [], threading.Event()

    def work(seed):
        rng = np.random.default_rng(seed)
        while not done.is_set():
            try:
                outcomes.append(ask(rng))
            except Exception as error:  # the test says which
                outcomes.append(error)
            time.sleep(load.rest)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        while (
            time.monotonic() < began + load.seconds
            or len(outcomes) < load.queries
            or n_swaps < load.swaps
        ):
            assert time.monotonic() < began + 500
            due = time.monotonic() + load.pause
            next(swaps)()
            n_swaps += 1
            time.sleep(max(0.0, due - time.monotonic()))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    return outcomes


@pytest.mark.parametrize("load", LOADS)
def test_each_answer_of_many_threads_is_of_one_version(tmp_path, load):
    removed = tmp_path / "removed"
    removed.write_text("\n".join(REMOVED))
    live = {  # different methods begin with different versions
        method: copy(expected(method)[0][number % 3]) for number, method in enumerate(load.methods)
    }
    for method, retriever in live.items():
        retriever.save(tmp_path / method)

    def update(method):
        exchange(live[method])
        live[method].save(tmp_path / method)

    def recalibrate_and_load(method):
        recalibrate(tmp_path / method, remove=removed)
        live[method] = rcir.load(tmp_path / method)

    def replace_and_load(method):
        copy(expected(method)[0][0]).save(tmp_path / method)
        live[method] = rcir.load(tmp_path / method)

    kinds = (update, recalibrate_and_load, replace_and_load)

    def ask(rng):
        method = swapped[-1] if rng.random() < 0.5 else rng.choice(load.methods)
        query = rng.integers(QUERIES)
        answer = live[method].retrieve(PICTURES[query], ALPHA, DELTA)
        return method, query, answer.to_dict()

    def swap(kind, method):
        swapped.append(method)
        kinds[kind](method)

    swapped = [load.methods[0]]  # the last of which half of the queries are for
    swaps = (  # kind k leads from version k of a method to the next
        partial(swap, (start + number) % 3, method)
        for start in itertools.count()
        for number, method in enumerate(load.methods)
    )
    with interleaved():
        outcomes = under_load(ask, swaps, load)
    wrong = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            wrong.append(repr(outcome))
            continue
        method, query, answer = outcome
        parts = [differences(answer, version[query]) for version in expected(method)[1]]
        if all(parts):
            wrong.append(f"{method}: {sorted(min(parts, key=len))} of the nearest version differ")
    assert not wrong, Counter(wrong).most_common(20)
