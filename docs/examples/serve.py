"""Serve a model that is in a store by an endpoint for the clients of OpenAI's API: chat completions, whole or streamed.

    pip install '.[hf,serve]'
    tiered import my-llama store/                     # once
    python docs/examples/serve.py store/ --dram 4GiB

One thread computes with the model, and requests wait in its queue. A client that goes away ends its generation.
"""

import argparse
import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, StreamingResponse
    from transformers import TextStreamer
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[hf,serve]' brings what a server needs") from error

from tiered import MisuseError, TieredError, TieredStore
from tiered.integrations.chat_request import ChatRequest, refusal
from tiered.integrations.stop_strings import StopStrings
from tiered.integrations.transformers import open_model, open_tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("store", help="folder of the store")
parser.add_argument("--dram", default="2GiB", help="host memory for weights (default: %(default)s)")
parser.add_argument("--model", help="the model's name, where the store has several")
parser.add_argument("--port", type=int, default=8000, help="port of 127.0.0.1 (default: %(default)s)")
options = parser.parse_args()
app, worker, name = FastAPI(), ThreadPoolExecutor(1), options.model or "model"
try:
    store = TieredStore.open(options.store, dram=options.dram, access="read")
    model, tokenizer = open_model(store, name=options.model), open_tokenizer(store, name=options.model)
except TieredError as error:
    raise SystemExit("serve.py: " + str(error).replace("name=", "--model")) from None


class Text(TextStreamer):
    def __init__(self, tell, stops):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tell, self.stops = tell, StopStrings(stops)

    def on_finalized_text(self, text, stream_end=False):
        self.tell(self.stops.add(text) + (self.stops.end() if stream_end else ""), None)


async def pieces(request, asked, ids, most):
    """Yield the answer in pieces, each with None, and last how many tokens it has, with the reason why it ended."""
    made, gone, loop = asyncio.Queue(), Event(), asyncio.get_running_loop()
    text = Text(lambda *piece: loop.call_soon_threadsafe(made.put_nowait, piece), asked.stops)

    def ended(ids, scores, **more):
        return torch.tensor([text.stops.found or gone.is_set()])

    def generate():
        if not gone.is_set():  # the client may have gone while it waited
            given = {**ids, **asked.drawn, "streamer": text, "stopping_criteria": [ended], "pad_token_id": 0}
            torch.manual_seed(torch.seed() if asked.seed is None else asked.seed)
            count = model.generate(**given, max_new_tokens=most).shape[1] - ids["input_ids"].shape[1]
            text.tell(count, "length" if count == most and not text.stops.found else "stop")

    work = loop.run_in_executor(worker, generate)
    work.add_done_callback(lambda _: made.put_nowait(None))
    try:
        while not await request.is_disconnected():
            try:
                piece = await asyncio.wait_for(made.get(), 1)
            except asyncio.TimeoutError:
                continue
            if piece is None:
                await work  # raises what generate() raised
                return
            yield piece
    finally:
        gone.set()


@app.get("/v1/models")
def models():
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "tiered"}]}


@app.exception_handler(MisuseError)
def refuse(request, error):
    return JSONResponse(refusal(error), 400)


@app.post("/v1/chat/completions")
async def complete(request: Request):
    asked = ChatRequest.of(await request.body())
    ids, most = asked.prompt(tokenizer, model.config.max_position_embeddings)
    answer, prompted = pieces(request, asked, ids, most), ids["input_ids"].shape[1]
    head = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": name}

    def usage(count):
        return {"prompt_tokens": prompted, "completion_tokens": count, "total_tokens": prompted + count}

    def event(**more):
        return f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', **more})}\n\n"

    async def events():
        async for piece, end in answer:
            delta = {} if end else {"content": piece}
            yield event(choices=[{"index": 0, "delta": delta, "finish_reason": end}])
            if end and asked.usage:
                yield event(choices=[], usage=usage(piece))
        yield "data: [DONE]\n\n"

    if asked.stream:
        return StreamingResponse(events(), media_type="text/event-stream")
    *whole, (count, end) = [piece async for piece in answer] or [(0, "stop")]  # none: the client has gone
    message = {"role": "assistant", "content": "".join(piece for piece, _ in whole)}
    choices = [{"index": 0, "message": message, "finish_reason": end}]
    return {**head, "object": "chat.completion", "choices": choices, "usage": usage(count)}


uvicorn.run(app, port=options.port)
worker.shutdown()
store.close()
