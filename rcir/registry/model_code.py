"""The retriever as MLflow's model. Each logged model contains a copy of this script.

MLflow runs it to load the model; the answers are those of the version of rcir that is installed.
"""

from typing import Any

import mlflow
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from rcir.errors import RcirError
from rcir.registry import answer_table
from rcir.retrieval.retriever import Retriever


class RetrieverModel(PythonModel):
    """Answers tables of queries with `Retriever.retrieve`, see `rcir.registry.logged_model`."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the retriever, and check its checksums.

        Its classes and servers are trusted: loading an MLflow model runs its code anyway.
        """
        self.retriever = Retriever.load(
            context.artifacts["retriever"], trust_code=True, trust_servers=["*"]
        )

    def predict(
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Answer a table of queries; raise `MlflowException` for a refused request."""
        try:
            return answer_table(self.retriever, model_input, params or {})
        except RcirError as error:
            # MLflow's server hides the message of any other exception behind a stack trace.
            message = f"{type(error).__name__}: {error}"
            raise MlflowException.invalid_parameter_value(message) from error


mlflow.models.set_model(RetrieverModel())
