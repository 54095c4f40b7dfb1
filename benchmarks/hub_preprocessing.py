"""Preprocessing of hub models against the transforms of timm, OpenCLIP and transformers.

Every data configuration of a model that timm or OpenCLIP lists weights for, and image processors of
transformers: with the settings of published models, and every class with its defaults. Each is
translated or refused; the largest difference of a translation is measured on files of images.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from common import parser, report, sized

from tests.encoders.hub_configurations import (
    all_image_processors,
    compare,
    open_clip_configurations,
    timm_configurations,
    transformers_configurations,
    write_images,
)

LIMIT = sized(None, 4)


def main() -> None:
    """Compare all configurations and print one row for each hub."""
    arguments = parser(__doc__).parse_args()
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        files = write_images(Path(folder))
        processors = itertools.chain(transformers_configurations(folder), all_image_processors())
        hubs = {
            "timm": timm_configurations(),
            "open_clip": open_clip_configurations(),
            "transformers": processors,
        }
        for hub, configurations in hubs.items():
            chosen = itertools.islice(configurations, LIMIT)
            differences, refused, models = compare(chosen, files)
            largest = max(differences.values())
            rows.append(
                [
                    hub,
                    str(len(differences) + len(refused)),
                    str(len(refused)),
                    f"{models['translated']} + {models['refused']}" if models.total() else "-",
                    f"{largest:.4f}",
                ]
            )
            figures |= {
                f"{hub}_configurations": len(differences) + len(refused),
                f"{hub}_refused": len(refused),
                f"{hub}_largest_difference": largest,
            }
            for label, reason in refused.items():
                print(f"refused: {label}: {reason}")
    columns = ["hub", "configurations", "refused", "models, translated + refused", "largest"]
    title = "Preprocessing against the library's own transform, in standard deviations"
    report(title, columns, rows, figures, arguments.json)


if __name__ == "__main__":
    main()
