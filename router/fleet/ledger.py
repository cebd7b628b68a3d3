"""The in-flight ledger of one instance: what this gateway has promised to it, in expected seconds and tokens.

An engine computes prefills one after another (chunked prefill shares the steps, not the arithmetic), so the work ahead
of a new request is the sum of what is promised and not yet past its first token, less what the head of that queue has
had already. Time is an argument everywhere.
"""

FOREVER = float("inf")


class Ticket:
    """One request at one instance, from dispatch to its end."""

    __slots__ = ("_ledger", "deadline", "done", "prefill_tokens", "queued", "read_bytes", "work_s")

    def __init__(
        self, ledger: "Ledger", prefill_tokens: int, work_s: float, read_bytes: float, deadline: float
    ) -> None:
        self._ledger = ledger
        self.prefill_tokens = prefill_tokens
        self.work_s = work_s
        self.read_bytes = read_bytes
        self.deadline = deadline
        """When a request that shows no first token is taken to be past it; infinite for a stream."""
        self.queued = True
        self.done = False

    def first_token(self, now: float) -> None:
        """The prefill is over. Further calls do nothing."""
        if self.queued:
            self._ledger._leave_queue(self, now)

    def finish(self, now: float) -> None:
        """The request is over, answered or not. Further calls do nothing."""
        if not self.done:
            self.done = True
            self.first_token(now)
            self._ledger.in_flight -= 1


class Ledger:
    """Tickets in the order of their dispatch; `wait_s` is what a new request would wait behind them.

    The sums are kept as tickets come and go, since they are asked for at every decision about every instance.
    """

    __slots__ = ("_head_since", "_next_due", "_queue", "_queued_tokens", "_read_bytes", "_work_s", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        """Requests started and not finished."""
        # An ordered set. Requests leave mostly at the head, but may leave anywhere: cancelled, failed, overtaken.
        self._queue: dict[Ticket, None] = {}
        self._head_since = 0.0
        self._next_due = FOREVER
        self._work_s = 0.0
        self._queued_tokens = 0
        self._read_bytes = 0.0

    def start(
        self,
        now: float,
        *,
        prefill_tokens: int,
        work_s: float,
        read_bytes: float,
        expected_wait_s: float,
        streaming: bool,
    ) -> Ticket:
        """Promise a request to the instance.

        `work_s`: expected seconds of read and prefill; `read_bytes`: KV bytes to be read from the pool. A request that
        is not streamed shows no first token, so it leaves the queue by itself once that is due.
        """
        deadline = FOREVER if streaming else now + expected_wait_s + work_s
        ticket = Ticket(self, prefill_tokens, work_s, read_bytes, deadline)
        if not self._queue:
            self._head_since = now
        self._queue[ticket] = None
        self._next_due = min(self._next_due, deadline)
        self._work_s += work_s
        self._queued_tokens += prefill_tokens
        self._read_bytes += read_bytes
        self.in_flight += 1
        return ticket

    def wait_s(self, now: float) -> float:
        """Seconds, never negative, until the prefill of a request that is sent now could begin."""
        if self._next_due <= now:
            self._drop_due(now)
        if not self._queue:
            return 0.0
        head = next(iter(self._queue))
        # An overdue head counts as done: that it is late says nothing about how much longer it will take.
        return max(0.0, self._work_s - min(head.work_s, max(0.0, now - self._head_since)))

    def queued(self, now: float) -> int:
        """Requests not yet past their first token."""
        if self._next_due <= now:
            self._drop_due(now)
        return len(self._queue)

    def queued_tokens(self, now: float) -> int:
        """Tokens to be computed for the requests that are not yet past their first token."""
        if self._next_due <= now:
            self._drop_due(now)
        return self._queued_tokens

    def read_bytes(self, now: float) -> float:
        """Bytes of pool reads believed to be still in progress."""
        if self._next_due <= now:
            self._drop_due(now)
        return self._read_bytes

    def _drop_due(self, now: float) -> None:
        due = [ticket for ticket in self._queue if ticket.deadline <= now]
        for ticket in due:
            self._leave_queue(ticket, ticket.deadline)
        self._next_due = min((ticket.deadline for ticket in self._queue), default=FOREVER)

    def _leave_queue(self, ticket: Ticket, now: float) -> None:
        head = next(iter(self._queue))
        ticket.queued = False
        del self._queue[ticket]
        if ticket is head:
            self._head_since = now
        if self._queue:
            self._work_s -= ticket.work_s
            self._queued_tokens -= ticket.prefill_tokens
            self._read_bytes -= ticket.read_bytes
        else:
            # Exact zeros, so that rounding errors do not add up over a day.
            self._work_s = self._read_bytes = 0.0
            self._queued_tokens = 0
