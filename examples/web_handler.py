"""A web service: an async handler of Starlette that answers with a typed value.
Run: pip install 'sglang-lite[local,server]' && python examples/web_handler.py
Serve: uvicorn --app-dir examples web_handler:app"""

import asyncio

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import sglang_lite as sgl

mood = sgl.select("mood", [" positive", " negative"])


@sgl.function
async def judge(s: sgl.ProgramState, review: str) -> None:
    s += (
        f"Review: I loved it.\nMood: positive\n\nReview: Never again.\nMood: negative\n\nReview: {review}\nMood: "
        + mood
    )


async def handle(request: Request) -> JSONResponse:
    body = await request.json()
    if not isinstance(body, dict) or not isinstance(body.get("review"), str):
        return JSONResponse({"error": 'The body has to be {"review": "…"}.'}, status_code=400)
    state = await judge(body["review"]).arun(timeout=30)
    chosen = await state.get(mood)
    return JSONResponse(
        {"mood": chosen.strip(), "probability": round(state.selection(mood).probs[chosen], 2)}
    )


app = Starlette(routes=[Route("/mood", handle, methods=["POST"])])


async def ask() -> None:
    """Sends the application four requests at once, without a socket."""
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://app"
    ) as client:
        bodies = [
            {"review": "A wonderful film."},
            {"review": "Boring, and far too long."},
            {"text": "?"},
        ]
        for answer in await asyncio.gather(*(client.post("/mood", json=body) for body in bodies)):
            print(answer.status_code, answer.text)


if __name__ == "__main__":
    asyncio.run(ask())
