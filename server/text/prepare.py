"""Step 2 of a request's trip: an ask becomes a `Request` that cannot be wrong, or a `RequestError`.

The checks go from cheap to dear, and a prompt that is certainly too long is refused by its bytes, before
anything is tokenised. No check changes what was asked: whatever does not fit is an error that says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from server.engine.request import Request
from server.engine.roots import cache_root
from server.text.asks import ChatAsk, CompletionAsk
from server.text.chat import ChatTemplate
from server.text.checks import flag, integer, refuse, text
from server.text.echo import Echo, echo_of_ids, echo_of_text
from server.text.ends import Ends
from server.text.errors import RequestError
from server.text.grammar import Grammars, Held
from server.text.grammar_ask import read_grammar
from server.text.grammar_matcher import GrammarSource
from server.text.lengths import Budget, too_long
from server.text.params import MAX_CHOICES, Terms, terms
from server.text.prompts import check_ids, read_prompts
from server.text.scores import Scores, chat_scores, completion_scores
from server.text.served import ServedModel, ServedVariant
from server.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; less where the prompt leaves less room. Chats default to all the room."""

_INLINE_BYTES = 4096
"""Texts up to this size are tokenised at once (about a millisecond), longer ones on the pool."""
_THREADS = 2
_TEXT_BYTES, _TOKEN_BYTES = 2**20, 128
"""A text of more than 1 MiB, and of more than so many bytes for each token of the longest context, is not
tokenised: one call must not hold up the others' for a minute, nor fill the memory."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request with what the words need to answer it.

    `request` is None where the engine has nothing to do (completions with max_tokens 0 and no scores of the
    prompt): `generate` then answers without it. `model` is the name to echo, `prompts` the ids of each
    prompt, choice `i` belongs to prompt `i // n`. `echo` has what to send before the choices of each prompt,
    or is empty. `prompt_tokens` counts every prompt once, whatever `n`; `scores` say what is told of tokens.
    `continues` says of each prompt whether its answer goes on with its text; a chat's answer never does.
    `grammar` is held for as long as the engine may ask for it.
    """

    request_id: str
    model: str
    variant: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    prompt_tokens: int
    request: Request | None
    ends: Ends = field(default_factory=Ends)
    echo: tuple[Echo, ...] = ()
    scores: Scores = field(default_factory=Scores)
    continues: tuple[bool, ...] = ()
    grammar: Held | None = None

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return len(self.prompts) * self.n

    def continues_text(self, index: int) -> bool:
        """Whether choice `index` goes on with its prompt's text, so that its first space stays. Within a
        grammar it always stays: there each byte counts."""
        return self.grammar is not None or (bool(self.continues) and self.continues[index // self.n])

    def echo_of(self, index: int) -> Echo | None:
        """What choice `index` begins with, None if with its own text."""
        return self.echo[index // self.n] if self.echo else None


class Preparer:
    """Checks asks against one served model; long prompts are tokenised on a small bounded thread pool."""

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        grammars: GrammarSource | None = None,
    ) -> None:
        """`grammars` is what the engine makes its matchers with; None: nobody's."""
        self._grammars = Grammars(grammars or GrammarSource(lambda: tokenizer, served.vocab_rows))
        self._served = served
        self._tokenizer = tokenizer
        self._chat = chat
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="headroom-tokenize")
        longest = max(variant.max_len for variant in served.variants.values())
        self._max_bytes = max(_TEXT_BYTES, _TOKEN_BYTES * longest)

    async def start(self) -> str | None:
        """Starts the template's worker ahead. Returns why chats will be refused, None if they will not."""
        return await self._chat.start()

    async def completion(self, ask: CompletionAsk) -> Prepared:
        """Raises RequestError; never blocks the loop."""
        model, variant = self._served.resolve(ask.model)
        asked = None if ask.max_tokens is None else integer("max_tokens", ask.max_tokens, 0)
        wants_echo = flag("echo", ask.echo)
        given = read_prompts(ask.prompt, MAX_CHOICES)
        scores = completion_scores(ask.logprobs, ask.prompt_logprobs)
        checked = self._terms(ask, len(given.ids) or len(given.texts))
        grammar = await self._grammar(ask, checked.ends)
        names = ["prompt"] if len(given) == 1 else [f"prompt[{i}]" for i in range(len(given))]
        ids: list[Sequence[Any]] = list(given.ids) or list(await self._encode(given.texts, names, variant))
        budget = Budget(variant.max_len, asked, "max_tokens", DEFAULT_COMPLETION_TOKENS)
        max_tokens = budget.max_tokens(names, [len(prompt) for prompt in ids])
        prompts = tuple(
            check_ids(name, prompt, self._served.vocab_rows) for name, prompt in zip(names, ids, strict=True)
        )
        echo: tuple[Echo, ...] = ()
        if wants_echo:
            echo = await self._echo(given.texts, prompts, located=scores.output is not None)
        prepared = self._prepared(ask, checked, model, variant, prompts, max_tokens, echo, scores, grammar)
        words = self._tokenizer
        continues = tuple(any(words.token_text(token).raw for token in prompt) for prompt in prompts)
        return replace(prepared, continues=continues)

    async def chat(self, ask: ChatAsk) -> Prepared:
        """Raises RequestError (no template, a template's refusal, ...); never blocks the loop."""
        model, variant = self._served.resolve(ask.model)
        name, asked = "max_tokens", ask.max_tokens
        if ask.max_completion_tokens is not None:
            name, asked = "max_completion_tokens", ask.max_completion_tokens
        if asked is not None:
            integer(name, asked, 1)
        scores = chat_scores(ask.logprobs, ask.top_logprobs, ask.prompt_logprobs)
        checked = self._terms(ask, 1)
        grammar = await self._grammar(ask, checked.ends)
        rendered = await self._chat.render(ask.messages)
        ids = await self._encode([rendered], ["messages"], variant, special=False)
        max_tokens = Budget(variant.max_len, asked, name, None).max_tokens(["messages"], [len(ids[0])])
        prompts = (check_ids("messages", ids[0], self._served.vocab_rows),)
        return self._prepared(ask, checked, model, variant, prompts, max_tokens, (), scores, grammar)

    async def tokenize(self, prompt: str, *, special: bool = True, name: str = "prompt") -> list[int]:
        """Ids of a text, for /tokenize, off the loop when long; `name` is what errors call it."""
        checked = text(name, prompt)
        size = len(checked.encode())
        if size > self._max_bytes:
            raise RequestError(
                f"{name}: at most {self._max_bytes} bytes of text are tokenised, got {size}. Shorten it.",
                name,
                "text_too_long",
            )
        if size <= _INLINE_BYTES:
            return self._encode_now(checked, special)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(self._encode_now, checked, special))

    async def tokenize_chat(self, messages: Sequence[Any]) -> list[int]:
        """Ids of a rendered chat, for /tokenize with messages."""
        return await self.tokenize(await self._chat.render(messages), special=False, name="messages")

    async def close(self) -> None:
        """Ends the threads and the workers."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await self._grammars.close()
        await self._chat.close()

    async def _encode(
        self, texts: Sequence[str], names: Sequence[str], variant: ServedVariant, special: bool = True
    ) -> list[list[int]]:
        for name, content in zip(names, texts, strict=True):
            at_least = self._tokenizer.min_tokens(content.encode())
            if at_least > variant.max_len:
                raise too_long(name, at_least, variant.max_len, at_least=True)
        encoded = []
        for name, content in zip(names, texts, strict=True):
            encoded.append(await self.tokenize(content, special=special, name=name))
            await asyncio.sleep(0)  # short ones are tokenised at once, and there may be 128 of them
            if len(encoded[-1]) > variant.max_len:  # then the others need not be read
                raise too_long(name, len(encoded[-1]), variant.max_len)
        return encoded

    async def _echo(
        self, texts: Sequence[str], prompts: Sequence[Sequence[int]], located: bool
    ) -> tuple[Echo, ...]:
        """Prompts as the client gave them, as texts or as ids, of which there may be a million."""
        words = self._tokenizer
        if texts and not located:
            return tuple(echo_of_text(content, words) for content in texts)
        if texts:
            reads = [
                partial(echo_of_text, text, words, ids) for text, ids in zip(texts, prompts, strict=True)
            ]
        else:
            reads = [partial(echo_of_ids, ids, words, located) for ids in prompts]
        loop = asyncio.get_running_loop()
        return tuple([await loop.run_in_executor(self._pool, read) for read in reads])

    def _encode_now(self, content: str, special: bool) -> list[int]:
        return self._tokenizer.encode(content) if special else self._tokenizer.encode_rendered(content)

    def _terms(self, ask: CompletionAsk | ChatAsk, prompts: int) -> Terms:
        served = self._served
        return terms(
            ask.sampling,
            ask.cache_salt,
            prompts=prompts,
            eos_ids=served.eos_ids,
            vocab_rows=served.vocab_rows,
            defaults=served.defaults,
        )

    async def _grammar(self, ask: CompletionAsk | ChatAsk, ends: Ends) -> Held | None:
        """What the answer must look like, None if it is free."""
        asked = read_grammar(ask.sampling.response_format, ask.sampling.structured_outputs)
        if asked is None:
            return None
        if ends.min_tokens:
            rule = f"must be 0 beside {asked.param}, which says itself how long an answer is"
            raise refuse("min_tokens", ends.min_tokens, rule)
        return await self._grammars.hold(asked, ends.ids)

    def _prepared(
        self,
        ask: CompletionAsk | ChatAsk,
        checked: Terms,
        model: str,
        variant: ServedVariant,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        echo: tuple[Echo, ...],
        scores: Scores,
        grammar: Held | None,
    ) -> Prepared:
        ends = checked.ends
        if ends.min_tokens > max_tokens:
            rule = f"must not exceed the output's limit of {max_tokens} tokens"
            raise refuse("min_tokens", ends.min_tokens, rule)
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        scores.check_size(prompt_tokens, checked.n, checked.n * len(prompts), max_tokens, bool(echo))
        root = cache_root(
            fingerprint=self._served.fingerprint,
            variant=f"{variant.name}:{variant.identity}",
            kv_dtype=self._served.kv_dtype,
            key_id=ask.key_id,
            cache_salt=checked.cache_salt,
        )
        request = Request(
            id=ask.request_id,
            variant=variant.name,
            prompts=prompts,
            n=checked.n,
            max_tokens=max_tokens,
            sampling=checked.sampling,
            cache_root=root,
            min_tokens=ends.min_tokens,
            stop_ids=ends.ids,
            priority=checked.priority,
            logprobs=scores.output,
            prompt_logprobs=scores.of_prompt(bool(echo)),
            constraint=None if grammar is None else grammar.constraint,
        )
        return Prepared(
            request_id=ask.request_id,
            model=model,
            variant=variant.name,
            prompts=prompts,
            n=checked.n,
            prompt_tokens=prompt_tokens,
            request=request if max_tokens or request.prompt_logprobs is not None else None,
            ends=ends,
            echo=echo,
            scores=scores,
            grammar=grammar,
        )
