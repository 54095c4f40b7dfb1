"""Every place where options of a request appear derives from their declaration."""

import argparse

import pytest

from rcir.cli.retrieval import add_retrieve_arguments
from rcir.errors import InvalidConfig
from rcir.registry.logged_model import PARAMETERS
from rcir.risk import make_request, request_options
from rcir.serving.schemas import ExploreTerms, Terms


def test_flags_http_fields_and_model_parameters_are_the_options():
    parser = argparse.ArgumentParser()
    add_retrieve_arguments(parser)
    flags = vars(parser.parse_args(["query.png"]))
    defaults = {option.name: option.default for option in request_options()}
    assert {name: flags[name] for name in defaults} == defaults
    assert make_request().to_keywords() == make_request(**defaults).to_keywords() == defaults
    fields = {name: field.default for name, field in Terms.model_fields.items()}
    assert fields == defaults | {"monitored": True, "outside": 0}
    for name, field in ExploreTerms.model_fields.items():
        assert field.asdict() == Terms.model_fields[name].asdict()
    assert {name: value for name, (_, value) in PARAMETERS.items()} == defaults
    assert set(Terms.model_json_schema()["properties"]) == {*defaults, "monitored", "outside"}


def test_an_unknown_option_is_refused_everywhere():
    with pytest.raises(InvalidConfig, match="simultanous"):
        make_request(0.1, 0.1, simultanous=True)
    with pytest.raises(ValueError, match="simultanous"):
        Terms(simultanous=True)
