"""The picture of a measurement: bars are as long as the limit's share, and whoever has no figure
has no bar.
"""

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.picture import draw, picture
from sglang_lite.bench.peers import PeerResults
from sglang_lite.bench.records import BenchReport, Machine, Row, Runs
from sglang_lite.bench.workloads import WORKLOADS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PICTURES = sorted((BENCHMARKS / "pictures").glob("*.json"))
RESULTS = (BENCHMARKS / "RESULTS.md").read_text()
MACHINE = Machine(
    "H200 <1>", 1, "2.11", "qwen3-0.6b", "bfloat16", 4e12, 8e14, None, 2.0, 9.0, 0, 100_000
)


def rows(*ideals):
    return tuple(
        Row(f"work{i}", 64, ideal, Runs(3.0, (2.0, 4.0, 1.0), 10), None)
        for i, ideal in enumerate(ideals)
    )


def drawn(report, tmp_path):
    """Bars' widths by their title, and all texts, of the picture that the command draws."""
    report.save(tmp_path / "report.json")
    draw(str(tmp_path / "report.json"), str(tmp_path / "report.svg"))
    svg = ElementTree.parse(tmp_path / "report.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [(r[0].text, float(r.get("width", ""))) for r in svg.iter(space + "rect") if len(r)]
    return bars, [text.text for text in svg.iter(space + "text")]


def test_bars_are_as_long_as_the_share_of_the_limit(tmp_path):
    peers = {
        "vllm": PeerResults("1", {"work0": 4.0}, ""),
        "sglang": PeerResults("", {}, "can't be imported"),
    }
    bars, texts = drawn(BenchReport(MACHINE, rows(1.0, 0.5), peers), tmp_path)
    lengths = dict(bars)
    assert [name for name, _ in bars] == ["sglang_lite: 2 s", "vLLM: 4 s", "sglang_lite: 2 s"]
    assert bars[0][1] == 2 * lengths["vLLM: 4 s"] == pytest.approx(2 * bars[2][1])
    assert {"2 s, 50%", "4 s, 25%", "2 s, 25%", "vLLM: not measured", "work0", "work1"} <= set(
        texts
    )
    assert any("H200 <1>" in text for text in texts)
    assert any("share of what the hardware allows" in text for text in texts)
    assert not any("SGLang" in text.split() for text in texts)  # nothing of it was measured


def test_without_a_limit_the_fastest_is_all(tmp_path):
    bars, texts = drawn(
        BenchReport(MACHINE, rows(None), {"vllm": PeerResults("1", {"work0": 1.0}, "")}), tmp_path
    )
    assert bars[1][1] == 2 * bars[0][1]
    assert {"1 s, 100%", "2 s, 50%"} <= set(texts)
    assert any("share of the fastest" in text for text in texts)


def test_workloads_are_told_in_words(tmp_path):
    known = tuple(Row(name, 64, 1.0, Runs(3.0, (2.0,), 10), None) for name in WORKLOADS)
    _, texts = drawn(BenchReport(MACHINE, known, {}), tmp_path)
    assert not WORKLOADS.keys() & set(texts)


def figures_of(text):
    """Numbers of a text, and the middles of two numbers that stand side by side (a range, two
    runs).
    """
    numbers = [
        (float(m[0].replace(",", "")), m.start(), m.end())
        for m in re.finditer(r"\d+(?:,\d{3})*(?:\.\d+)?", text)
    ]
    pairs = itertools.pairwise(numbers)
    middles = [
        (a + b) / 2 for (a, _, end), (b, start, _) in pairs if text[end:start] in ("–", ", ")
    ]
    return [*middles, *(number for number, _, _ in numbers)]


def test_a_table_has_its_own_units_and_limits():
    rows = [
        {"words": ["fast"], "unit": "tokens/s", "figures": {"sglang_lite": 1200, "<peer>": 600}},
        {"words": ["short"], "unit": "s", "less": True, "limit": 0.5, "figures": {"<peer>": 2}},
    ]
    svg = ElementTree.fromstring(picture({"title": "Both", "note": "A note.", "rows": rows}))
    bars = [rect for rect in svg.iter("{http://www.w3.org/2000/svg}rect") if len(rect)]
    first = float(bars[0].attrib["width"])
    assert [(bar[0].text, float(bar.attrib["width"]) / first, bar.get("class")) for bar in bars] == [
        ("sglang_lite: 1,200 tokens/s", 1, "c0"), ("<peer>: 600 tokens/s", 0.5, "c1"), ("<peer>: 2 s", 0.25, "c1"),
    ]  # fmt: skip
    assert {"Both", "A note.", "1,200 tokens/s", "<peer>"} <= {
        text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")
    }


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.stem)
def test_a_picture_of_the_results_is_drawn_from_its_file_and_shown(file):
    report = json.loads(file.read_text())
    assert picture(report) == file.with_suffix(".svg").read_text()
    assert f"(pictures/{file.stem}.svg)" in RESULTS


@pytest.mark.parametrize(
    "file", [file for file in PICTURES if "title" in file.read_text()], ids=lambda file: file.stem
)
def test_a_picture_of_a_table_has_figures_of_its_section(file):
    table = json.loads(file.read_text())
    told = figures_of(RESULTS.partition(f"\n## {table['section']}\n")[2].partition("\n## ")[0])
    for row in table["rows"]:
        for figure in (*row["figures"].values(), row.get("limit", 100)):
            assert figure == 100 or figure in told, (row["words"], figure)


@pytest.mark.parametrize(
    "file",
    [file for file in PICTURES if "title" not in file.read_text()],
    ids=lambda file: file.stem,
)
def test_a_picture_of_workloads_has_the_figures_of_their_table(file):
    report = json.loads(file.read_text())
    table = RESULTS.partition("| workload | | ours | vLLM |")[2].partition("\n\n")[0]
    told = figures_of(table)
    for row in report["rows"]:
        name, requests = row["workload"], row["requests"]
        assert requests["median"] == pytest.approx(
            sum(requests["seconds"]) / len(requests["seconds"]), abs=1e-4
        )
        theirs = (peer["seconds"].get(name) for peer in report["peers"].values())
        for seconds in (
            row["ideal"],
            *requests["seconds"],
            *(figure for figure in theirs if figure is not None),
        ):
            figure = {"w1": row["tokens"] / seconds, "decode1": seconds / row["tokens"] * 1e3}.get(
                name, seconds
            )
            assert any(figure == pytest.approx(number, rel=1e-3) for number in told), (name, figure)
