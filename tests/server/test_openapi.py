"""The OpenAPI document: requests made from it have answers that it has."""

import os

import hypothesis
import pytest
import schemathesis
from schemathesis import checks

import sglang_lite as sgl
from sglang_lite.server import openapi
from sglang_lite.server.routes import ROUTES
from tests.server.conftest import SETTINGS, TEMPLATE, serving

EXAMPLES = int(os.environ.get("SGLANG_LITE_OPENAPI", "3"))


schema = schemathesis.openapi.from_dict(openapi.openapi_document(ROUTES))
OPERATIONS = [found.ok() for found in schema.get_all_operations()]
# It would write any folder, change the log of all tests, or all others would wait.
LEFT_OUT = (
    "/start_profile",
    "/configure_logging",
    "/pause_generation",
    "/sleep",
    "/release_memory_occupation",
)
OPERATIONS = [found for found in OPERATIONS if not any(path in found.label for path in LEFT_OUT)]


@pytest.fixture(scope="session")
def short(folder):
    """A server whose answers are short."""
    settings = {**SETTINGS, "context_length": 48, "chat_template": TEMPLATE, "in_process": True}
    with sgl.Engine(folder, **settings) as engine, serving(engine) as url:
        yield url


@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
def test_answers_are_documented_and_none_is_a_failure_of_the_server(operation, short):
    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), derandomize=True,
        database=None,
    )  # fmt: skip
    def check(case):
        response = case.call(base_url=short)
        case.validate_response(
            response,
            checks=[
                checks.not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_headers_conformance,
                checks.response_schema_conformance,
            ],
        )

    check()


def test_every_route_is_documented(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {route.path.replace(":path", "") for route in ROUTES} == paths.keys()
