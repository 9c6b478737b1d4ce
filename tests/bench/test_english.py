"""What benchmarks/english.py counts."""

import pytest

from benchmarks.english import main, measure

SOURCE = '''"""Module."""
first, second = one, two
first, second = second, first
a = b = 1


def fetched(x):
    """Returns what was fetched."""
    return x


def embed(x):
    """Text of x."""
    return {long}


class Queue:
    @property
    def closed(self):
        """Whether it is closed."""
        return True

    def told(self): pass  # fmt: skip
'''.replace("{long}", "x" * 100)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "module.py").write_text(SOURCE)
    return tmp_path


def test_each_habit_is_counted_once(folder):
    found = {name: (len(habit.places), habit.total) for name, habit in measure([folder]).items()}
    assert found["participles"] == (2, 3)  # fetched, told; not embed, nor the property
    assert found["verb first"] == (1, 2)
    assert found["packed"] == (1, 3)  # a swap is none
    assert found["long lines"] == (1, len(SOURCE.splitlines()))
    assert found["fmt: skip"][0] == 1
    assert found["statements"] == (7, sum(bool(line.strip()) for line in SOURCE.splitlines()))


def test_names_that_many_classes_share_are_counted(tmp_path):
    for count, expected in ((7, 0), (8, 8)):
        classes = [
            f"class C{i}:\n    def end(self): pass\n    def __len__(self): pass"
            for i in range(count)
        ]
        (tmp_path / "module.py").write_text("\n".join(classes))
        assert len(measure([tmp_path])["common names"].places) == expected


@pytest.mark.parametrize(
    ("docstring", "is_verb"),
    [
        ("Returns the text.", True),
        ("Names the parts.", True),
        ("Names of the parts.", False),
        ("Tokens of a text.", False),
        ("Records what is sent.", True),
        ("Records without text.", False),
        ("Reading of a file.", False),
    ],
)
def test_docstrings_begin_with_a_verb(tmp_path, docstring, is_verb):
    (tmp_path / "module.py").write_text(f'def f():\n    """{docstring}"""\n')
    assert len(measure([tmp_path])["verb first"].places) == is_verb


def test_a_figure_above_its_limit_fails_the_check(folder, capsys):
    with pytest.raises(SystemExit):
        main([str(folder), "--check"])
    assert "missed" in capsys.readouterr().out
    main([str(folder), "--list", "participles"])
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "fetched",
        "told",
    ]
