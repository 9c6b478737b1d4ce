"""How many connections a server may have open."""

import resource

import pytest

from sglang_lite.server.http.sockets import raise_open_file_limit
from tests.children import in_a_child


def limit_after(soft, hard):
    """Limit of open files after a server with 500 connections was started under these limits."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raise_open_file_limit(500)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize(
    ("soft", "hard", "after"), [(300, 2000, 756), (1500, 2000, 1500), (300, 600, 600)]
)
def test_the_limit_of_open_files_is_raised_as_far_as_needed_and_allowed(soft, hard, after):
    assert in_a_child(limit_after, soft, hard) == after


def test_a_limit_that_is_too_low_is_told_with_a_number_that_fits(caplog, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (600, 600))
    raise_open_file_limit(500)
    assert "this system allows 600 open files: start with --max-connections 344" in caplog.text
