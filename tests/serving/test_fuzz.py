"""Requests of every kind that the description allows, and of some that it does not."""

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rcir.serving import Settings, create_app
from rcir.serving.sources import source_of

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


TOKEN = "a-token-of-enough-letters"  # with one, any host is answered
BEARER = {"authorization": f"Bearer {TOKEN}"}
KINDS = ("vectors", "retriever")
OPERATIONS = {
    *("POST /retrieve", "POST /retrieve/batch", "POST /explore", "GET /guarantees"),
    *("GET /items/{item}/image", "GET /sample", "POST /feedback", "GET /monitor"),
    *("GET /health", "GET /ready", "GET /metrics"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_answers_as_it_is_described(kind, request, tmp_path):
    place = request.getfixturevalue(kind).save(tmp_path / kind)
    settings = Settings(store=tmp_path / "feedback.db", poll=0, token=TOKEN)
    app = create_app(source_of(place), settings)
    described = schemathesis.openapi.from_asgi("/openapi.json", app, headers=BEARER)
    asked = set()
    for operation in described.get_all_operations():
        known = operation.ok()

        @hypothesis.given(case=known.as_strategy())
        @hypothesis.settings(
            max_examples=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def each(case):
            case.call_and_validate(checks=CHECKS, headers=BEARER)

        each()
        asked.add(known.label)
    assert asked == OPERATIONS
