"""The data of others that constraints are held against (data/README.md)."""

import itertools
import json
import lzma
from functools import lru_cache
from pathlib import Path

DATA = Path(__file__).with_name("data")
DRAFTS = {"2020-12": None, "draft7": "http://json-schema.org/draft-07/schema#"}


@lru_cache(maxsize=1)
def _official():
    with lzma.open(DATA / "official_suite.json.xz", "rt", encoding="utf-8") as file:
        return json.load(file)


def official_groups(draft):
    """Groups of the official suite as (name, schema, cases); a schema that does not name its draft is made to."""
    for file, groups in _official()[draft].items():
        for group in groups:
            schema = group["schema"]
            if DRAFTS[draft] and isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            yield f"{file}: {group['description']}", schema, group["tests"]


def maskbench(stride=1):
    """Real-world schemas, every `stride`th, as (id, schema, cases)."""
    with lzma.open(DATA / "maskbench_sample.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in itertools.islice(lines, 0, None, stride):
            row = json.loads(line)
            yield row["id"], row["schema"], row["tests"]
