import sglang_lite as sgl


@sgl.function
def conversation(s, questions="?" * 40):
    s += sgl.system("Be brief.")
    for question in questions:  # fault: outgrows-context
        s += sgl.user(f"Answer this: {question}")
        s += sgl.assistant(sgl.gen("answer", max_tokens=400))
