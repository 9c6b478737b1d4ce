"""Every route of a server has an effect that its answer or a later one shows, and none if the table
lacks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sglang_lite.server import app, playground
from sglang_lite.server import routes as table
from sglang_lite.server.settings import ServerSettings
from tests.effects.route_effects import ROUTES, TOKEN, Client
from tests.server.conftest import Running

ROWS = {
    f"{method} {route.path}": route
    for route in (*table.ROUTES, *playground.ROUTES)
    for method in route.methods
}
CASES = [pytest.param(name, *ROUTES[name], id=name) for name in sorted(ROUTES)]


def test_every_route_has_a_case():
    # by one of its methods: they have one handler
    shown = {id(ROWS[name]) for name in ROUTES if name in ROWS}
    missing = sorted(name for name, row in ROWS.items() if id(row) not in shown)
    assert missing == [], "add a case to tests/effects/route_effects.py"
    assert ROUTES.keys() <= ROWS.keys()


@pytest.mark.parametrize(("name", "server", "shows"), CASES)
def test_a_route_has_an_effect_and_none_without_its_row(name, server, shows, running):
    served: Running = running(server)
    client = Client(served.url, served.service.engine)
    assert shows(client)
    with without_row(served, name), pytest.raises(AssertionError, match="does not"):
        assert shows(client), "without its row, the route does not show its effect"


@contextmanager
def without_row(served: Running, name: str) -> Iterator[None]:
    """Takes a route out of the table of a server that runs."""
    own, row = served.app, ROWS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "ROUTES", tuple(each for each in table.ROUTES if each is not row))
        patch.setattr(
            playground, "ROUTES", tuple(each for each in playground.ROUTES if each is not row)
        )
        other = app.application(served.service.engine, ServerSettings(), TOKEN)
        other.state.service = served.service
        patch.setattr(own, "_endpoints", vars(other)["_endpoints"])
        patch.setattr(own.router, "routes", other.router.routes)
        yield
