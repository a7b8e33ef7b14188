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
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from transformers import TextStreamer

from tiered import TieredStore
from tiered.integrations.stop_strings import StopStrings
from tiered.integrations.transformers import open_model, open_tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("store", help="folder of the store")
parser.add_argument("--dram", default="2GiB", help="host memory for weights (default: %(default)s)")
parser.add_argument("--port", type=int, default=8000, help="port of 127.0.0.1 (default: %(default)s)")
options = parser.parse_args()
app, worker = FastAPI(), ThreadPoolExecutor(1)
store = TieredStore.open(options.store, dram=options.dram, access="read")
model, tokenizer = open_model(store), open_tokenizer(store)


class Text(TextStreamer):
    def __init__(self, tell, stops):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tell, self.stops = tell, StopStrings(stops)

    def on_finalized_text(self, text, stream_end=False):
        self.tell({"content": self.stops.add(text) + (self.stops.end() if stream_end else "")}, None)


async def pieces(request, ids, most, stops, drawn):
    """Yield the answer in pieces, each with the reason why it is the last one, or None."""
    made, gone, loop = asyncio.Queue(), Event(), asyncio.get_running_loop()
    text = Text(lambda *piece: loop.call_soon_threadsafe(made.put_nowait, piece), stops)

    def ended(ids, scores, **more):
        return torch.tensor([text.stops.found or gone.is_set()])

    def generate():
        if not gone.is_set():  # the client may have gone while it waited
            given = {**ids, **drawn, "streamer": text, "stopping_criteria": [ended], "pad_token_id": 0}
            count = model.generate(**given, max_new_tokens=most).shape[1] - ids["input_ids"].shape[1]
            text.tell({}, "length" if count == most and not text.stops.found else "stop")

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
    return {"object": "list", "data": [{"id": "model", "object": "model", "created": 0, "owned_by": "tiered"}]}


@app.post("/v1/chat/completions")
async def complete(request: Request):
    try:
        body = await request.json()
        ids = tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        most = int(body.get("max_completion_tokens") or body.get("max_tokens") or 256)
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else list(map(str, body.get("stop") or []))
        heat = float(body.get("temperature") or 0)
        if not 0 < most <= model.config.max_position_embeddings - ids["input_ids"].shape[1]:
            raise ValueError(f"{ids['input_ids'].shape[1]} tokens and {most} more are too many for this model")
    except Exception as error:  # no JSON, no messages, or none that the chat template takes
        raise HTTPException(400, f"{type(error).__name__}: {error}") from error
    drawn = {"do_sample": True, "temperature": heat} if heat else {"do_sample": False}
    answer = pieces(request, ids, most, stops, drawn)
    head = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": "model"}

    async def events():
        async for delta, end in answer:
            choice = {"index": 0, "delta": delta, "finish_reason": end}
            yield f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    if body.get("stream"):
        return StreamingResponse(events(), media_type="text/event-stream")
    whole = [piece async for piece in answer]
    message = {"role": "assistant", "content": "".join(delta.get("content", "") for delta, _ in whole)}
    choice = {"index": 0, "message": message, "finish_reason": whole[-1][1] if whole else "stop"}
    return {**head, "object": "chat.completion", "choices": [choice]}


uvicorn.run(app, port=options.port)
worker.shutdown()
store.close()
