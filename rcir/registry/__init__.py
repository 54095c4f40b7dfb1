"""Retrievers in MLflow's model registry: a model with its card, versions, and who is champion."""
