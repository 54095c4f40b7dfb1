"""The calls most users need: load a retriever, name a default one, retrieve."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, overload

from rcir.errors import NoRetriever
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.retriever import Retriever
from rcir.risk.options import Alpha, RequestOptions
from rcir.storage import is_uri

if TYPE_CHECKING:
    from rcir.data.images import ImageLike

RETRIEVER_VARIABLE = "RCIR_RETRIEVER"
chosen: Retriever | None = None  # by `use`, or RCIR_RETRIEVER


def load(
    source: str | os.PathLike[str], *, trust_code: bool = False, trust_servers: Collection[str] = ()
) -> Retriever:
    """Load a retriever, every file of it checked against its checksum.

    Args:
        source: a retriever folder, also one in a bucket ("s3://BUCKET/FOLDER"), which is downloaded
            once; or an MLflow URI: "runs:/RUN_ID/retriever" of a calibration,
            "models:/NAME@ALIAS" or "models:/NAME/VERSION" of a registered model.
        trust_code: import encoder and index classes outside rcir that the folder names, which runs
            their code.
        trust_servers: hosts of collections to connect to, with your credentials, if the folder
            names them; "*" for all. RCIR_TRUST_CODE=1 and RCIR_TRUST_SERVERS=HOST,HOST allow the
            same.

    Raises:
        NoRetriever: there is none.
        CorruptRetriever: it is incomplete or was changed.
        UntrustedFolder: it names a class or a server that is not allowed.

    Example:
        >>> retriever = load("runs/demo/retriever")
    """
    if not isinstance(source, str | os.PathLike):
        raise NoRetriever(f"{source!r} is not a folder or an MLflow URI")
    # Two letters at least before the colon: one is a Windows drive.
    if not is_uri(source) and re.match(r"[a-z][a-z0-9+.-]+:/", str(source)):
        from rcir import tracking

        trusting = partial(Retriever.load, trust_code=trust_code, trust_servers=trust_servers)
        return tracking.load_from(str(source), trusting)
    return Retriever.load(source, trust_code=trust_code, trust_servers=trust_servers)


def use(source: str | os.PathLike[str] | Retriever) -> Retriever:
    """Set the retriever that `rcir.retrieve` uses: a loaded one, or a source as for `load`.

    Raises:
        NoRetriever, CorruptRetriever: as `load` does.
    """
    global chosen
    chosen = source if isinstance(source, Retriever) else load(source)
    return chosen


@overload
def retrieve(
    query: ImageLike, alpha: Alpha, delta: float | None, **options: Unpack[RequestOptions]
) -> Retrieval: ...
@overload
def retrieve(
    query: list[Any] | tuple[Any, ...],
    alpha: Alpha,
    delta: float | None,
    **options: Unpack[RequestOptions],
) -> list[Retrieval]: ...
def retrieve(
    query: Any, alpha: Alpha, delta: float | None, **options: Unpack[RequestOptions]
) -> Any:
    """Retrieve with the retriever set by `use` or, before that, named by RCIR_RETRIEVER.

    Args:
        query: an image, or a list of images.
        alpha, delta, options: the guarantee, see `rcir.risk.make_request`.

    Raises:
        NoRetriever: no retriever is set.
        RcirError: as `Retriever.retrieve` does.

    Example:
        >>> retriever = use("runs/demo/retriever")
        >>> answer = retrieve("runs/demo/queries/easy.png", alpha=0.1, delta=0.1)
        >>> answer.guarantee.alpha
        0.1
    """
    return default_retriever().retrieve(query, alpha, delta, **options)


def default_retriever() -> Retriever:
    """Return the retriever set by `use` or, before that, named by RCIR_RETRIEVER; loaded once."""
    if chosen is not None:
        return chosen
    if source := os.environ.get(RETRIEVER_VARIABLE):
        return use(source)
    raise NoRetriever(
        f'no retriever: call rcir.use("FOLDER") or set {RETRIEVER_VARIABLE} (`rcir demo` makes one)'
    )
