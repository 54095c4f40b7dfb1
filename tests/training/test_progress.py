"""Lines that workers write to a file, on the screen of the process that waits for them."""

import time

from training import workers
from training.workers import follow


def test_what_is_added_to_files_is_printed_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workers, "FOLLOW_INTERVAL_S", 0.01)
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    first.write_text("of an earlier start\n")
    with follow({first: "", second: "second: "}, lambda: "waiting"):
        with first.open("a") as file:
            file.write("one\ntw")
            file.flush()
            time.sleep(0.1)
            file.write("o [bold]ä\n")
        second.write_text("three\n")
    with first.open("a") as file:
        file.write("after the end\n")
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "one",
        "second: three",
        "two [bold]ä",
    ]
