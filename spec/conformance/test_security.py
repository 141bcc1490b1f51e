"""Level SECURITY: attacks on a server, one test for each way in which servers were broken. Runs only if it is named."""

from collections.abc import Callable

import pytest

from spec.conformance.attacker import Attacked
from spec.conformance.poisons import DEADLY, GRAMMARS, GREEDY, ways_to_ask
from spec.conformance.security import (
    CHAT,
    COMPLETIONS,
    DISGUISES,
    MASKS,
    TOO_MUCH,
    judge_addresses,
    judge_bytes,
    judge_detours,
    judge_disguise,
    judge_errors,
    judge_greed,
    judge_ids,
    judge_labels,
    judge_leaving,
    judge_masks,
    judge_objects,
    judge_poison,
    judge_routes,
    judge_shared_cache,
    judge_template,
    judge_wrong_keys,
)
from spec.conformance.served_client import NotOffered


def offered(judge: Callable[[], object]) -> None:
    """What a server does not have, or nobody has the keys for, is skipped."""
    try:
        judge()
    except NotOffered as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_object_is_loaded(attacked: Attacked, path: str) -> None:
    judge_objects(attacked, path)


def test_no_template_is_run(attacked: Attacked) -> None:
    judge_template(attacked)


def test_every_route_wants_a_key(attacked: Attacked) -> None:
    offered(lambda: judge_routes(attacked))


@pytest.mark.parametrize("name", DISGUISES)
def test_no_header_opens_a_route(attacked: Attacked, name: str) -> None:
    offered(lambda: judge_disguise(attacked, name))


def test_no_detour_opens_a_route(attacked: Attacked) -> None:
    offered(lambda: judge_detours(attacked))


def test_what_is_nearly_a_key_is_none(attacked: Attacked) -> None:
    offered(lambda: judge_wrong_keys(attacked))


@pytest.mark.parametrize("what", TOO_MUCH)
def test_too_much_is_turned_down_before_it_is_read(attacked: Attacked, what: str) -> None:
    judge_bytes(attacked, what)


@pytest.mark.parametrize("what", GREEDY)
def test_too_much_is_turned_down_before_it_is_done(attacked: Attacked, what: str) -> None:
    judge_greed(attacked, COMPLETIONS, GREEDY[what][1])


@pytest.mark.parametrize("what", GRAMMARS)
def test_no_grammar_keeps_a_server_busy(attacked: Attacked, what: str) -> None:
    for fields in ways_to_ask(GRAMMARS[what][1]):
        for path in (COMPLETIONS, CHAT):
            judge_poison(attacked, "grammar", path, fields)


def test_no_name_of_a_callers_is_in_the_metrics(attacked: Attacked) -> None:
    judge_labels(attacked)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "audio_url"])
def test_no_address_of_a_callers_is_asked(attacked: Attacked, kind: str) -> None:
    judge_addresses(attacked, kind)


@pytest.mark.parametrize("what", DEADLY)
def test_no_request_brings_a_server_down(attacked: Attacked, what: str) -> None:
    fields = DEADLY[what][1]
    judge_poison(attacked, "deadly-request", COMPLETIONS, fields)
    if "prompt" not in fields:  # another door to the same engine
        judge_poison(attacked, "deadly-request", CHAT, fields)


@pytest.mark.parametrize("name", MASKS)
def test_what_one_asks_is_not_done_to_another(attacked: Attacked, name: str) -> None:
    judge_masks(attacked, name)


def test_two_requests_with_one_id_are_two(attacked: Attacked) -> None:
    judge_ids(attacked)


def test_who_goes_away_ends_nobody_elses_request(attacked: Attacked) -> None:
    judge_leaving(attacked)


def test_nobody_is_told_what_others_have_in_the_cache(attacked: Attacked) -> None:
    offered(lambda: judge_shared_cache(attacked))


def test_errors_show_nothing_of_the_inside(attacked: Attacked) -> None:
    judge_errors(attacked)
