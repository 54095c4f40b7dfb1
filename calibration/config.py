"""Configuration of `rcir calibrate`, `rcir certify` and `rcir evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from rcir.data.catalogue import DataConfig
from rcir.data.division import QueryDivision
from rcir.data.rejects import check_max_rejects
from rcir.errors import InvalidConfig
from rcir.index import DEPTH, IndexConfig, check_depth
from rcir.options import ALPHAS, DELTA
from rcir.retrieval.queries import Metric
from rcir.retrieval.tuning import CalibrationOptions, Tuning
from rcir.risk import Bound
from rcir.risk.selection import ScoreFunctionName

NO_CLUSTERS = "none"  # in place of a column of clusters


@dataclass(frozen=True)
class CalibrationConfig:
    """A calibration.

    Args:
        run: folder or URI of a training run, or the id of its MLflow run.
        output: folder or URI for `retriever`, `report.html`, `results.json` and `test.safetensors`,
            which `rcir compare` reads; the run's own unless given.
        score_function: how set size depends on the query; "auto" takes, for each risk, what needs
            the smallest sets at the same risk.
        query_uncertainty: "encoder", "cosine", "gap", "vote", "spread", "agreement" or "overlap",
            see docs/methods.md; "auto" chooses the one with the smallest sets.
        bound: confidence bound; "binomial" is exact, "hoeffding" that of Cai et al. (AAAI 2025).
        group: attribute of the queries, such as a camera; the retriever then answers per group.
        cluster: attribute of the queries, such as a video or a patient, whose queries are not
            independent of each other; whole clusters are then divided, and each counts once.
        key: attribute of gallery and queries that names the part of the gallery, such as a site or
            a tenant, that a query is searched in; the groups of the queries without `group`.
        queries: "new-labels" divides the queries so that tuning, calibration and test queries have
            different labels, "shared-labels" so that they share them; as in `data.options` of the
            run unless given.
        index: kind and options of the index, see `rcir.index.IndexConfig`.
        depth: candidates searched per query; no set is larger.
        alphas: levels to report. The retriever answers any.
        delta: probability of misleading calibration queries to report. The retriever answers any.
        max_rejects: unreadable images that are left out: a number, or a share below 1. All of them
            are listed in `calibration-rejects.csv` in the output, also if there are more, which is
            an error.
        num_workers: Ray workers that embed gallery and queries; 0 embeds in this process. An
            interrupted calibration continues where it stopped.
        use_gpu: one GPU per worker; with 0 workers, the GPU of this process.
        model: in place of a run, a model that is not trained: timm:NAME, open_clip:NAME/TAG or
            transformers:NAME. It becomes a run without epochs, to be compared with others.
        checkpoint: .safetensors file with the weights of the model, for a machine without a
            network.
        data: the data set that a model searches; a run has its own.
    """

    run: str | None = None
    output: str | None = None
    score_function: ScoreFunctionName = "auto"
    query_uncertainty: str = "auto"
    bound: Bound = "binomial"
    group: str | None = None
    cluster: str | None = None
    key: str | None = None
    queries: QueryDivision | None = None
    index: IndexConfig = field(default_factory=IndexConfig)
    depth: int = DEPTH
    alphas: tuple[float, ...] = ALPHAS
    delta: float = DELTA
    max_rejects: float = 0
    num_workers: int = 0
    use_gpu: bool = False
    model: str | None = None
    checkpoint: str | None = None
    data: DataConfig | None = None

    def __post_init__(self) -> None:
        calibration_options(self)
        if (self.run is None) == (self.model is None):
            raise InvalidConfig("pass either --run, the folder of a training, or --model")
        if self.run is not None and not (self.checkpoint is None and self.data is None):
            raise InvalidConfig("a run has its weights and data set: leave out checkpoint and data")
        check_max_rejects(self.max_rejects)
        if self.num_workers < 0:
            raise InvalidConfig(f"num_workers is {self.num_workers}; at least 0")
        check_depth(self.depth)


@dataclass(frozen=True)
class EvaluationConfig:
    """A measurement of a calibrated retriever on the test queries of its data set.

    Args:
        retriever: folder or MLflow URI of the retriever.
        output: folder for `report.html` and `results.json`; `evaluation` beside the retriever
            unless given.
        alphas: levels to measure.
        delta: probability of misleading calibration queries to measure at.
    """

    retriever: str
    output: str | None = None
    alphas: tuple[float, ...] = ALPHAS
    delta: float = DELTA

    def __post_init__(self) -> None:
        calibration_options(self)


@dataclass(frozen=True)
class CertificationConfig:
    """A calibration of vectors in files, or of pictures and a model.

    Args:
        gallery: vectors to search: .parquet, .npz, .npy beside a .csv, or a folder of shards; or an
            existing collection, such as lancedb:PATH#TABLE (`rcir.attach`). With a model, pictures
            to search: a folder of class folders, or a table with their paths.
        queries: labelled vectors or pictures that are queries; unless given, each item of the
            gallery is a query, and is left out of its own search.
        model: what embeds pictures: timm:NAME, open_clip:NAME/TAG, transformers:NAME, or the folder
            of a training.
        checkpoint: .safetensors file with the weights of the model, for a machine without a
            network.
        max_rejects: unreadable pictures that are left out: a number, or a share below 1, of which
            any above 0 allows at least one.
        output: folder for `retriever`, `report.html`, `results.json` and `test.safetensors`, and
            for the vectors of pictures.
        matches: table of true matches with the columns query and gallery, of ids; where there are
            neither labels nor places.
        radius: distance up to which places match.
        metric: how vectors are compared.
        cluster: column that names the cluster of each vector, such as the encounter in which an
            animal was photographed; "none" takes the vectors for independent. Unless given, the
            column `cluster` if there is one; of gallery items that are queries, else the moments in
            which they were photographed, found by vectors and capture times.
        key: column of gallery and queries that names the part of the gallery, such as a site or a
            tenant, that a query is searched in.
        encounter: column of the queries, whose rows with the same value are pictures of one query.
        score_function: how set size depends on the query; "auto" takes, for each risk, what needs
            the smallest sets at the same risk.
        tuning: what fits the set sizes: a quarter of the queries, those of a quarter of the labels,
            or the gallery's items, so that more queries calibrate. "auto" takes the items if they
            can tune and there are fewer than 200 queries.
        depth: candidates searched per query; no set is larger.
        index: of the gallery, see `rcir.index.IndexConfig`; of a collection, options of its search.
        alphas: levels to report. The retriever answers any.
        delta: probability of misleading calibration queries to report. The retriever answers any.
        seed: decides which queries tune, calibrate and measure, which the guarantee then states;
            unless given, the queries alone decide.
    """

    gallery: str
    queries: str | None = None
    model: str | None = None
    checkpoint: str | None = None
    output: str = "runs/certified"
    matches: str | None = None
    radius: float | None = None
    metric: Metric = "cosine"
    cluster: str | None = None
    key: str | None = None
    encounter: str | None = None
    score_function: str = "auto"
    tuning: Tuning = "auto"
    depth: int = DEPTH
    index: IndexConfig = field(default_factory=IndexConfig)
    alphas: tuple[float, ...] = ALPHAS
    delta: float = DELTA
    seed: int | None = None
    max_rejects: float = 0.01

    def __post_init__(self) -> None:
        calibration_options(self)
        check_max_rejects(self.max_rejects)
        check_depth(self.depth)
        if self.checkpoint is not None and self.model is None:
            raise InvalidConfig("checkpoint holds the weights of a model: name it with --model")

    @property
    def cluster_column(self) -> str | None:
        """The column of clusters that is named, if one is."""
        return None if self.cluster == NO_CLUSTERS else self.cluster


def calibration_options(
    config: CalibrationConfig | EvaluationConfig | CertificationConfig,
) -> CalibrationOptions:
    """Return the options of a calibration that a configuration has, checked."""
    names = {each.name for each in fields(CalibrationOptions)} & vars(config).keys()
    return CalibrationOptions(**{name: getattr(config, name) for name in names})
