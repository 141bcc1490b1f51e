"""Judges a server from outside: the same request gives the same answer, whoever else asks and however it is sent.

What must be the same is what ``spec.conformance.text`` defines. A greedy answer may differ where two tokens were as good
as equally likely: that is what log-probabilities are asked for.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from spec.conformance.served_client import Choice, Refusal, Reply, Server, TokenLogprobs
from spec.conformance.text import cut, only_grows, pieces_are_the_whole
from spec.corpus import SENTENCES
from spec.rules import RULES

T = TypeVar("T")
NUM_TOKENS = 16
NUM_TOP = 2
PROMPTS = (
    "The capital of France is",
    "The capital of France is a city that",
    "Once upon a time there was a small",
    "One, two, three, four, five,",
    "To make bread you need flour, water,",
)
"""Two of them begin alike, so that a prefix cache has something to share."""

PART_OF = {
    "X1": "API-1",
    "X2": "API-1",
    "X3": "SAMPLE-2",
    "X4": "SAMPLE-2",
    "X5": "SAMPLE-2",
    "X6": "SAMPLE-2",
    "X7": "SAMPLE-1",
    "X8": "API-4",
    "X9": "SAMPLE-1",
    "X11": "SAMPLE-1",
    "X12": "SAMPLE-1",
}
"""The rule of an engine that a statement about what callers are shown belongs to."""


class ServedViolation(Exception):
    """What a caller was shown is not what the definitions say."""

    def __init__(self, statement: str, server: Server, found: str, again: str) -> None:
        rule = RULES[PART_OF[statement]]
        self.statement = statement
        self.rule = rule
        self.found = found
        lines = [
            f"{statement} does not hold: {SENTENCES[statement]}",
            f"  part of   {rule.id}: {rule.sentence}",
            f"  server    {server.url}",
            f"  found     {found}",
            f"  read      docs/rules.html#rule-{rule.id}",
            "",
            f"from spec.conformance.served import {again.partition('(')[0]}",
            "from spec.conformance.served_client import Server",
            "",
            "",
            f"def test_{statement.lower()}_again(served_url):",
            f"    {again}",
        ]
        super().__init__("\n".join(lines))


class Judge:
    """One server and one way to ask it, so that a violation can say how to see it again."""

    def __init__(self, server: Server, judge: str, *arguments: object) -> None:
        self.server = server
        shown = ", ".join(["Server(served_url)", *map(repr, arguments)])
        self.again = f"{judge}({shown})"

    def demand(self, statement: str, holds: bool, found: str) -> None:
        """Raises ``ServedViolation`` if the statement does not hold."""
        if not holds:
            raise ServedViolation(statement, self.server, found, self.again)

    def same(self, statement: str, alone: Reply, other: Reply, how: str) -> None:
        """Every answer is the one that came alone, or differs where the bound allows it; what is counted fits."""
        [expected] = alone.choices.values()
        for choice in other.choices.values():
            self.demand(statement, (why := difference(expected, choice)) is None, f"{how}: {why}")
        if alone.usage and other.usage:
            counts = alone.usage.num_prompt_tokens, other.usage.num_prompt_tokens
            self.demand("X6", counts[0] == counts[1], f"{how}: {counts[1]} prompt tokens, alone they are {counts[0]}")


def logit_bound(*tokens: TokenLogprobs) -> float:
    """How far a log-probability may move, and how close two tokens must be for either to be the greedy one.

    The logit bound wants float64 logits, which a caller is not shown. In its place stands twice the unit in the last
    place of a bfloat16 as large as what is reported, and 1 for the largest.
    """
    reach = max((abs(each) for token in tokens for each in (token.logprob, *token.top.values())), default=0.0)
    return float(2 * 2.0**-7 * (1 + reach))


def difference(alone: Choice, other: Choice) -> str | None:
    """What is different between two greedy answers to one prompt and not explained by the bound."""
    if not alone.logprobs or not other.logprobs:
        return None if alone.text == other.text else f"the text is {other.text!r}, alone it is {alone.text!r}"
    for place, (mine, theirs) in enumerate(zip(alone.logprobs, other.logprobs, strict=False)):
        bound = logit_bound(mine, theirs)
        if mine.token != theirs.token:
            if mine.margin <= bound:
                return None  # from here on they continue different texts
            return (
                f"token {place} is {theirs.token!r}, alone it is {mine.token!r}, "
                f"{mine.margin:.3g} likelier than the next, the bound is {bound:.3g}"
            )
        if abs(mine.logprob - theirs.logprob) > bound:
            return (
                f"token {place}, {mine.token!r}, has log-probability {theirs.logprob:.4f}, "
                f"alone it has {mine.logprob:.4f}, the bound is {bound:.3g}"
            )
    return None if alone.text == other.text else f"the text is {other.text!r}, alone it is {alone.text!r}"


def is_explained(alone: Choice, other: Choice) -> bool:
    """Whether the first token that differs was as good as equally likely."""
    pairs = zip(alone.logprobs or (), other.logprobs or (), strict=False)
    first = next(((mine, theirs) for mine, theirs in pairs if mine.token != theirs.token), None)
    return first is not None and first[0].margin <= logit_bound(*first)


def together(asks: Sequence[Callable[[], T]]) -> list[T]:
    """What comes back when all ask at once."""
    with ThreadPoolExecutor(len(asks)) as threads:
        return [future.result() for future in [threads.submit(ask) for ask in asks]]


def greedy(server: Server) -> dict[str, object]:
    """The fields of a greedy request."""
    fields: dict[str, object] = {"temperature": 0, "max_tokens": NUM_TOKENS}
    return {**fields, "logprobs": NUM_TOP} if server.has_logprobs else fields


DRAWN: dict[str, object] = {"temperature": 1.5, "max_tokens": NUM_TOKENS, "seed": 7}


def judge_answer(server: Server, prompt: object) -> Reply:
    """An answer by itself: its tokens, their log-probabilities and what is counted belong together. Raises
    ``ServedViolation``, as all judges do."""
    judge = Judge(server, "judge_answer", prompt)
    reply = server.complete(prompt, **greedy(server))
    judge.demand("X6", list(reply.choices) == [0], f"asked for one answer, got {list(reply.choices)}")
    [choice] = reply.choices.values()
    judge.demand("X4", len(choice.finish_reasons) == 1, f"the answer ended for the reasons {choice.finish_reasons}")
    if reply.usage is not None:
        judge.demand(
            "X6",
            reply.total_tokens == reply.usage.num_tokens,
            f"{reply.usage} and a total of {reply.total_tokens}",
        )
        if choice.finish_reasons == ("length",):
            used = reply.usage.num_completion_tokens
            judge.demand("X6", used == NUM_TOKENS, f"{used} completion tokens, ended by the length {NUM_TOKENS}")
        if isinstance(prompt, list):
            counted = reply.usage.num_prompt_tokens
            judge.demand("X6", counted == len(prompt), f"{counted} prompt tokens for {len(prompt)} ids")
    if choice.logprobs is not None:
        _judge_logprobs(judge, choice, reply)
    return reply


def _judge_logprobs(judge: Judge, choice: Choice, reply: Reply) -> None:
    tokens = choice.logprobs or ()
    if choice.finish_reasons == ("length",):
        whole = "".join(each.token for each in tokens)
        judge.demand("X5", whole == choice.text, f"the tokens make {whole!r}, the text is {choice.text!r}")
        if reply.usage is not None:
            used = reply.usage.num_completion_tokens
            judge.demand("X5", len(tokens) == used, f"{len(tokens)} tokens are shown, {used} are counted")
    for place, each in enumerate(tokens):
        numbers = (each.logprob, *each.top.values())
        judge.demand("X11", all(number <= 0 for number in numbers), f"token {place} has log-probabilities {numbers}")
        best = max(each.top.values(), default=each.logprob)
        far = best - each.logprob
        judge.demand("X9", far <= logit_bound(each), f"token {place} is greedy and {far:.3g} below the likeliest")


def judge_ids(server: Server, ids: list[int]) -> None:
    """A prompt of token ids has as many tokens as ids. A server that takes no ids is not judged: ``NotOffered``."""
    server.extra(ids, **greedy(server))
    judge_answer(server, ids)


def judge_stream(server: Server, prompt: str) -> None:
    """A stream is the whole answer in pieces, says once why it ends, and ends with ``[DONE]``."""
    judge = Judge(server, "judge_stream", prompt)
    alone, streamed = server.complete(prompt, **greedy(server)), server.stream(prompt, **greedy(server))
    judge.demand("X4", streamed.is_done, "the stream ends without data: [DONE]")
    judge.demand("X4", list(streamed.choices) == [0], f"the stream has answers {list(streamed.choices)}")
    [choice] = streamed.choices.values()
    judge.demand("X4", len(choice.finish_reasons) == 1, f"the stream ends for the reasons {choice.finish_reasons}")
    if choice.logprobs and choice.finish_reasons == ("length",):
        whole = "".join(each.token for each in choice.logprobs)
        judge.demand("X5", pieces_are_the_whole(choice.pieces, whole), f"pieces {choice.pieces} of {whole!r}")
    judge.same("X4", alone, streamed, "streamed")
    judge.demand("X6", streamed.usage is not None or alone.usage is None, "no usage, which was asked for")
    if alone.usage and streamed.usage and choice.text == alone.choices[0].text:
        judge.demand("X6", alone.usage == streamed.usage, f"streamed {streamed.usage}, whole {alone.usage}")


def judge_warm(server: Server, prompt: str) -> None:
    """An answer that finds its prompt in the cache is the one that did not: alone, and as the beginning of another."""
    judge = Judge(server, "judge_warm", prompt)
    alone = server.complete(prompt, **greedy(server))
    for count in range(3):
        judge.same("X9", alone, server.complete(prompt, **greedy(server)), f"asked again, time {count + 1}")
    longer = prompt + alone.choices[0].text
    first = server.complete(longer, **greedy(server))
    judge.same(
        "X9", first, server.complete(longer, **greedy(server)), "a longer prompt with a cached beginning, asked again"
    )


def judge_batch(server: Server, prompts: Sequence[str]) -> None:
    """Each of several answers at once is the one that came alone; so are those of one prompt asked many times."""
    judge = Judge(server, "judge_batch", list(prompts))
    alone = [server.complete(prompt, **greedy(server)) for prompt in prompts]
    asks = [partial(server.complete, prompt, **greedy(server)) for prompt in (*prompts, *prompts)]
    for prompt, one, other in zip((*prompts, *prompts), (*alone, *alone), together(asks), strict=True):
        judge.same("X12", one, other, f"{prompt!r} beside {len(asks) - 1} others")


def judge_samples(server: Server, prompt: str) -> None:
    """n answers are greedy alike, drawn apart; the prompt is counted once and every answer."""
    judge = Judge(server, "judge_samples", prompt)
    alone, three = server.complete(prompt, **greedy(server)), server.extra(prompt, **greedy(server), n=3)
    judge.demand("X6", list(three.choices) == [0, 1, 2], f"asked for n = 3, got {list(three.choices)}")
    judge.same("X12", alone, three, "one of n = 3")
    ended = {choice.finish_reasons for choice in three.choices.values()}
    if three.usage and ended == {("length",)}:
        used = three.usage.num_completion_tokens
        judge.demand("X6", used == 3 * NUM_TOKENS, f"{used} completion tokens for n = 3 answers of {NUM_TOKENS}")
    texts = [choice.text for choice in server.complete(prompt, **DRAWN, n=3).choices.values()]
    judge.demand("X7", len(set(texts)) > 1, f"n = 3 draws {texts}")


def judge_seed(server: Server, prompt: str) -> None:
    """A seeded answer comes again, whole and streamed, and another seed gives another."""
    judge = Judge(server, "judge_seed", prompt)
    first = server.extra(prompt, **DRAWN).choices[0].text
    again, streamed = server.complete(prompt, **DRAWN).choices[0].text, server.stream(prompt, **DRAWN).choices[0].text
    judge.demand("X7", first == again, f"seed 7 gives {again!r} the second time, {first!r} the first")
    judge.demand("X7", first == streamed, f"seed 7 streamed gives {streamed!r}, whole {first!r}")
    others = {server.complete(prompt, **{**DRAWN, "seed": seed}).choices[0].text for seed in range(4)}
    judge.demand("X7", len(others) > 1, f"four seeds give {others}")


def judge_leavers(server: Server, prompts: Sequence[str]) -> None:
    """Callers who go away in the middle change nothing for those who stay, and hold nothing up."""
    judge = Judge(server, "judge_leavers", list(prompts))
    alone = [server.complete(prompt, **greedy(server)) for prompt in prompts]
    long = {**greedy(server), "max_tokens": 4 * NUM_TOKENS}
    leave: list[Callable[[], Reply | None]] = [partial(server.leave, prompt, **long) for prompt in prompts]
    stay: list[Callable[[], Reply | None]] = [partial(server.complete, prompt, **greedy(server)) for prompt in prompts]
    answers = [each for each in together([*leave, *stay]) if each is not None]
    for prompt, one, other in zip(prompts, alone, answers, strict=True):
        judge.same("X12", one, other, f"{prompt!r} beside callers who leave")
    for prompt, one in zip(prompts, alone, strict=True):
        judge.same("X8", one, server.complete(prompt, **greedy(server)), f"{prompt!r} after callers have left")


def judge_stop(server: Server, prompt: str) -> None:
    """Text ends before the first stop string in it, wherever that begins, and nothing of it is shown."""
    judge = Judge(server, "judge_stop", prompt)
    alone = server.complete(prompt, **greedy(server)).choices[0]
    whole = alone.text
    places = [(len(whole) // 3, 1), (len(whole) // 2, 2), (len(whole) // 2, 4)]
    for stop in dict.fromkeys(whole[at : at + size] for at, size in places):
        if not stop.strip():
            continue
        expected = cut(whole, [stop])
        for how, reply in (
            ("whole", server.complete(prompt, **greedy(server), stop=[stop])),
            ("streamed", server.stream(prompt, **greedy(server), stop=[stop])),
        ):
            [choice] = reply.choices.values()
            shown = ["".join(choice.pieces[:count]) for count in range(len(choice.pieces) + 1)]
            found = f"stop {stop!r}, {how}: {choice.text!r}, the text without a stop is {whole!r}"
            judge.demand("X3", stop not in choice.text, found)
            if choice.text != expected and is_explained(alone, choice):
                continue
            judge.demand("X3", choice.text == expected and only_grows([*shown, expected]), found)
            ended = f"stop {stop!r}, {how}: the answer ended for the reasons {choice.finish_reasons}"
            judge.demand("X3", choice.finish_reasons == ("stop",), ended)


BAD_FIELDS: tuple[dict[str, object], ...] = (
    {"n": 0},
    {"n": -1},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"top_p": 2},
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"n": 10**9},
)


def judge_refusals(server: Server, prompt: str) -> None:
    """What makes no sense is turned down as the caller's mistake, and changes nothing for others."""
    judge = Judge(server, "judge_refusals", prompt)
    alone = server.complete(prompt, **greedy(server))
    for fields in BAD_FIELDS:
        answer = server.offer(prompt, **{**greedy(server), **fields})
        found = f"{fields} is answered with {'an answer' if isinstance(answer, Reply) else answer.status}"
        judge.demand("X2", isinstance(answer, Refusal) and 400 <= answer.status < 500, found)
    judge.same("X1", alone, server.complete(prompt, **greedy(server)), "after requests that were turned down")
