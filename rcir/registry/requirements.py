"""The packages that a retriever needs, for pip: rcir with the extras that load it."""

from __future__ import annotations

import re
from importlib.metadata import packages_distributions, version

from rcir.extras import EXTRAS
from rcir.index import IndexConfig
from rcir.retrieval.retriever import Retriever


def requirements(retriever: Retriever) -> list[str]:
    """Requirements of a retriever, each of the version that is installed here.

    Classes of one's own that it names, "package.module:Class", are required as the package that
    they are installed with; of one that is in none, nothing can be required.

    Example:
        >>> import numpy as np
        >>> requirements(Retriever.from_embeddings(np.eye(4)))[0].partition("==")[0]
        'rcir[train]'
    """
    extras = {"train"}  # which brings MLflow
    named = [IndexConfig.of(retriever.index).kind]
    if retriever.encoder is not None:
        config = retriever.encoder.config
        named.append(config.method)
        library = config.backbone.partition(":")[0]
        if ":" in config.backbone and library in EXTRAS:
            extras.add(EXTRAS[library])
    found = [f"rcir[{','.join(sorted(extras))}]=={version('rcir')}"]
    modules = {re.split("[.:]", name)[0] for name in named if ":" in name}
    if modules:
        places = packages_distributions()
        own = {package for module in modules for package in places.get(module, [])} - {"rcir"}
        found += [f"{package}=={version(package)}" for package in sorted(own)]
    return found
