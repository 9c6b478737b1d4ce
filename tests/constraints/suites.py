"""The data of others that constraints are held against (data/README.md)."""

import itertools
import json
import lzma
import re
from functools import lru_cache
from pathlib import Path

DATA = Path(__file__).with_name("data")
DOCS = Path(__file__).parents[2] / "docs/constraints.md"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_REMOTE = "http://localhost:1234/"


@lru_cache(maxsize=1)
def _official():
    with lzma.open(DATA / "official_suite.json.xz", "rt", encoding="utf-8") as file:
        return json.load(file)


def official_groups(draft, part="drafts"):
    """Groups of the official suite, or of its "optional" part, as (name, schema, resources, cases);
    a schema that does not name its draft is made to. The resources are the suite's remotes, where
    the schema refers to some.
    """
    for file, groups in _official()[part][draft].items():
        for group in groups:
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            resources = _remotes(draft) if _REMOTE in json.dumps(schema) else None
            yield f"{file}: {group['description']}", schema, resources, group["tests"]


def parts_accepted_wrongly():
    """Parts of the official suite of which the docs say that wrong documents are accepted, as
    "draft7/content".
    """
    return set(re.findall(r"^\| `(draft[^`]+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE))


@lru_cache(maxsize=len(DRAFTS))
def _remotes(draft):
    """Remotes of the suite by URI, of a draft and of none."""
    found = {}
    for path, schema in _official()["remotes"].items():
        of = path.split("/")[0]
        said = schema.get("$schema", DRAFTS[draft]) if isinstance(schema, dict) else DRAFTS[draft]
        if (of == draft or of not in DRAFTS) and said.rstrip("#") == DRAFTS[draft].rstrip("#"):
            found[_REMOTE + path] = schema
    return found


def maskbench(stride=1):
    """Real-world schemas, every `stride`th, as (id, schema, cases)."""
    with lzma.open(DATA / "maskbench_sample.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in itertools.islice(lines, 0, None, stride):
            row = json.loads(line)
            yield row["id"], row["schema"], row["tests"]


def regexes():
    """Patterns of public Python code, each with its package, version and licence, and whether it is
    refused.
    """
    with lzma.open(DATA / "regexes.jsonl.xz", "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)
