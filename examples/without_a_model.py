"""Tests of a program without a model: a script answers in its place.
Run: python examples/without_a_model.py, or python -m pytest examples/without_a_model.py"""

import sglang_lite as sgl

grade = sgl.gen("grade", type=int, max_tokens=4)
better = sgl.gen("better", max_tokens=60)


@sgl.function
def improve(s: sgl.ProgramState, text: str) -> str:
    """Grades a text, and rewrites it if the grade is below 5."""
    s += sgl.user(f"Grade from 0 to 10: {text}") + sgl.assistant(grade)
    if s[grade] >= 5:
        return text
    s += sgl.user("Rewrite it.") + sgl.assistant(better)
    return s[better]


def test_a_good_text_stays() -> None:
    state = improve("Good.").run(backend=sgl.ScriptedBackend({"Grade": "9"}))
    assert state.ret_value == "Good."
    assert len(state.messages()) == 2


def test_a_bad_text_is_rewritten() -> None:
    state = improve("Bad.").run(backend=sgl.ScriptedBackend({"Grade": "2", "Rewrite": "Better."}))
    assert state.ret_value == "Better."


def test_the_model_is_asked_about_the_text() -> None:
    state = improve("Bad.").run(backend=sgl.ScriptedBackend({"Grade": "7"}))
    assert state.messages()[0] == {"role": "user", "content": "Grade from 0 to 10: Bad."}


def main() -> None:
    for test in (
        test_a_good_text_stays,
        test_a_bad_text_is_rewritten,
        test_the_model_is_asked_about_the_text,
    ):
        test()
        print(f"{test.__name__}: passed")


if __name__ == "__main__":
    main()
