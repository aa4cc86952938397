"""The engine thread without HTTP: messages, unread deltas and what is bounded."""

import asyncio

import pytest
from server_fixture import make_llm

from sampling import SamplingParams
from serving.engine_thread import EngineThread
from serving.guard import ApiError

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return make_llm(max_num_seqs=2)


def run(llm, use, max_queue: int = 10):
    """Run the coroutine function `use` with a started engine thread."""

    async def main():
        engine = EngineThread({"m": llm}, max_queue)
        engine.start()
        try:
            return await use(engine, engine.models["m"])
        finally:
            await engine.stop()

    result = asyncio.run(main())
    stats = llm.stats()
    assert stats["live"] == 0 and not llm.engine.requests
    return result


def test_a_reader_who_comes_late_gets_everything_in_one_piece(llm):
    async def use(engine, served):
        job = await engine.submit(served, [([5, 6, 7], None), ([8, 9], None)], PARAMS, streaming=True)
        await job.ended.wait()
        deltas = await job.read()
        assert await job.read() == [] == await job.read()
        return deltas, [request.answers[0].text for request in job.requests]

    deltas, texts = run(llm, use)
    assert [d.text for d in deltas] == texts and [len(d.token_ids) for d in deltas] == [20, 20]
    assert [d.finish_reason for d in deltas] == ["length", "length"]


def test_a_reader_who_keeps_up_gets_the_same(llm):
    async def use(engine, served):
        job = await engine.submit(served, [([5, 6, 7], None), ([8, 9], None)], PARAMS, streaming=True)
        texts = {request.id: "" for request in job.requests}
        while deltas := await job.read():
            for delta in deltas:
                texts[delta.request.id] += delta.text
        assert list(texts.values()) == [request.answers[0].text for request in job.requests]
        assert all(request.finished for request in job.requests) and served.open == 0

    for _ in range(5):
        run(llm, use)


def test_a_job_that_is_not_streamed_keeps_no_deltas(llm):
    async def use(engine, served):
        job = await engine.submit(served, [([5, 6, 7], None)], PARAMS)
        await job.ended.wait()
        assert await job.read() == []

    run(llm, use)


def test_one_bad_prompt_leaves_none_of_a_job_behind(llm):
    async def use(engine, served):
        with pytest.raises(ValueError, match="99999"):
            await engine.submit(served, [([5, 6], None), ([99999], None)], PARAMS)
        assert served.open == 0 and await engine.call(lambda: len(llm.engine.requests)) == 0

    run(llm, use)


def test_giving_up_while_the_message_is_unread(llm):
    async def use(engine, served):
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        engine.send(lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20))
        waiting = asyncio.ensure_future(engine.submit(served, [([5, 6], None)], PARAMS))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        release.set()
        assert await engine.call(lambda: len(llm.engine.requests)) == 0
        return served.open

    assert run(llm, use) == 0


def test_no_more_than_the_queue_holds(llm):
    async def use(engine, served):
        jobs = [await engine.submit(served, [([5, 6], None)], PARAMS) for _ in range(4)]
        with pytest.raises(ApiError) as full:
            await engine.submit(served, [([5, 6], None)], PARAMS)
        assert full.value.status == 429 and full.value.headers["Retry_After"] == "3", "four are open, two at a time"
        for job in jobs:
            await job.ended.wait()
        assert served.open == 0
        engine.draining = True
        with pytest.raises(ApiError) as closing:
            await engine.submit(served, [([5, 6], None)], PARAMS)
        assert closing.value.status == 503

    run(llm, use, max_queue=2)


def test_a_message_that_raises_stops_nobody(llm, caplog):
    async def use(engine, served):
        engine.send(lambda: 1 / 0)
        job = await engine.submit(served, [([5, 6], None)], PARAMS)
        await job.ended.wait()
        assert engine.alive

    run(llm, use)
    assert "ZeroDivisionError" in caplog.text
