"""A frontend whose event loop is blocked for longer than client_timeout_s: its requests are cancelled, and it receives the outputs."""

from __future__ import annotations

import asyncio
import threading
import time

from drive import request

from stoker.base.config import Limits
from stoker.base.types import FinishReason
from stoker.runtime.client import Cancel, ExecutorInfo, Submit
from stoker.runtime.request import SequenceOutput
from stoker.runtime.transport.zmq_client import ZmqExecutorClient
from stoker.runtime.transport.zmq_mailbox import ZmqMailbox

TIMEOUT_S = 0.3


def serve(mailbox: ZmqMailbox, ended: threading.Event) -> None:
    """An executor that ends requests with a prompt of one token immediately, and the others when they are cancelled."""
    while not ended.is_set():
        for message in mailbox.poll(0.05):
            if isinstance(message, Submit) and len(message.request.prompt_ids) == 1:
                mailbox.send([SequenceOutput(message.request.request_id, 0, [7], FinishReason.LENGTH)])
            if isinstance(message, Cancel):
                mailbox.send([SequenceOutput(message.request_id, 0, [], FinishReason.CANCELLED)])
    mailbox.close()


async def test_requests_of_a_blocked_frontend_are_cancelled() -> None:
    info = ExecutorInfo(limits=Limits(), max_seq_len=64, vocab_size=9, device="cpu", kv_cache_tokens=64, model="none")
    mailbox, ended = ZmqMailbox("tcp://127.0.0.1:*", info, client_timeout_s=TIMEOUT_S), threading.Event()
    thread = threading.Thread(target=serve, args=(mailbox, ended))
    thread.start()
    client = await ZmqExecutorClient.connect(mailbox.address, heartbeat_s=TIMEOUT_S / 3, timeout_s=30.0)

    async def reason(prompt: list[int]) -> FinishReason | None:
        return [output.finish_reason async for outputs in client.generate(request(prompt)) for output in outputs][-1]

    try:
        waiting = asyncio.create_task(reason([1, 2, 3]))
        assert await reason([1]) is FinishReason.LENGTH
        time.sleep(3 * TIMEOUT_S)  # blocks the event loop
        assert await asyncio.wait_for(waiting, 5) is FinishReason.CANCELLED
        assert await reason([1]) is FinishReason.LENGTH and client.alive
    finally:
        await client.close()
        ended.set()
        thread.join()
