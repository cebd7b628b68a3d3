"""The in-flight ledger: what a new request would wait behind what was promised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.fleet.ledger import Ledger, Ticket


def start(ledger: Ledger, now: float, work_s: float = 1.0, *, streaming: bool = True, **more: float) -> Ticket:
    return ledger.start(
        now,
        prefill_tokens=int(more.get("tokens", 100)),
        work_s=work_s,
        read_bytes=more.get("read_bytes", 0.0),
        expected_wait_s=more.get("expected_wait_s", 0.0),
        streaming=streaming,
    )


def test_an_empty_ledger_means_no_wait() -> None:
    assert Ledger().wait_s(5.0) == 0.0


def test_the_wait_is_the_work_ahead_less_what_its_head_has_had() -> None:
    ledger = Ledger()
    start(ledger, 10.0, 2.0)
    start(ledger, 10.5, 3.0)
    assert ledger.wait_s(11.0) == pytest.approx(4.0)


def test_an_overdue_head_counts_nothing_and_takes_nothing_from_the_rest() -> None:
    ledger = Ledger()
    start(ledger, 0.0, 2.0)
    start(ledger, 0.0, 3.0)
    assert ledger.wait_s(100.0) == pytest.approx(3.0)


def test_the_next_ones_work_begins_with_the_heads_first_token() -> None:
    ledger = Ledger()
    head = start(ledger, 0.0, 2.0)
    start(ledger, 0.0, 3.0)
    head.first_token(5.0)
    assert ledger.wait_s(6.0) == pytest.approx(2.0)
    assert ledger.in_flight == 2


def test_a_request_behind_that_leaves_takes_its_work_with_it() -> None:
    ledger = Ledger()
    start(ledger, 0.0, 2.0)
    start(ledger, 0.0, 3.0).finish(1.0)
    assert ledger.wait_s(1.0) == pytest.approx(1.0)


def test_a_request_that_shows_no_first_token_leaves_when_it_is_due() -> None:
    ledger = Ledger()
    start(ledger, 0.0, 2.0, streaming=False, expected_wait_s=1.0)
    assert ledger.queued(2.9) == 1
    assert ledger.queued(3.0) == 0
    assert ledger.in_flight == 1


def test_tokens_and_bytes_are_counted_until_the_first_token() -> None:
    ledger = Ledger()
    one = start(ledger, 0.0, tokens=500, read_bytes=7e9)
    start(ledger, 0.0, tokens=20)
    assert (ledger.queued_tokens(0.0), ledger.read_bytes(0.0)) == (520, 7e9)
    one.first_token(1.0)
    assert (ledger.queued_tokens(1.0), ledger.read_bytes(1.0)) == (20, 0.0)


def test_first_token_and_finish_may_come_twice() -> None:
    ledger = Ledger()
    ticket = start(ledger, 0.0)
    for _ in range(2):
        ticket.first_token(1.0)
        ticket.finish(2.0)
    assert (ledger.in_flight, ledger.queued(2.0)) == (0, 0)


moves = st.lists(
    st.tuples(
        st.sampled_from(["start", "whole", "first", "finish"]), st.integers(0, 30), st.floats(0, 5), st.floats(0, 3)
    ),
    max_size=60,
)


@given(moves)
def test_whatever_happens_nothing_is_negative_and_all_returns_to_zero(
    script: list[tuple[str, int, float, float]],
) -> None:
    ledger = Ledger()
    tickets: list[Ticket] = []
    now = 0.0
    for move, which, work_s, passes in script:
        now += passes
        if move in ("start", "whole"):
            tickets.append(start(ledger, now, work_s, streaming=move == "start", read_bytes=1e9))
        elif tickets:
            ticket = tickets[which % len(tickets)]
            ticket.first_token(now) if move == "first" else ticket.finish(now)
        waiting = [ticket for ticket in tickets if ticket.queued]
        assert 0.0 <= ledger.wait_s(now) <= sum(ticket.work_s for ticket in waiting) + 1e-9
        assert ledger.in_flight == sum(1 for ticket in tickets if not ticket.done)
        assert ledger.queued_tokens(now) == 100 * ledger.queued(now)
    for ticket in tickets:
        ticket.finish(now)
    assert (ledger.in_flight, ledger.wait_s(now), ledger.queued_tokens(now), ledger.read_bytes(now)) == (0, 0.0, 0, 0.0)
