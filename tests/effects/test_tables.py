"""Rows of tables whose effects other tests see: none is left out there."""

from sglang_lite.runtime.models.families import FAMILIES
from tests.runtime.media import seeing
from tests.runtime.models import test_families


def test_every_family_is_compared_with_transformers():
    compared = {getattr(kind, "__name__", kind) for kind, _ in test_families.FAMILIES.values()}
    missing = [
        name
        for name, family in FAMILIES.items()
        if compared.isdisjoint(family.architectures) and name not in seeing.FAMILIES
    ]
    assert missing == [], "add a config to tests/runtime/models/test_families.py"
