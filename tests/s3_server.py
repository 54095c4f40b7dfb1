"""A real S3 server on loopback, in a process of its own: `python -m tests.s3_server PORT LOG`.

Writes are made one after the other, so that conditional ones are atomic as those of S3 are. The
log has a line for each request: method and path.
"""

import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from threading import Lock

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "a-secret-key-of-tests",
    "AWS_REGION": "us-east-1",
}
AWAY = "away"  # file beside the log
_numbers = itertools.count()


class Server:
    """A server that can be stopped and started again; `environment` leads clients to it.

    A server that is started again is empty.
    """

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "requests.log"
        self.environment = VARIABLES | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.s3_server", str(self.port), str(self.log)]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=60)
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                assert self._process.poll() is None
                time.sleep(0.1)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def pause(self) -> None:
        """Answer as a store that is overloaded, until `resume`; the objects stay."""
        self.log.with_name(AWAY).touch()

    def resume(self) -> None:
        self.log.with_name(AWAY).unlink()

    def bucket(self) -> str:
        """Return the URI of a new bucket."""
        name = f"bucket-{os.getpid()}-{next(_numbers)}"
        place = f"{self.environment['AWS_ENDPOINT_URL']}/{name}"
        urllib.request.urlopen(urllib.request.Request(place, method="PUT")).close()
        return f"s3://{name}"

    def requests(self) -> list[str]:
        return self.log.read_text().splitlines()


def main(port: int, log: Path) -> None:
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_):
            pass

    inner, writing = create_backend_app("s3"), Lock()

    def app(environ, start_response):
        with log.open("a") as file:
            file.write(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}\n")
        if log.with_name(AWAY).exists():
            start_response("503 Slow Down", [("Content-Length", "0")])
            return []
        if environ["REQUEST_METHOD"] == "GET":
            return inner(environ, start_response)
        with writing:
            return inner(environ, start_response)

    make_server("127.0.0.1", port, app, threaded=True, request_handler=Quiet).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
