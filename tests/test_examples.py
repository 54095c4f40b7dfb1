import importlib.util
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import rcir

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_images.py"


def test_own_images_makes_a_retriever_from_folders_of_pictures(
    trained, splits, tmp_path, monkeypatch, capsys
):
    pictures = tmp_path / "pictures"
    for image, label, name in zip(
        splits.calibration.images, splits.calibration.labels, splits.calibration.ids, strict=True
    ):
        (pictures / f"{label:02d}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(pictures / f"{label:02d}" / f"{name}.png")

    spec = importlib.util.spec_from_file_location("own_images", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    output = tmp_path / "retriever"
    command = ["--run", str(trained.path), "--images", str(pictures), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["own_images.py", *command])
    example.main()
    assert f"{len(splits.calibration) // 2} images" in capsys.readouterr().out

    retriever = rcir.load(output)
    alpha = retriever.controllers[None].miss().minimum_alpha(0.1) + 0.05
    query = next(pictures.glob("*/*.png"))
    answer = retriever.retrieve(query, alpha, 0.1)
    assert all((pictures / name).is_file() for name in answer.ids)
    # Half index, a sixth fits the score function, the rest calibrates.
    n = len(splits.calibration)
    assert answer.guarantee.n_calibration == n - n // 2 - n // 6
    # Each name with its own distance; the order is the score function's.
    found = retriever.search([query])
    distance = dict(zip(retriever.ids[found.positions[0]], found.distances[0], strict=True))
    assert len(set(answer.ids)) == answer.size
    np.testing.assert_allclose(answer.distances, [distance[name] for name in answer.ids], atol=1e-5)
