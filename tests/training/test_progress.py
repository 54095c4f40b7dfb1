"""What training shows."""

from training.progress import EpochBar

METRICS = {
    "loss": 0.123456,
    "validation/recall_at_1": 0.8765,
    "validation/auroc_miss": 0.7654,
    "seconds": 1234.5678,
}


def shown(capsys, metrics):
    with EpochBar(epoch=123, epochs=1000, shown=True) as bar:
        bar.start(steps=2)
        bar.advance()
        bar.summary(metrics)
    return capsys.readouterr().out


def test_an_epoch_is_one_line_however_long(capsys):
    assert shown(capsys, METRICS) == (
        "epoch 123/1000  loss 0.1235  validation recall@1 0.876  AUROC of misses 0.765  1234.6 s\n"
    )


def test_without_a_miss_there_is_no_auroc_to_show(capsys):
    flawless = {name: value for name, value in METRICS.items() if not name.endswith("miss")}
    assert "AUROC" not in shown(capsys, flawless)
