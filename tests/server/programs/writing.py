"""A batch that has not ended when something comes while it runs, however late that is."""

import httpx2

import sglang_lite as sgl
from sglang_lite.lang.chat_template import get_chat_template
from tests.children import interrupted

LONG = [{"question": "a"}] * 400


@sgl.function
def write(s, question):
    s += question + sgl.gen("a", ignore_eos=True)


def endpoint(url, retries=0):
    remote = sgl.RuntimeEndpoint(url, retries=retries)
    remote.chat_template = get_chat_template("chatml")
    return remote


def interrupted_batch(url):
    """Interrupts the batch on a server. True if the server answers afterwards."""
    remote = endpoint(url)

    def running():
        # 503 while the engine is too busy to tell
        answer = httpx2.get(f"{url}/v1/loads", timeout=60)
        return answer.is_success and answer.json()["loads"][0]["num_running_reqs"]

    interrupted(lambda: write.run_batch(LONG, backend=remote, max_new_tokens=400), running)
    return bool(write.run("a", backend=remote, max_new_tokens=3)["a"])
