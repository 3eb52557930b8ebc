"""The time limit of an agent program, on a simulated clock."""

from rlhf_cli.agents.time_limit import TimeLimit


def test_time_runs_from_the_start_and_anew_from_an_answer():
    limit = TimeLimit(10.0, now=100.0)
    assert limit.remaining(104.0) == 6.0
    limit.ask(104.0)
    assert limit.remaining(500.0) == 10.0  # generation does not count
    limit.answer(500.0, is_refused=False)
    assert limit.remaining(509.0) == 1.0
    assert limit.remaining(510.0) == 0.0


def test_a_refusal_gains_no_time_and_costs_none():
    limit = TimeLimit(10.0, now=0.0)
    for now in (2.0, 14.0, 26.0):  # each request waits for ten seconds, with two seconds in between
        limit.ask(now)
        limit.answer(now + 10.0, is_refused=True)
    assert limit.remaining(36.0) == 4.0


def test_a_refusal_beside_an_answer_leaves_the_time_of_the_answer():
    limit = TimeLimit(10.0, now=0.0)
    limit.ask(1.0)
    limit.ask(9.0)  # nine seconds after the start, one of them used by the program
    limit.answer(20.0, is_refused=False)
    limit.answer(30.0, is_refused=True)
    assert limit.remaining(30.0) == 10.0


def test_requests_that_are_refused_side_by_side_leave_the_time_before_the_first():
    limit = TimeLimit(10.0, now=0.0)
    limit.ask(1.0)
    limit.ask(50.0)
    limit.answer(60.0, is_refused=True)
    assert limit.remaining(61.0) == 10.0
    limit.answer(70.0, is_refused=True)
    assert limit.remaining(70.0) == 9.0


def test_the_clock_stands_still_while_any_request_waits():
    limit = TimeLimit(10.0, now=0.0)
    limit.ask(1.0)
    limit.ask(1.0)
    limit.answer(2.0, is_refused=False)
    assert limit.remaining(500.0) == 10.0
    limit.answer(500.0, is_refused=False)
    assert limit.remaining(501.0) == 9.0
