"""Penstock with nothing but nats-py: OpenAI JSON out, chunks in. `python examples/raw_nats.py "Why?" [SUBJECT [NATS_URL]]`"""

import asyncio
import json
import os
import sys
from pathlib import Path

import nats


async def main(prompt: str, subject: str = "penstock.v1.chat.smollm2-135m-instruct", url: str = "nats://127.0.0.1:4222"):
    home = Path(os.environ.get("PENSTOCK_HOME") or Path.home() / ".cache/penstock")  # `penstock up` keeps credentials there
    login = next((json.loads(file.read_text()) for file in home.glob(f"run/*-{url.rsplit(':')[-1]}/client.json")), {})
    client = await nats.connect(url, **{key: login[key] for key in ("user", "password", "inbox_prefix") if key in login})
    replies = await client.subscribe(inbox := client.new_inbox())
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 200}
    await client.publish(subject, json.dumps(body).encode(), reply=inbox)
    while not {"Penstock-Final", "Status"} & set((reply := await replies.next_msg(60)).headers or ()):
        print(json.loads(reply.data)["choices"][0]["delta"].get("content", ""), end="", flush=True)
    print("\n", reply.data.decode() or f"nobody serves {subject}")  # the last one: usage, or the error


asyncio.run(main(*sys.argv[1:]))
