"""The application: routes of the OpenAI API over an engine. Requests of clients that disconnect are canceled."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.engine import Engine, KVBudgetError, Lease, LeaseTerms
from hf_parallel.engine.request import Request as EngineRequest
from hf_parallel.engine.server.errors import PIECE_ITEMS, APIError, api_error, json_pieces, json_response, to_json
from hf_parallel.engine.server.leases import KeptTable
from hf_parallel.engine.server.limits import PROMPT_FACTOR, Gate, Limits, check_keys
from hf_parallel.engine.server.metrics import Metrics
from hf_parallel.engine.server.openai.answers import Answers, Delta
from hf_parallel.engine.server.openai.forks import ChildrenWriter, ForkReader, keep
from hf_parallel.engine.server.openai.inject import RunningResponses, inject, report, translated
from hf_parallel.engine.server.openai.responses import ScoreWriter, Writer, usage_of
from hf_parallel.engine.server.openai.responses_api import Conversations, ResponseBody, ResponseWriter
from hf_parallel.engine.server.openai.schema import (
    Body,
    ChatBody,
    CompletionBody,
    ConversationBody,
    ScoreBody,
    read_body,
)
from hf_parallel.engine.server.openai.tokenization import DetokenizeBody, TokenizeBody
from hf_parallel.engine.server.openai.translator import Translator
from hf_parallel.engine.server.page import page
from hf_parallel.models.loading.adapters import BASE_MODEL, check_adapter

_logger = logging.getLogger(__name__)

T = TypeVar("T")
Prepared: TypeAlias = tuple[Answers, EngineRequest]
"""A request that is not submitted yet, and what will read its answers."""
SMALL_BODY = 1 << 14  # bytes of a body that is read, tokenized and submitted in milliseconds
COSTLY = (b"image_url", b"json_schema", b"tool_choice")  # fields whose values can take seconds in a small body
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/score": ScoreBody,
}
"""Bodies of the requests that run the model, by path."""
FORKABLE = ("/v1/chat/completions", "/v1/responses")
"""Paths of requests whose responses can be forked."""
POOL_THREADS = 2  # threads for small bodies, as many for larger ones, and as many for answers
PART_BYTES = 1 << 18  # of a large answer


def create_app(
    engine: Engine,
    model: str = "model",
    limits: Limits | None = None,
    api_keys: Sequence[str] = (),
    max_kv_bytes: int | None = None,
    hosts: Sequence[str] = (),
    processor: Any = None,
    adapters: Mapping[str, str] | None = None,
    logits_cache: LogitsCache | None = None,
) -> FastAPI:
    """Return the application for an engine that is open.

    Parameters
    ----------
    engine : Engine
    model : str
        Name of the model for clients.
    limits : Limits, optional
    api_keys : sequence of str
        Accepted keys. Empty: requests need none.
    max_kv_bytes : int, optional
        Budget of the engine, for the metrics.
    hosts : sequence of str
        Accepted values of the header `Host`, without port. Empty: any. On a local server without keys, they keep out
        web pages whose name was made to resolve to this machine.
    processor : ProcessorMixin, optional
        Renders chats, and reads their images.
    adapters : mapping, optional
        LoRA adapters of the engine's model that clients may name as `model`, with their paths for `/v1/models`.
    logits_cache : LogitsCache, optional
        Keeps logits for requests with the field `replay`, separately for each API key and `cache_salt`.
    """
    if engine.tokenizer is None:
        raise ValueError("the server needs an Engine with a tokenizer")
    check_keys(api_keys)
    limits = limits or Limits()
    metrics_of_engine = Metrics(engine, max_kv_bytes, logits_cache)
    server = _Server(engine, model, limits, metrics_of_engine, processor, logits_cache)
    server.add_adapters(adapters or {})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # A full collection takes longer the more objects there are, and stops all threads; large bodies cause them.
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            server.small.shutdown()
            server.large.shutdown()
            server.writing.shutdown()

    app = FastAPI(title="hf_parallel", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.metrics = server.metrics
    app.add_middleware(Gate, limits=limits, api_keys=api_keys, hosts=hosts, on_response=server.metrics.add_response)
    for error in (APIError, HTTPException, Exception):
        app.add_exception_handler(error, server.error_response)

    for path, kind in BODIES.items():
        app.add_api_route(path, partial(server.respond, kind), methods=["POST"], name=path)
    for path, other in (("/tokenize", TokenizeBody), ("/detokenize", DetokenizeBody)):
        app.add_api_route(path, partial(server.answer, other), methods=["POST"], name=path)

    for path in FORKABLE:
        app.add_api_route(f"{path}/{{name}}/fork", partial(server.fork, BODIES[path]), methods=["POST"])

    @app.delete("/v1/chat/completions/{name}")
    async def delete_chat(name: str, request: Request) -> Response:
        if not server.tables[ChatBody].drop(request.scope["cache_salt"], name):
            raise APIError(404, f"there is no stored chat {name[:200]!r}", code="response_not_found")
        return json_response({"id": name, "object": "chat.completion.deleted", "deleted": True})

    @app.get("/v1/responses/{name}")
    @app.delete("/v1/responses/{name}")
    async def kept(name: str, request: Request) -> Response:
        for parameter in request.query_params:
            raise APIError(400, "kept responses are returned whole, without options", parameter)
        is_read = request.method == "GET"
        salt = request.scope["cache_salt"]
        if is_read or not server.tables[ResponseBody].drop(salt, name) or server.conversations.has(salt, name):
            response, _ = server.conversations.find(salt, name, keep=is_read)
        if not is_read:
            response = to_json({"id": name, "object": "response", "deleted": True})
        return Response(response, media_type="application/json")

    @app.post("/v1/responses/{name}/inject")
    @app.post("/v1/chat/completions/{name}/inject")
    async def say(name: str, request: Request) -> Response:
        return await server.inject(name, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [*server.model_cards.values()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        server.check_model(name)
        return json_response(server.model_cards[name])

    own_page = page(replays=logits_cache is not None)

    @app.get("/")
    async def show() -> Response:
        return own_page

    @app.get("/health")
    async def health() -> Response:
        if engine.error is not None:
            return json_response({"status": "stopped"}, 503)
        return json_response({"status": "ok"}, 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(server.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


class _Server:
    """State of an application."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        limits: Limits,
        metrics: Metrics,
        processor: Any,
        logits_cache: LogitsCache | None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.limits = limits
        self.metrics = metrics
        self.translator = Translator(engine, limits, processor, logits_cache)
        self.conversations = Conversations()
        self.tables = {BODIES[path]: KeptTable(engine) for path in FORKABLE}
        self.forks = ForkReader(self.translator, self.tables, limits)
        self.lease_terms = LeaseTerms(limits.lease_ttl, limits.max_leases, limits.max_lease_bytes)
        self.running = RunningResponses()
        card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "hf_parallel",
            "root": model,
            "parent": None,
        }
        self.model_cards: dict[str, dict[str, object]] = {model: card}
        self.adapters: dict[str, str | None] = {model: None}  # by name of the model
        # Large bodies take seconds to read and tokenize, in which others and small ones are served.
        self.small = FairPool(POOL_THREADS)
        self.large = FairPool(POOL_THREADS)
        self.writing = FairPool(POOL_THREADS)

    def add_adapters(self, paths: Mapping[str, str]) -> None:
        """Serve adapters of the engine's model under their names, and the base model under its own."""
        base_card = self.model_cards[self.model]
        for name, path in paths.items():
            check_adapter(self.engine.model, name)
            if name in self.adapters:
                raise ValueError(f"an adapter must have another name than the model, got {name!r}")
            self.adapters[name] = name
            self.adapters[self.model] = BASE_MODEL
            self.model_cards[name] = base_card | {"id": name, "root": path, "parent": self.model}

    def check_model(self, name: str) -> None:
        """Raise an error unless the server has a model of this name."""
        if name not in self.adapters:
            message = f"the model must be one of {[*self.adapters]}, got {name[:200]!r}"
            raise APIError(404, message, "model", "model_not_found")

    async def respond(self, kind: type[Body], request: Request) -> Response:
        """Submit the prompts of a request's body and return the response."""
        content = await request.body()
        job = partial(self._submit, kind, content, request.scope)
        body, answers = await self._submitted(request, content, job)
        salt = request.scope["cache_salt"]
        writer = self._writer(body, salt)
        name = self._begin(salt, writer, body, answers[0])
        return await self._respond(body, request, answers, writer, {name: type(body)})

    async def fork(self, kind: type[Body], name: str, request: Request) -> Response:
        """Submit forks of a response and return their responses."""
        content = await request.body()
        job = partial(self._submit_forks, kind, content, name, request.scope)
        bodies, answers = await self._submitted(request, content, job)
        salt = request.scope["cache_salt"]
        children = []
        names = {}
        for body, answer in zip(bodies, answers, strict=True):
            writer = self._writer(body, salt)
            names[self._begin(salt, writer, body, answer)] = kind
            children.append((writer, answer))
        return await self._respond(bodies[0], request, answers, ChildrenWriter(children), names)

    async def _submitted(self, request: Request, content: bytes, job: Callable[[], T]) -> T:
        """Run a job that submits requests."""
        is_small = len(content) <= SMALL_BODY and not any(name in content for name in COSTLY)
        pool = self.small if is_small else self.large
        submission = pool.run(request.scope["submitter"], job, _cancel_submitted)
        return await _unless_disconnected(request, submission)

    async def _respond(
        self,
        body: Body,
        request: Request,
        answers: Sequence[Answers],
        writer: Writer,
        names: Mapping[str, type[Body]],
    ) -> Response:
        """Return the response to requests that were submitted; `names` are the ids of those that can be forked."""
        request.scope["usage"] = partial(usage_of, answers)  # for the log
        close = partial(self._close, answers, request.scope["cache_salt"], names)
        try:
            if body.stream:
                return await self._stream(body, request, answers, writer, close)
            return await _unless_disconnected(request, self._whole(request, answers, writer))
        except Exception as error:
            raise self._translated(error, body, answers) from error
        finally:
            if not body.stream:
                close()

    def _begin(self, salt: str, writer: Writer, body: Body, answers: Answers) -> str:
        """Register a response that can be forked, and spoken to, from now on. Return its id."""
        self.running.add(salt, writer.id, answers.handle)
        if isinstance(body, ConversationBody):
            kept = keep(body, answers)
            self.tables[_table_of(body)].begin(salt, writer.id, kept)
        return writer.id

    def _writer(self, body: Body, salt: str) -> Writer:
        if isinstance(body, ResponseBody):

            def keep(response: dict[str, Any], answer: dict[str, Any]) -> None:
                if body.store is not False and self.tables[ResponseBody].has(salt, response["id"]):
                    self.conversations.add(salt, response, body.conversation_with(answer))

            return ResponseWriter(body.model, body, self.engine.tokenizer, keep)
        if isinstance(body, ScoreBody):
            return ScoreWriter(body.model, self.engine.tokenizer, body.apply_softmax)
        writer = Writer(body.model, isinstance(body, ChatBody), self.engine.tokenizer)
        writer.wants_usage = body.stream_options is not None and body.stream_options.include_usage
        return writer

    async def inject(self, name: str, request: Request) -> Response:
        """Say the text of a request's body to the rows of a response that is being written."""
        content = await request.body()
        handle = self.running.find(request.scope["cache_salt"], name)
        job = partial(inject, handle, content)
        pool = self.small if len(content) <= SMALL_BODY else self.large
        body, heard = await pool.run(request.scope["submitter"], job, lambda _: None)
        try:
            passes = await _unless_disconnected(request, asyncio.wrap_future(heard))
        except Exception as error:
            raise translated(error) from error
        return json_response(report(name, body, passes))

    async def answer(self, kind: type[TokenizeBody | DetokenizeBody], request: Request) -> Response:
        """Return the response to a request that runs no model."""
        content = await request.body()

        def read() -> Response:
            body = read_body(kind, content)
            self.check_model(body.model or self.model)
            try:
                return json_response(body.answer(self.translator))
            except ValueError as error:
                raise api_error(error, kind.model_fields) or error from error

        return await self.large.run(request.scope["submitter"], read, lambda _: None)

    def _submit(self, kind: type[Body], content: bytes, scope: Scope) -> tuple[Body, list[Answers]]:
        """Read a body. Submit all of its prompts, or none; clients with different keys share no cached prefixes."""
        body = read_body(kind, content)
        if isinstance(body, ConversationBody):
            body._size = len(content)
            if body.fork is not None:
                body = self.forks.read_one(kind, content, scope["cache_salt"])
        self.conversations.resume(scope["cache_salt"], body)
        return body, self._submit_prepared(self._prepare(body, scope), body)

    def _submit_forks(
        self, kind: type[Body], content: bytes, name: str, scope: Scope
    ) -> tuple[list[ConversationBody], list[Answers]]:
        """Read the bodies of forks, and submit all of them, or none."""
        bodies, count_field = self.forks.read_children(kind, content, name, scope["cache_salt"])
        prepared = list[Prepared]()
        for body in bodies:
            prepared += self._prepare(body, scope, sum(answers.submission.choices for answers, _ in prepared))
        submissions = [answers.submission for answers, _ in prepared]
        self.translator.check_together(bodies, submissions, count_field)
        return bodies, self._submit_prepared(prepared, bodies[0])

    def _submit_prepared(self, prepared: Sequence[Prepared], body: Body) -> list[Answers]:
        """Submit all requests, or none; errors name fields of `body`."""
        try:
            self.engine.submit_together([request for _, request in prepared])
        except Exception as error:
            raise self._translated(error, body) from error
        return [answers for answers, _ in prepared]

    def _prepare(self, body: Body, scope: Scope, num_choices: int = 0) -> list[Prepared]:
        """Return the requests of a body, not yet submitted. `num_choices`: of the bodies before it."""
        self.check_model(body.model)
        salt = scope["cache_salt"] + (body.cache_salt or "")
        prepared = list[Prepared]()
        try:
            self._check_prompts(body)
            prompts = body.prompts
            # Prompts whose log-probabilities are wanted are one request, which computes what they share once.
            groups = [prompts] if body.prompt_logprobs_wanted is not None else [[prompt] for prompt in prompts]
            lease = self._lease(body, scope["cache_salt"])
            forked = body._forked if isinstance(body, ConversationBody) else None
            for submission in self.translator.translate_groups(body, groups, body.prompt_field):
                request = self.engine.prepare(
                    submission.prompt,
                    submitter=scope["submitter"],
                    cache_salt=salt,
                    parallel_config=submission.config,
                    agent_hints=submission.hints,
                    adapter=self.adapters[body.model],
                    lease=lease,
                    parent=None if forked is None else forked.parent,
                    **submission.arguments,
                )
                prepared.append((Answers(submission, request.handle, num_choices, lease), request))
                num_choices += submission.choices
        except Exception as error:
            raise self._translated(error, body) from error
        return prepared

    def _lease(self, body: Body, holder: str) -> Lease | None:
        """Return a lease for a response that is stored."""
        is_stored = body.store is not False if isinstance(body, ResponseBody) else bool(body.store)
        return Lease(holder, self.lease_terms) if is_stored and isinstance(body, ConversationBody) else None

    def _check_prompts(self, body: Body) -> None:
        """Raise an error if a body has too many or too large prompts. It does not build them."""
        sizes = body.prompt_sizes
        if body.answers * len(sizes) > self.limits.rows:
            cause = body.prompt_field if len(sizes) > 1 else "n"
            raise APIError(400, f"a request may have at most {self.limits.rows} answers", cause)
        most = PROMPT_FACTOR * self.limits.body_bytes
        if sum(sizes) > most:
            message = f"the prompts may have at most {most} characters or token ids together, these have {sum(sizes)}"
            raise APIError(400, message, body.prompt_field, "context_length_exceeded")

    def _translated(self, error: Exception, body: Body, answers: Sequence[Answers] = ()) -> Exception:
        """Return the error that a client receives; `answers` are those that were being generated."""
        if self.engine.error is not None:
            return APIError(500, "the engine has stopped after an error", code="engine_stopped")
        if answers and isinstance(error, KVBudgetError):
            return APIError(503, f"the answer needed more memory than there is: {error}", code="out_of_memory")
        if self.engine.is_closing:
            return APIError(503, "the server is shutting down", code="shutting_down")
        fields = [*type(body).model_fields, *(body.model_extra or ())]
        return api_error(error, [name for name in fields if name != "model"]) or error

    async def _whole(self, request: Request, answers: Sequence[Answers], writer: Writer) -> Response:
        """Return a response that is not streamed. A long one is encoded and sent in parts."""
        outputs = [await answer.handle.result_async() for answer in answers]

        def begin() -> tuple[Iterator[bytes], bytes, bytes | None]:
            choices = []
            for answer, output in zip(answers, outputs, strict=True):
                choices += answer.final(output)
            parts = _parts(writer.whole(choices, usage_of(answers)))
            return parts, next(parts), next(parts, None)

        parts, first, second = await self._encode(request, begin)
        if second is None:
            return Response(first, media_type="application/json")

        async def content() -> AsyncIterator[bytes]:
            yield first
            yield second
            async for part in self._each(request, parts):
                yield part

        return StreamingResponse(content(), media_type="application/json")

    async def _each(self, request: Request, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the parts of a body, each encoded in a thread."""
        while True:
            part = await self._encode(request, lambda: next(parts, None))
            if part is None:
                return
            yield part

    async def _encode(self, request: Request, job: Callable[[], T]) -> T:
        """Decode or encode a part of an answer in a thread. Log-probabilities of many tokens are megabytes."""
        return await self.writing.run(request.scope["submitter"], job, lambda _: None)

    async def _stream(
        self,
        body: Body,
        request: Request,
        answers: Sequence[Answers],
        writer: Writer,
        close: Callable[[], None],
    ) -> Response:
        """Return the stream of a response, once there is something to send: errors until then have a status."""
        deltas = _merged([answer.deltas() for answer in answers])
        try:
            first = await _unless_disconnected(request, anext(deltas))
        except BaseException:
            close()
            raise

        async def events() -> AsyncIterator[str | bytes]:
            begun: set[int] = set()
            try:
                delta = first
                while True:
                    for data in writer.events(delta, delta.index not in begun):
                        if len(delta.logged) <= PIECE_ITEMS:
                            yield _event(data)
                            continue
                        async for part in self._each(request, _parts(data, b"data: ", b"\n\n")):  # a prompt's
                            yield part
                    begun.add(delta.index)
                    try:
                        delta = await anext(deltas)
                    except StopAsyncIteration:
                        break
                if writer.wants_usage:
                    # It may hold, and keep, a long conversation.
                    yield await self._encode(request, lambda: _event(writer.usage_chunk(usage_of(answers))))
                yield "data: [DONE]\n\n"
            except Exception as error:
                translated = self._translated(error, body, answers)
                if not isinstance(translated, APIError):
                    translated = APIError(500, "the request failed")
                if translated.status == 500:  # no handler sees it: the status is sent
                    _logger.error("a request failed while its answer was sent", exc_info=error)
                yield _event(translated.to_dict())

        return _EventStream(events(), close)

    def _close(self, answers: Sequence[Answers], salt: str, names: Mapping[str, type[Body]]) -> None:
        """Cancel what still runs, record the times of what has ended, and keep what is stored."""
        for answer in answers:
            answer.handle.cancel()
            self.metrics.add_request(answer.handle, answer.submission.choices)
        for name, kind in names.items():
            if issubclass(kind, ConversationBody):
                self.tables[_table_of(kind)].end(salt, name)

    async def error_response(self, request: Request, error: Exception) -> Response:
        """Return an error in OpenAI's form."""
        if isinstance(error, HTTPException):
            error = APIError(error.status_code, str(error.detail))
        elif not isinstance(error, APIError):
            error = APIError(500, "the server failed to answer this request", code="internal_error")
        return error.response()


def _table_of(body: type[Body] | Body) -> type[Body]:
    """Return the kind of bodies with whose responses one is kept."""
    kind = body if isinstance(body, type) else type(body)
    return ResponseBody if issubclass(kind, ResponseBody) else ChatBody


class FairPool:
    """Thread pool that runs one job per submitter at a time; a submitter's next job queues behind other submitters.

    A job whose caller is canceled cannot be interrupted. It keeps the turn of its submitter until it ends.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="hf_parallel-submit")
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def run(self, submitter: Hashable, job: Callable[[], T], abandon: Callable[[Future[T]], None]) -> T:
        """Run a job and return its result. If the caller is canceled, `abandon` receives the future when it ends."""
        turn = self._turns.setdefault(submitter, asyncio.Lock())
        await turn.acquire()
        loop = asyncio.get_running_loop()
        future = self._threads.submit(job)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(turn.release))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(abandon)
            raise

    def shutdown(self) -> None:
        """Cancel what waits, and wait for what runs."""
        self._threads.shutdown(cancel_futures=True)


def _cancel_submitted(submission: Future[Any]) -> None:
    if submission.cancelled() or submission.exception() is not None:
        return
    _, answers = submission.result()
    for answer in answers:
        answer.abandon()


class _EventStream(StreamingResponse):
    """Server-sent events. `close` is called when the stream ends or the client disconnects."""

    def __init__(self, events: AsyncIterator[str | bytes], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _unless_disconnected(request: Request, awaitable: Awaitable[T]) -> T:
    """Await, unless the client disconnects first."""
    task = asyncio.ensure_future(awaitable)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client has disconnected")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[Delta]:
    """Yield from all streams, as their items arrive."""
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(stream))] = stream
                yield delta
    finally:
        for task in waiting:
            task.cancel()


def _parts(body: object, before: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """Yield a value as JSON in parts of at least `PART_BYTES`, but for the last."""
    part = bytearray(before)
    for piece in json_pieces(body):
        part += piece.encode()
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    part += after
    if part:
        yield bytes(part)


def _event(data: dict[str, object]) -> str:
    kind = f"event: {data['type']}\n" if "type" in data else ""
    return f"{kind}data: {to_json(data)}\n\n"
