from mlflow import MlflowClient

from rcir.mining import MiningConfig
from training import train


def test_an_epoch_without_a_violated_triplet_changes_nothing_and_ends_well(tiny):
    # No negative is closer than the nearest positive and farther than it at once.
    never = MiningConfig("nearest", "semi-hard", margin=0.0)
    run = train(tiny(epochs=2, mining=never))
    client = MlflowClient(run.tracking_uri)
    for name in ("loss", "tuples"):
        values = [metric.value for metric in client.get_metric_history(run.mlflow_run, name)]
        assert values == [0.0, 0.0]
    assert run.finished
