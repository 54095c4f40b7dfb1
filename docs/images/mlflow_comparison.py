"""Make `mlflow_comparison.png` for docs/sweeps.md: four calibrations side by side in MLflow.

Run the commands of that page first, then `.venv/bin/python docs/images/mlflow_comparison.py` with
MLFLOW_TRACKING_URI set to its server. Needs Chromium (`make browser`).
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from urllib.parse import urlencode

import mlflow
from PIL import Image
from playwright.sync_api import sync_playwright

OUTPUT = Path(__file__).with_suffix(".png")
VIEWPORT = {"width": 1560, "height": 1260}
COLOURS = 64  # of the palette


def main() -> None:
    """Select the calibrations in the table of runs, and photograph their comparison."""
    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name("rcir")
    if found is None:
        raise SystemExit("there is no experiment: run the commands of docs/sweeps.md first")
    query = urlencode(
        {
            "workflowType": "machine_learning",
            "searchFilter": "tags.kind = 'calibration'",
            "orderByKey": "metrics.`certified/alpha_0.1/mean_size`",
            "orderByAsc": "true",
        }
    )
    runs = f"/#/experiments/{found.experiment_id}/runs?{query}"
    with sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = chromium.new_page(viewport=VIEWPORT)
        page.set_default_timeout(120_000)
        page.goto(mlflow.get_tracking_uri() + runs)
        page.get_by_text("matching runs").wait_for()
        page.get_by_role("button", name="Close").click()  # the assistant
        page.get_by_role("checkbox", name="Select all runs").click()
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("Show diff only").first.wait_for()
        page.get_by_role("button", name="Toggle sidebar").click()
        for section in ("Visualizations", "Run details"):
            page.get_by_text(section, exact=True).click()
        page.get_by_role("switch").first.click()
        page.wait_for_timeout(2000)
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        chromium.close()
    shot.quantize(COLOURS).save(OUTPUT, optimize=True)
    print(f"{OUTPUT}: {OUTPUT.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
