"""Every benchmark in its short form; the one that simulates claims also by what it finds."""

import json
import math
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from rcir.encoders import METHODS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
EXCESSES = {"worst_excess", "average_excess", "worst_single_excess", "cluster_excess"}
LOOPS = {
    *("ours_over_bare", "ours_over_synthetic", "ours_over_peer", "bare_images_per_second"),
    *("synthetic_images_per_second", "peer_images_per_second"),
    *("forward_images_per_second", "ours_images_per_second"),
}
SETS = ("digits", "fashion", "omniglot")
# Of every script the figures that it reports, in either form.
FIGURES = {
    "data": {
        *("images_per_second_per_core", "speedup_over_full_decode", "ours_over_best_library_call"),
        *("million_gallery_gib", "many_label_totals_seconds", "many_label_totals_gib"),
    },
    "gpu": {*LOOPS, "peak_gib", "dropout_1", "dropout_128"},
    "index": {
        *("hnsw_speedup", "ivfpq_speedup", "ivfpq_memory_over_flat", "certified_size_over_flat"),
        *("retrieve_over_raw", "remove_ms", "build_minutes_10m", "peak_gib_10m", "recall_10m"),
    },
    "metrics": {
        *("speedup_over_fastest_peer", "metrics_over_search", "largest_difference", "peak_gib"),
    },
    "mining": {
        *("seconds_60k", "matmul_seconds", "peak_gib_60k", "growth_exponent"),
        *("speedup_over_naive", "largest_difference", "seconds_60k_ten_labels"),
        *("peak_gib_60k_ten_labels", "largest_difference_ten_labels", "sampled_peak_gib"),
        *("sampled_growth_gib", "full_cache_gib"),
    },
    "mining_choices": {
        f"{encoder}_nearest_hardest_{name}"
        for encoder, name in product(
            ("deterministic", "mc_dropout", "btl"),
            ("recall_at_1", "auroc_miss", "auroc_occlusion", "mean_size", "constant_size"),
        )
    },
    "photographs": {
        f"{name}_{figure}"
        for name, figure in product(
            [f"{name}{by}" for name in ("cub50", "omniglot", "fashion") for by in ("", "_lite0")],
            ("recall_over_pca", "auroc_miss", "auroc_miss_one_minus_cosine"),
        )
    },
    "serve": {
        *("cpu_ms_per_request", "direct_cpu_ms", "p99_over_p50", "errors"),
        *("lost_in_swap", "swap_stall_seconds", "memory_growth"),
    },
    "retrieve": {"batch_overhead_ratio", "single_overhead_ms"},
    "risk": {
        *("fit_seconds_100k", "threshold_seconds", "speedup_over_grid"),
        *("speedup_over_grid_of_arrays", "speedup_over_mapie"),
        *("simultaneous_over_pointwise", "fashion_distinct_over_constant"),
        *("fashion_distinct_constant_over_constant", "worst_violation_excess"),
        "alarm_delay_over_restart",
        *(
            f"{name}_{figure}"
            for name, figure in product(
                SETS,
                (
                    *("auto_over_constant", "auto_over_paper", "auto_without_labels_over_paper"),
                    *("largest_auto_over_constant", "labels_reranked_over_learned"),
                    *("recall_auto_over_constant", "largest_recall_auto_over_constant"),
                ),
            )
        ),
    },
    "training": {*LOOPS, "dropout_1", "dropout_64", "overhead_per_epoch", "weak_scaling_2"},
    "servers": {
        f"{index}_{figure}"
        for index, figure in product(
            ("flat", "hnsw", "pgvector_exact", "pgvector_hnsw", "milvus_flat"),
            ("ms", "size_over_flat"),
        )
    },
    "tuning": {
        *("best_over_default_size", "sweep_seconds"),
        *("trial_seconds", "trial_overhead", "sweep_overhead"),
    },
    "validity": {*EXCESSES, "choice_excess", "modes"},
    "methods": {
        f"digits_{name.replace('-', '_')}_{figure}"
        for name, figure in product(
            METHODS.keys() - {"pretrained", "norm-softmax"}, ("recall_at_1", "auroc_miss", "size")
        )
    },
    "uncertainties": {
        *("cosine_auroc_miss", "cosine_size_over_constant"),
        *("vote_auroc_miss", "vote_size_over_constant"),
    },
    "vectors": {
        *("cub_size_over_constant", "violation_rate", "violation_expected"),
        *("certify_seconds", "recalibrate_over_search", "core_install_mb", "import_seconds"),
    },
    "papers/cub50": {
        *("cub_frozen_recall", "cub_finetuned_recall", "cub_finetuned_over_frozen_size"),
        *("cub_finetuned_auto_over_paper", "cub_finetuned_auto_over_constant"),
    },
    "papers/fashion_mnist": {
        f"{encoder}_{name}"
        for encoder, name in product(
            (
                *("deterministic", "mc_dropout", "mc_dropout_channels", "deep_ensemble", "btl"),
                *("vmf", "tripreg", "hib", "pfe", "lam_post_hoc", "lam_online"),
            ),
            ("mAP@1", "mAP@5", "mAP@10", "AUROC", "AUPRC", "AUSC", "ECE"),
        )
    }
    - {"deterministic_ECE", "tripreg_ECE", "pfe_ECE"},  # of encoders without samples
    "papers/two_digit_mnist": {
        f"{encoder}_{dim}_{state}_{name}"
        for dim, state, (encoder, names) in product(
            (2, 3),
            ("clean", "corrupt", "a_fifth_corrupt"),
            (
                ("deterministic", ("AP", "5_NN")),
                ("hib_point", ("AP", "5_NN")),
                *(
                    (encoder, ("AP", "5_NN", "tau_AP", "tau_5_NN"))
                    for encoder in ("btl", "hib_mog1", "hib_mog2")
                ),
            ),
        )
        for name in names
    },
}
# Where few queries of few matches certify no false discovery rate, there is none.
MAYBE = {
    "risk": {f"{name}_largest_false_discovery_auto_over_constant" for name in SETS},
    "index": {  # without the data set there are none
        *("fashion_hnsw_speedup", "fashion_ivfpq_speedup", "fashion_ivfpq_memory_over_flat"),
        *("fashion_certified_size_over_flat", "fashion_retrieve_over_raw", "fashion_remove_ms"),
    },
}
HELPERS = {"common", "cub", "loops", "populations", "papers/tables"}  # what several scripts share
OF_DATA = {
    "data",
    "methods",
    "photographs",
    "uncertainties",
    "vectors",
    "papers/cub50",
    "papers/fashion_mnist",
    "papers/two_digit_mnist",
}
OF_RAY = {"training", "tuning", "servers"}


def short(name):
    marks = [pytest.mark.slow]
    marks += [pytest.mark.data] if name in OF_DATA else []
    marks += [pytest.mark.distributed] if name in OF_RAY else []
    return pytest.param(name, marks=marks)


def test_figures_are_known_of_every_script_and_of_every_document():
    scripts = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.py")}
    assert scripts == FIGURES.keys() | HELPERS
    known = set().union(*FIGURES.values())
    for name in ("results", "performance"):
        text = (ROOT / "docs" / f"{name}.md").read_text()
        assert set(re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+)+)`", text)) <= known


@pytest.mark.parametrize("name", [short(name) for name in sorted(FIGURES.keys() - {"validity"})])
def test_every_benchmark_runs_in_its_short_form(name, tmp_path, request, patient):
    if name in OF_DATA:
        request.getfixturevalue("data_root")
    path = tmp_path / "figures.json"
    command = [sys.executable, FOLDER / f"{name}.py", "--short", "--json", path]
    # Packages of this tree, also where another one is installed.
    environment = os.environ | patient | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "gpu" and not torch.cuda.is_available():
        assert "no CUDA device" in done.stdout
        return
    assert "SHORT FORM" in done.stdout
    figures = json.loads(path.read_text())["figures"]
    assert figures.keys() - MAYBE.get(name, set()) == FIGURES[name]
    assert all(math.isfinite(figures[figure]) for figure in FIGURES[name])


@pytest.mark.slow
@pytest.mark.statistical
def test_the_benchmark_of_validity_reports_every_figure(tmp_path, request):
    path = tmp_path / "figures.json"
    draws = 60 if request.config.getoption("full") else 15
    command = [sys.executable, FOLDER / "validity.py", "--seed", "4", "--draws", str(draws)]
    subprocess.run([*command, "--json", path], check=True, capture_output=True)
    figures = json.loads(path.read_text())["figures"]
    assert figures.keys() == FIGURES["validity"]
    assert figures["modes"] == 17
    assert all(figures[name] <= 1 / draws**0.5 for name in EXCESSES)  # 3 standard errors
