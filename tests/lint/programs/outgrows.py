import sglang_lite as sgl


@sgl.function
def conversation(s):
    s += sgl.system("Be brief.")
    for number in range(100):  # fault: outgrows-context
        s += sgl.user(f"Write chapter {number}.")
        s += sgl.assistant(sgl.gen("chapter", max_tokens=8000))
