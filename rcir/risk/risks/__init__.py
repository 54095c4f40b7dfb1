"""The table of risks. One of your own is a subclass of `Risk` in a file, and a line here."""

from rcir.errors import InvalidConfig
from rcir.risk.risks.abstention import Abstention
from rcir.risk.risks.base import Risk
from rcir.risk.risks.false_discovery import FalseDiscovery
from rcir.risk.risks.miss import Miss
from rcir.risk.risks.recall import Recall

RISKS: dict[str, Risk] = {
    risk.key: risk
    for risk in (
        Miss(),
        Abstention(),
        Recall(),
        FalseDiscovery(),
    )
}


def risk_names() -> list[str]:
    """The names that a request may give."""
    return list(dict.fromkeys(risk.name for risk in RISKS.values()))


def find_risk(name: str, abstain: bool = False) -> Risk:
    """The risk of a name, of all answers or of those that an abstaining retriever gives.

    Raises:
        InvalidConfig: there is none.

    Example:
        >>> find_risk("recall").falls, find_risk("false-discovery").falls
        (True, False)
        >>> find_risk("precision")
        Traceback (most recent call last):
            ...
        rcir.errors.InvalidConfig: risk 'precision' is unknown; choose one of miss, recall, ...
    """
    names = risk_names()
    if not isinstance(name, str) or name not in names:
        raise InvalidConfig(f"risk {name!r} is unknown; choose one of {', '.join(names)}")
    for risk in RISKS.values():
        if (risk.name, risk.abstains) == (name, abstain):
            return risk
    possible = " or ".join(risk.name for risk in RISKS.values() if risk.abstains)
    raise InvalidConfig(f"abstain=True bounds the {possible} risk among answers, not {name}")


__all__ = ["RISKS", "Abstention", "FalseDiscovery", "Miss", "Recall", "Risk", "find_risk"]
