"""The compiled grammars of one engine: a cache, and a bounded queue of compilations outside the step loop."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stoker.base.errors import DependencyError, RequestError, UnavailableError
from stoker.base.types import Guide
from stoker.runtime.request import TokenRequest
from stoker.runtime.sampling.grammar_client import CompileProcess
from stoker.runtime.sampling.grammar_source import load_vocabulary

NUM_CONCURRENT = 2  # compilations
CACHE_BYTES = 256 << 20  # of compiled grammars and their sources

_Key = tuple[str, str]  # kind and text of a guide


class Grammars:
    """The grammars of one engine. The first guide loads the tokenizer and starts the compile process.

    `vocab_size` is the width of the logits, `timeout_s` the time of one compilation, and `queue_size` the number of compilations that may
    wait while NUM_CONCURRENT others run.
    """

    def __init__(self, engine: Path, vocab_size: int, *, timeout_s: float = 10.0, queue_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.process = CompileProcess(engine, vocab_size)
        self._engine, self._timeout_s, self._queue_size = engine, timeout_s, queue_size
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary: Any = None
        self._vocabulary_lock = threading.Lock()
        self._lock = threading.RLock()  # of the next three
        self._jobs: dict[_Key, Future[Any]] = {}
        self._results: dict[_Key, list[Future[Any]]] = {}  # one for each request of a job
        self._cache: OrderedDict[_Key, tuple[Any, int]] = OrderedDict()  # grammar and its bytes, the least recently used first

    def prepare(self, request: TokenRequest) -> Future[Any]:
        """The compiled grammar of the request's guide, at once if it is cached. Equal guides are compiled once.

        Raises DependencyError if xgrammar is not installed, RequestError if the request has no id that ends the answer, or UnavailableError
        if the queue of compilations is full.
        """
        guide = request.params.guide
        assert guide is not None
        try:
            import xgrammar  # noqa: F401
        except ImportError:
            raise DependencyError("xgrammar", "guided decoding", "guided") from None
        if not end_ids(request):
            raise RequestError("guide.kind", guide.kind, "a guided answer ends with an end id", cure="Unset ignore_eos, or give a stop id.")
        key, result = (guide.kind, guide.text), Future[Any]()
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                result.set_result(self._cache[key][0])
                return result
            if key not in self._results and len(self._results) >= NUM_CONCURRENT + self._queue_size:
                problem = f"{len(self._results)} grammars are being compiled or wait for it, which is the limit."
                raise UnavailableError(problem, cure="Retry later, or raise guide_queue_size.")
            self._results.setdefault(key, []).append(result)
            if key not in self._jobs:
                self._start(key)
        result.add_done_callback(functools.partial(self._cancel, key))
        return result

    def close(self) -> None:
        """End the compile process and all compilations."""
        self.process.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, key: _Key) -> None:
        """Queue the compilation of a guide."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_CONCURRENT, thread_name_prefix="compile-grammar")
        job = self._jobs[key] = self._threads.submit(self._compile, Guide(*key))
        job.add_done_callback(functools.partial(self._complete, key))

    def _compile(self, guide: Guide) -> Any:
        """Compile a guide, in a thread. Raises RequestError for an invalid guide, ConfigError or UnavailableError."""
        import xgrammar

        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = load_vocabulary(self._engine, self.vocab_size)
        return xgrammar.CompiledGrammar.deserialize_json(self.process.compile(guide, self._timeout_s), self._vocabulary)

    def _complete(self, key: _Key, job: Future[Any]) -> None:
        """Cache the grammar of a job that has ended, and set the results of its requests."""
        with self._lock:
            del self._jobs[key]
            results = self._results.pop(key)
            error = None if job.cancelled() else job.exception()
            if not job.cancelled() and error is None:
                self._add(key, job.result())
        for result in results:
            if not result.set_running_or_notify_cancel():
                continue
            if job.cancelled():
                result.set_exception(UnavailableError("the executor is stopping."))
            elif error is not None:
                result.set_exception(error)
            else:
                result.set_result(job.result())

    def _cancel(self, key: _Key, result: Future[Any]) -> None:
        """Cancel the job of a cancelled result if no other request needs it and it has not started."""
        with self._lock:
            if result.cancelled() and key in self._jobs and all(other.cancelled() for other in self._results[key]):
                self._jobs[key].cancel()

    def _add(self, key: _Key, grammar: Any) -> None:
        """Cache a grammar. Drops the least recently used ones above CACHE_BYTES."""
        self._cache[key] = (grammar, grammar.memory_size_bytes + len(key[1]))
        while sum(size for _, size in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)


def end_ids(request: TokenRequest) -> list[int]:
    """The token ids that end a guided answer: the end ids of the model, or else the stop ids of the request."""
    return list(request.end_ids or request.params.stop_token_ids)
