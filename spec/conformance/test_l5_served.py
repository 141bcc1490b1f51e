"""Level L5: a server gives the same answer to the same request, whoever else asks and however it is sent."""

from collections.abc import Callable

import pytest

from spec.conformance.served import (
    PROMPTS,
    judge_answer,
    judge_batch,
    judge_ids,
    judge_leavers,
    judge_refusals,
    judge_samples,
    judge_seed,
    judge_stop,
    judge_stream,
    judge_warm,
)
from spec.conformance.served_client import NotOffered, Server

every_prompt = pytest.mark.parametrize("prompt", PROMPTS, ids=[f"prompt-{place}" for place in range(len(PROMPTS))])
two_prompts = pytest.mark.parametrize("prompt", PROMPTS[1:3], ids=["prompt-1", "prompt-2"])


@pytest.fixture
def server(served_url: str, served_keys: list[str]) -> Server:
    return Server(served_url, key=served_keys[0] if served_keys else None)


def offered(judge: Callable[[], object]) -> None:
    """What a server does not have is skipped."""
    try:
        judge()
    except NotOffered as reason:
        pytest.skip(str(reason))


@every_prompt
def test_an_answer_is_counted_and_likely(server: Server, prompt: str) -> None:
    """X4, X5, X6, X9, X11."""
    judge_answer(server, prompt)


@pytest.mark.parametrize("length", [1, 7])
def test_a_prompt_of_ids_has_as_many_tokens(server: Server, length: int) -> None:
    """X6."""
    offered(lambda: judge_ids(server, list(range(5, 5 + length))))


@two_prompts
def test_a_stream_is_the_whole_in_pieces(server: Server, prompt: str) -> None:
    """X4, X5, X6."""
    judge_stream(server, prompt)


@two_prompts
def test_a_warm_cache_changes_nothing(server: Server, prompt: str) -> None:
    """X9."""
    judge_warm(server, prompt)


def test_a_batch_changes_nothing(server: Server) -> None:
    """X12."""
    judge_batch(server, PROMPTS)


@two_prompts
def test_n_answers_are_alike_when_greedy_and_drawn_apart(server: Server, prompt: str) -> None:
    """X6, X7, X12."""
    offered(lambda: judge_samples(server, prompt))


@two_prompts
def test_a_seed_brings_an_answer_again(server: Server, prompt: str) -> None:
    """X7."""
    offered(lambda: judge_seed(server, prompt))


def test_callers_who_leave_change_nothing(server: Server) -> None:
    """X8, X12."""
    judge_leavers(server, PROMPTS)


@two_prompts
def test_text_ends_before_the_first_stop_string(server: Server, prompt: str) -> None:
    """X3."""
    judge_stop(server, prompt)


def test_what_makes_no_sense_is_turned_down(server: Server) -> None:
    """X1, X2."""
    judge_refusals(server, PROMPTS[0])
