"""What a publication asks of vLLM, without vLLM."""

from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest_asyncio
from aiohttp import web

from leyden.engine.vllm.publisher import AdapterTransfer, FileTransfer, VllmPublisher
from leyden.engine.weight_files import WeightFiles


class FrontEnd:
    """Answers every request, and keeps what was asked."""

    def __init__(self, socket: str) -> None:
        self.socket, self.asked = socket, list[str]()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        return web.Response()


@pytest_asyncio.fixture
async def vllm(tmp_path: Path) -> AsyncIterator[FrontEnd]:
    front_end, app = FrontEnd(str(tmp_path / "vllm.sock")), web.Application()
    app.router.add_post("/{path}", front_end.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, front_end.socket).start()
    yield front_end
    await runner.cleanup()


async def test_running_requests_are_aborted_and_not_kept_with_keys_and_values_of_the_old_weights(
    vllm: FrontEnd, tmp_path: Path
) -> None:
    with closing(WeightFiles()) as files:
        publisher = VllmPublisher(vllm.socket, FileTransfer(files), AdapterTransfer(tmp_path))
        await publisher.pause()
        await publisher.resume()
    assert vllm.asked == ["/pause?mode=abort", "/resume"]
