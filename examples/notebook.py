# %% [markdown]
# A notebook as a Python file: VS Code and Jupyter (with jupytext) run each cell, and show its last
# line as HTML. Run: python examples/notebook.py

# %%
import sglang_lite as sgl

mood = sgl.select("mood", ["positive", "negative"])


@sgl.function
def judge(s: sgl.ProgramState, review: str) -> None:
    s += f"Review: {review}\nThe review is " + mood


judge  # its signature and graph

# %%
state = judge("I laughed all evening.").run()
state  # the text, coloured by origin

# %%
state.selection(mood)  # a row for each choice

# %%
states = judge.run_batch([("A wonderful film.",), ("Boring, and far too long.",)])
states  # a table

# %% As a script, it prints what the cells would show.
for shown in (judge, state, state.selection(mood), states):
    print(repr(shown))
