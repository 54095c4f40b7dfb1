"""Sequences of stored features: read, trained on, resumed, embedded and searched."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from calibration import CalibrationConfig, calibrate
from rcir.data import Augmentation, DataConfig, Preprocessing, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import embed
from rcir.errors import InvalidConfig, InvalidData, InvalidImage
from rcir.index import nearest_others
from rcir.retrieval.retriever import Retriever
from tests.methods import OPTIONS
from tests.training.helpers import Stop, same_weights
from training import OptimizerConfig, TrainingConfig, train

STEPS, LENGTH, N_CLASSES, EACH = 6, 3, 16, 20
SIZES = {"validation": 60, "gallery": 60, "tuning": 40, "calibration": 40}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Classes that differ by the order of the same steps, with noise: their sums are equal."""
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((STEPS, LENGTH))
    orders = [rng.permutation(STEPS) for _ in range(N_CLASSES)]
    clean = np.repeat(np.stack([steps[order] for order in orders]), EACH, axis=0)
    path = tmp_path_factory.mktemp("sequences") / "features.npz"
    vectors = (clean + 0.3 * rng.standard_normal(clean.shape)).reshape(len(clean), -1)
    labels = np.repeat([f"class {n}" for n in range(N_CLASSES)], EACH)
    np.savez(path, vector=vectors.astype(np.float32), label=labels, group=labels)
    return path


@pytest.fixture
def config(file, tmp_path):
    """A function that returns the configuration of a training on these sequences."""

    def configured(method="tripreg", name="run", **options):
        data = {"path": str(file), "steps": STEPS, "open_set": False} | SIZES
        encoder = {"options": OPTIONS.get(method, {}), "dim": 8}
        return TrainingConfig(
            name,
            storage=str(tmp_path),
            data=DataConfig("sequences", options=data),
            preprocessing=Preprocessing((STEPS, LENGTH), interpolation="none"),
            encoder=EncoderConfig(method, "lstm", **encoder),
            **({"epochs": 6, "batch": 32, "optimizer": OptimizerConfig(lr=0.01)} | options),
        )

    return configured


def test_the_features_of_a_file_are_split_into_steps(file):
    options = {"path": str(file), "steps": STEPS, "open_set": False} | SIZES
    splits = load_splits(DataConfig("sequences", options=options))
    stored = np.load(file)
    for part in (splits.train, splits.gallery, splits.test):
        assert not part.pictures
        rows = [int(name) for name in part.ids]
        np.testing.assert_array_equal(part.images.reshape(len(rows), -1), stored["vector"][rows])
        np.testing.assert_array_equal(part.attributes["class"], stored["label"][rows])
        np.testing.assert_array_equal(part.attributes["group"], stored["group"][rows])


def test_an_interrupted_training_continues_and_its_encoder_retrieves(config, tmp_path):
    whole = train(config())
    with pytest.raises(SystemExit):
        train(config(name="parts"), callback=Stop(2))
    run = train(config(name="parts"))
    assert same_weights(run, whole)

    splits = load_splits(run.data)
    retriever = Retriever.build(run.encoder(), run.preprocessing, splits.gallery)
    retriever.calibrate_splits(
        *(retriever.search_labelled(part) for part in (splits.tuning, splits.calibration))
    )
    again = Retriever.load(retriever.save(tmp_path / "retriever"))
    answers = again.retrieve([*splits.test.images], alpha=0.5, delta=0.2)
    right = [
        label in answer.labels
        for label, answer in zip(splits.test.attributes["class"], answers, strict=True)
    ]
    assert np.mean(right) > 0.5
    alone = again.embed([splits.test.images[0]])
    torch.testing.assert_close(
        alone.vectors, again.embed(splits.test.images[:5]).vectors[:1], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["btl", "mc-dropout", "tripreg"])
def test_methods_learn_the_order_of_steps(config, method):
    run = train(config(method))
    test = load_splits(run.data).test
    vectors = embed(run.encoder(), run.preprocessing, test.images).vectors
    nearest = nearest_others(vectors, 1)[1][:, 0]
    assert np.mean(test.labels[nearest] == test.labels) > 0.4, "chance is a sixteenth"


@pytest.mark.slow
def test_a_calibration_reports_sequences(config, tmp_path):
    run = train(config())
    outcome = calibrate(CalibrationConfig(str(run.path), str(tmp_path / "out"), alphas=(0.3,)))
    assert outcome.evaluation.quality.numbers["recall_at_1"] > 0.4
    assert "recall_at_1_pixels" not in outcome.evaluation.quality.numbers


def test_what_is_no_sequence_of_that_length_is_refused(config, file):
    run = config()
    data = run.data
    for steps, error in ((5, "divide 18"), (0, "steps"), (9, "shape")):
        other = replace(data, options=data.options | {"steps": steps})
        with pytest.raises((InvalidConfig, InvalidImage), match=error):
            train(replace(run, data=other))
    read = run.preprocessing
    for wrong in ([np.zeros((6, 3)), np.zeros((5, 3))], np.zeros((2, 6, 3), np.uint8), ["a.png"]):
        with pytest.raises(InvalidImage, match="none"):
            read(wrong)
    with pytest.raises(InvalidImage, match="not finite"):
        read(np.array([np.zeros((6, 3)), np.full((6, 3), 1e39)]))
    with pytest.raises(InvalidConfig, match="channels"):
        replace(read, channels=3)
    with pytest.raises(InvalidConfig, match="augmentation"):
        train(replace(run, augmentation=Augmentation(flip=True)))
    unlabelled = file.with_name("unlabelled.npz")
    np.savez(unlabelled, vector=np.load(file)["vector"])
    with pytest.raises(InvalidData, match="label"):
        load_splits(replace(data, options=data.options | {"path": str(unlabelled)}))
    for encoder, channels in ((EncoderConfig("btl", "lstm", "gem"), 1), (run.encoder, 3)):
        with pytest.raises(InvalidConfig, match=r"gem|channels"):
            build_encoder(encoder, channels, (STEPS, LENGTH))
