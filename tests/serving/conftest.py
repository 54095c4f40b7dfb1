"""A retriever of vectors in a folder, and servers of folders in this process."""

import io
import threading
import time
from contextlib import contextmanager
from copy import copy
from functools import partial

import pytest
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image

import rcir
from rcir.serving import Settings, create_app
from rcir.serving.server import configuration, listen
from rcir.serving.sources import source_of
from tests.vectors import draw_vectors

CLASSES, DIM = 20, 8


drawn = partial(draw_vectors, classes=CLASSES, dim=DIM, noise=0.9)


def png(pixels):
    """An array of pixels as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@contextmanager
def listening(app, settings, **options):
    """The port of a server of an application, in a thread of this process."""
    with listen(settings) as sockets:
        server = uvicorn.Server(configuration(app, settings, **options))
        thread = threading.Thread(target=server.run, args=([sockets],))
        thread.start()
        try:
            until = time.monotonic() + 300
            while not server.started:
                assert thread.is_alive()
                assert time.monotonic() < until
                time.sleep(0.01)
            yield sockets.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def running(folder, **settings):
    """The port of a server of a folder, in a thread of this process."""
    settings = Settings(port=0, **settings)
    with listening(create_app(source_of(folder), settings), settings) as port:
        yield port


@pytest.fixture(scope="session")
def vectors():
    """A calibrated retriever of vectors; tests that change one load `place` instead."""
    gallery, labels = drawn(500, 1)
    made = rcir.Retriever.from_embeddings(gallery, labels=labels)
    made.calibrate(*drawn(900, 2), score_function="quantile")
    return made


@pytest.fixture
def place(vectors, tmp_path):
    """The folder in which it is saved."""
    return copy(vectors).save(tmp_path / "vectors")


@pytest.fixture
def serving(tmp_path):
    """`with serving(folder, **settings) as client`: the HTTP client of a server of it."""

    @contextmanager
    def serving(folder, **settings):
        settings = {"poll": 0, "store": tmp_path / "feedback.db"} | settings
        app = create_app(source_of(folder), Settings(**settings))
        with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
            yield client

    return serving
