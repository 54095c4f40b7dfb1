"""Models in MLflow: logged from code, downloaded, registered under a name.

The retriever of a run is one artifact: its model, in which the retriever's folder lies beside the
code that loads it. Models have the names of trainings, so that MLflow's page tells them apart; for
`load_from`, `runs:/RUN/retriever` is the model of a run whatever its name.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rcir.errors import InvalidConfig, NoRetriever
from rcir.tracking.runs import (
    NO_PROGRESS_BAR,
    SHORT_WAITS,
    TrackedRun,
    find_tracked_run,
    mlflow_package,
    open_client,
    reachable,
    settings,
    store_uri,
    without_credentials,
)

MODEL = "retriever"  # the type of model, and what it is in the address of a run
INSIDE = f"artifacts/{MODEL}"  # the retriever's folder in the model's
IN_RUN = re.compile(rf"runs:/(\w+)/{MODEL}(?=/|$)")
MODEL_FILE = "MLmodel"
# By default, MLflow adds project files of the working directory to a model.
NO_PROJECT_FILES = {"MLFLOW_UV_AUTO_DETECT": "false"}
Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model; `model` is the id of the logged model."""

    name: str
    version: int
    model: str
    alias: str | None = None

    @property
    def uri(self) -> str:
        """The URI for `rcir.load` and MLflow: by alias, if there is one."""
        return f"models:/{self.name}" + (f"@{self.alias}" if self.alias else f"/{self.version}")


def log_model(
    run: TrackedRun,
    name: str,
    *,
    code: Path,
    folder: Path,
    files: Sequence[Path],
    signature: Mapping[str, Sequence[Mapping[str, Any]]],
    example: Mapping[str, Any],
    requirements: Sequence[str],
) -> str:
    """Log the retriever in a folder as a run's model with its parameters; return the model's id.

    In `name`, characters that MLflow does not allow become "-". `code` is the script that creates
    the model, with `mlflow.models.set_model`; `files` lie beside its description; `signature` is as
    MLflow describes it; `example` is a row of its input. The retriever is uploaded from its folder,
    without MLflow's copy. The model is not run to infer its requirements, and contains no path of
    this machine.
    """
    import pandas as pd
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model, ModelSignature

    experiment, params = run.experiment, run.params
    name = re.sub(r"[^\w-]+", "-", name)
    with run.client() as client:
        logged = client.create_logged_model(experiment, name, run.id, None, params, MODEL)
    model_id: str = logged.model_id
    model = Model(artifact_path=name, run_id=run.id, model_uuid=model_id, model_id=model_id)
    with (
        tempfile.TemporaryDirectory() as place,
        settings(NO_PROJECT_FILES),
        warnings.catch_warnings(),
    ):
        # About MLflow's own use of pandas and type hints.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", ".*Any type hint", UserWarning)
        local = Path(place) / MODEL
        mlflow_package().pyfunc.save_model(
            str(local),
            python_model=str(code),
            signature=ModelSignature.from_dict(
                {name: json.dumps(columns) for name, columns in signature.items()}
            ),
            input_example=pd.DataFrame([example]),
            pip_requirements=list(requirements),
            mlflow_model=model,
        )
        model.flavors["python_function"] |= {
            "artifacts": {MODEL: {"path": INSIDE, "uri": INSIDE}},
            "model_code_path": code.name,
        }
        model.save(str(local / MODEL_FILE))
        for file in files:
            shutil.copy(file, local)
        with run.client() as client:
            client.log_model_artifacts(model_id, str(local))
            client.log_model_artifacts(model_id, str(folder), INSIDE)
            client.finalize_logged_model(model_id, "READY")
            client.log_outputs(run.id, [LoggedModelOutput(model_id, 0)])
    return model_id


def find_model(run: TrackedRun) -> str | None:
    """Return the id of a run's latest model; None if it has none."""
    experiment = run.experiment
    with run.client() as client:
        models = client.search_logged_models([experiment], f"source_run_id = '{run.id}'")
    return next((model.model_id for model in models if model.model_type == MODEL), None)


def log_retriever(run: TrackedRun, folder: Path) -> None:
    """Replace the retriever of a run by that of a folder, in the run's model if it has one.

    Registered versions of that model change with it.
    """
    model = find_model(run)
    if model is None:
        run.log_folder(folder, MODEL)
        return
    with run.client() as client:
        client.log_model_artifacts(model, str(folder), INSIDE)


def load_from(uri: str, load: Callable[[Path], Loaded]) -> Loaded:
    """Call `load` with a retriever's folder, or that in a model, downloaded to a temporary place.

    `NoRetriever` if MLflow has nothing at the URI.
    """
    from mlflow.exceptions import MlflowException

    place = IN_RUN.match(uri)
    run = find_tracked_run(place[1]) if place else None
    if place and run and (model := find_model(run)):
        with run.client() as client:
            name = client.get_logged_model(model).name
        uri = f"runs:/{run.id}/{name}{uri[place.end() :]}"
    with tempfile.TemporaryDirectory() as folder, settings(NO_PROGRESS_BAR):
        try:
            place = mlflow_package().artifacts.download_artifacts(artifact_uri=uri, dst_path=folder)
        except (MlflowException, OSError, ImportError, ValueError) as error:
            reason = without_credentials(str(error))
            raise NoRetriever(
                f"MLflow has nothing at {without_credentials(uri)} ({reason}): check the run's id, "
                "or the name of the model and its version or alias, and MLFLOW_TRACKING_URI"
            ) from (error if reason == str(error) else None)
        local = Path(place)
        return load(local / INSIDE if (local / MODEL_FILE).is_file() else local)


def read_file(uri: str) -> bytes:
    """Return the content of a small file of a run or a model, without retrying for minutes."""
    with settings(SHORT_WAITS):
        return load_from(uri, Path.read_bytes)


def find_version(name: str, alias: str) -> RegisteredVersion | None:
    """Return the version of a registered model that has an alias, or None."""
    if not re.fullmatch(r"[\w-]+", alias) or re.fullmatch(r"latest|v\d+", alias.lower()):
        raise InvalidConfig(
            f"{alias!r} is not an alias: use letters, digits, - and _, but not 'latest' or 'v1'"
        )
    uri = store_uri()
    with reachable(uri, missing_ok=True):
        version = open_client(uri).get_model_version_by_alias(name, alias)
        model = str(version.source).removeprefix("models:/")  # MLflow does not return its id
        return RegisteredVersion(name, int(version.version), model, alias)
    return None


def create_version(
    name: str,
    run: TrackedRun,
    model: str,
    *,
    description: str,
    tags: Mapping[str, str],
    alias: str | None = None,
) -> RegisteredVersion:
    """Register a run's model as the next version of a name, and set an alias to it."""
    from mlflow.exceptions import MlflowException

    with run.client() as client:
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE":
                raise InvalidConfig(f"{name!r} is not a name of a model: {error}") from None
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = client.create_model_version(
            name, f"models:/{model}", run.id, dict(tags), description=description, model_id=model
        )
        if alias:
            client.set_registered_model_alias(name, alias, version.version)
    return RegisteredVersion(name, int(version.version), model, alias)
