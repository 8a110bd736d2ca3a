"""`headroom serve`: load, say what was loaded, listen, and leave politely."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import resource
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from model.fetch import needs_hub, resolve_config
from model.modes import Heads, parse_modes
from server.commands.ending import Ending
from server.commands.interrupts import importing
from server.commands.listener import bind, is_local, listen, url, where
from server.commands.loading import load_model
from server.config import ServeOptions
from server.engine.errors import ConfigError

if TYPE_CHECKING:
    from server.app import Loaded

_log = logging.getLogger("headroom")
_FLUSH_SECONDS = 2  # for the last bytes of answers that have ended
_DESCRIPTORS, _RESERVE = 65536, 64  # file descriptors: wanted for connections, and kept for all else
_KEEP_ALIVE_SECONDS = 15  # between two requests of a connection


def serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code. Raises ConfigError or ModelError before it listens."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for room in ("headroom", "server", "model", "cache"):
        logging.getLogger(room).setLevel(options.log_level.upper())
    with contextlib.closing(_bind(options)) as listener:
        gc.disable()  # imports and weights make a million objects, all of which stay
        try:
            loaded = load_model(options.model, meanwhile=_import_http)
        finally:
            gc.enable()
        with importing():
            from server.commands.start_table import print_start_table
        print_start_table(loaded.name, loaded.facts, _warnings(options))
        # What is here now stays: walking it again and again would stop every stream for up to half a second.
        gc.freeze()
        listen(listener, options.host)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(loaded, options, listener))


def _bind(options: ServeOptions) -> socket.socket:
    """The port, before a weight is read. Where it cannot be had, it is first said what else would be wrong,
    if that costs no download; else it is found out as the model is loaded."""
    engine, model = options.model.engine, options.model.model
    from_hub = needs_hub(model)
    try:
        return bind(options.host, options.port)
    except ConfigError:
        with importing():
            from server.engine.build import check_options
            from server.engine.device import choose_device
        check_options(engine)
        choose_device(engine.device)
        if not from_hub:
            config = resolve_config(model)
            parse_modes(engine.attention, Heads(config.num_heads, config.num_kv_heads))
        raise


def _warnings(options: ServeOptions) -> tuple[str, ...]:
    if is_local(options.host) or options.api_keys:
        return ()
    return (f"{options.host} can be reached from other machines, and no key is asked for; set --api-key",)


def _import_http() -> None:
    """What `_serve` needs, imported while the weights are read."""
    for name in (
        "server.api.application",
        "server.metrics",
        "uvicorn",
        "server.api.connections",
        "rich.table",
        "numpy.ma",  # which numpy imports at first use: too late in a process out of file descriptors
    ):
        importlib.import_module(name)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _connections() -> int:
    """How many connections may be open: all the descriptors that this process can get, but for a reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, (_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) - _RESERVE)


async def _serve(loaded: Loaded, options: ServeOptions, listener: socket.socket) -> int:
    import uvicorn

    from server.api.connections import BoundedServer
    from server.api.protocol import BoundedHttp
    from server.app import create_app
    from server.engine.service import EngineService
    from server.text.prepare import Preparer

    class Server(BoundedServer):
        """Leaves signals to `Ending`."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    debug = options.log_level == "debug"
    # Its complaints are about clients, and each failing request is logged by the guard.
    logging.getLogger("uvicorn.error").setLevel(logging.INFO if debug else logging.CRITICAL)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    seats = options.model.engine.max_num_seqs
    service = EngineService(loaded.engine, max_queued=options.max_queued, seats=seats)
    preparer = Preparer(loaded.served, loaded.tokenizer, loaded.chat, loaded.grammars)
    server = Server(
        uvicorn.Config(
            create_app(loaded, service, preparer, options),
            http=BoundedHttp,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=debug,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        ),
        limit=_connections(),
    )
    ending = Ending(service, server, options.grace)
    try:
        service.start()
        no_chat = await preparer.start()
        if no_chat is not None:
            _log.info("chat is refused: %s", no_chat)
        default = next(iter(loaded.served.names))
        _print_url(default, listener, keyed=bool(options.api_keys), chat=no_chat is None)
        await server.serve([listener])
    finally:
        await service.stop()
        await preparer.close()
    _log.info("stopped")
    return ending.code


def _print_url(model: str, listener: socket.socket, *, keyed: bool, chat: bool) -> None:
    """The last lines before the first request: where, and a command to try."""
    path: str = "/v1/completions"
    ask: dict[str, object] = {"prompt": "The capital of France is"}
    if chat:
        question = {"role": "user", "content": "What is the capital of France?"}
        path, ask = "/v1/chat/completions", {"messages": [question]}
    # Greedy: a drawn answer of a small model may ramble to the end of its context.
    body = {"model": model, "stream": True, "temperature": 0, **ask}
    key = "-H 'authorization: Bearer YOUR_KEY' " if keyed else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False, separators=(",", ":")))
    base = url(listener)
    print(f"\nListening on {where(listener)}, Ctrl-C stops. Try it:\n")
    print(
        f"  curl -N {base}{path} {key}-H 'content-type: application/json' \\\n    -d {data}\n",
        flush=True,
    )
