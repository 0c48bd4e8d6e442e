"""Decides which requests take part in the next step; plain Python, without JAX.

Requests run in order of arrival. A step decodes a token of every request past its prompt, and fills
the rest of its token budget with chunks of prompts. Pages for a whole prompt are taken at
admission. If an answer needs a page and none is free, the youngest request is preempted: it gives
up its pages, and later recomputes its tokens or restores its pages from the host.
"""

import bisect
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import final

from jaxinfra.serving.engine.pages import HostPages, PageAllocator, PrefixTree
from jaxinfra.serving.engine.plan import PlannedRow, SchedulerLimits, StepPlan
from jaxinfra.serving.engine.requests import RequestStream
from jaxinfra.serving.engine.states import Snapshots

_MUCH_PADDING = 512  # tokens, which take longer than a GPU needs to read weights once more
_TOKENS_AHEAD = 16
"""Tokens of each running request whose pages a new one leaves free, or it would soon be preempted.
"""


@final
class Scheduler:
    """Schedules waiting and running requests, and assigns KV-cache pages to them.

    Args:
        propose: returns draft tokens for a request, which one step verifies; None: no drafts.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        propose: Callable[[RequestStream], Sequence[int]] | None = None,
    ):
        self.limits = limits
        self.allocator = PageAllocator(limits.num_pages)
        self.host = HostPages(limits.num_host_pages, page_size=limits.page_size)
        self.tree = PrefixTree(self.allocator, page_size=limits.page_size, removed=self._removed)
        self.snapshots = Snapshots(limits.snapshot_slots, limits.host_state_slots)
        self.waiting: list[RequestStream] = []
        self.running: list[RequestStream] = []
        self.num_preemptions = 0
        self._slots = [*range(limits.max_running)]
        self._propose = propose
        self._saves: list[tuple[int, int]] = []  # of the step that is being planned
        self._restores: list[tuple[int, int]] = []
        self._planned: set[RequestStream] = set()
        # How many drafts hold is known when they are read.
        self._speculates = propose is not None or limits.num_drafts > 0

    def add(self, stream: RequestStream) -> None:
        """Adds a request to those that wait, and sets the limit on its number of tokens."""
        prompt = len(stream.request.prompt_ids)
        # The last token drawn is not fed back, so it needs no position.
        stream.limit = min(prompt + stream.request.max_new_tokens, self.limits.context + 1)
        assert prompt < stream.limit, "checked by the engine"
        bisect.insort(self.waiting, stream, key=lambda each: each.number)

    def plan(self) -> StepPlan:
        """Plans the next step, and updates the requests' state as if the step were done."""
        self._planned.clear()
        self._saves, self._restores = [], []
        self.snapshots.begin_step()
        plan = StepPlan(
            saves=self._saves,
            copies=[],
            zeros=[],
            restores=self._restores,
            states=self.snapshots.moves,
            chunks=[],
            chunk_length=0,
            decodes=[],
            verifies=[],
        )
        prompts = []
        for stream in [*self.running]:
            if stream.slot is None or not self._is_ready(stream, plan.copies):
                continue
            if stream.total - stream.computed > 1:
                prompts.append(stream)
            else:
                self._plan_answer(stream, plan)
        # Those of them that gave up their pages meanwhile are not running.
        prompts = [stream for stream in prompts if stream.slot is not None]
        num_tokens = plan.num_tokens
        plan = self._plan_prompts(plan, prompts, self.limits.max_step_tokens - num_tokens)
        copied = {page for _, page in plan.copies}
        plan.zeros.extend(page for page in self.allocator.unclean() if page not in copied)
        written = [page for _, page in plan.restores]
        for row in plan.rows:
            stream, count = row.stream, row.count
            stream.computed += count
            stream.unread += 1
            stream.pending += row.is_sampled
            written += self._pages(stream, row.start, row.start + count)
        self.allocator.suspect(written)
        return plan

    def _is_ready(self, stream: RequestStream, copies: list[tuple[int, int]]) -> bool:
        """Whether a running request can take part in the next step."""
        if stream.total >= stream.limit:
            return False  # it draws its last token already
        if self.limits.long_context is not None and (kind := self._kind(stream)) != stream.kind:
            if stream.unread:
                return False
            # Its keys are others now: all are computed again.
            self._give_up_pages(stream)
            stream.kind = kind
            return self._begin(stream, copies)
        # What a structure allows next is known when the draw is read.
        return not stream.pending or (stream.request.constraint is None and not self._speculates)

    def _kind(self, stream: RequestStream) -> tuple[bool, str | None, str | None]:
        """Returns what requests must have in common besides tokens to share a page: rotation
        angles, adapter and salt.
        """
        long, request = self.limits.long_context, stream.request
        return long is not None and stream.total > long, request.adapter, request.cache_salt

    def _plan_answer(
        self, stream: RequestStream, plan: StepPlan, *, may_draft: bool = True
    ) -> None:
        """Plans the next token of a request past its prompt, and drafts after it."""
        drafts, num_drafts = (), 0
        if self._speculates and may_draft and stream.can_be_drafted:
            room, long = stream.limit - stream.total - 1, self.limits.long_context
            if long is not None and stream.total <= long:
                # Keys of a longer context are others: no draft makes this one longer than that.
                room = min(room, long - stream.total)
            if self._propose is not None:
                drafts = tuple(self._propose(stream))[:room]
            num_drafts = min(self.limits.num_drafts, room) or len(drafts)
        if not self._reserve(stream, stream.computed + 1 + num_drafts):
            return
        row = self._row(stream, count=1, is_sampled=True)
        if num_drafts:
            row = row._replace(
                ids=(*row.ids, *drafts),
                count=1 + num_drafts,
                num_drafts=num_drafts,
                context=row.context + num_drafts,
            )
        (plan.verifies if num_drafts else plan.decodes).append(row)

    def _row(self, stream: RequestStream, *, count: int, is_sampled: bool) -> PlannedRow:
        assert stream.slot is not None
        self._planned.add(stream)
        start = stream.computed
        state = self._state_before(stream) if self.limits.has_states else 0
        return PlannedRow(
            stream=stream,
            slot=stream.slot,
            pages=stream.pages,
            start=start,
            ids=tuple(stream.tokens[start : start + count]),
            count=count,
            is_sampled=is_sampled,
            context=stream.total,
            targets=(
                tuple(stream.tokens[start + 1 : start + count + 1])
                if stream.request.scores_prompt
                else ()
            ),
            state=state,
        )

    def _state_before(self, stream: RequestStream) -> int:
        """Returns the slot of the states that a row goes on from, and keeps them where wanted."""
        begins_from, stream.begins_from = stream.begins_from, None
        if stream.computed == 0:
            return self.limits.empty_state
        assert stream.slot is not None
        if begins_from is not None:
            slot = self.snapshots.begin(begins_from, stream.slot)
            if slot != stream.slot:
                return slot
        self._take_snapshot(stream, stream.slot)
        return stream.slot

    def _take_snapshot(self, stream: RequestStream, slot: int) -> None:
        """Keeps a request's states if its tokens end with a page; the latest of each suffices,
        beside those that others go on from.
        """
        at, old = stream.computed, stream.snapshot
        is_shared = self.limits.share_prefixes and not stream.request.scores_prompt
        if not is_shared or at % self.limits.page_size:
            return
        if old is not None and old.is_used and old.page is None:
            return  # its pages are not in the tree yet
        if (
            old is not None
            and not old.is_used
            and (old.page is None or self.snapshots.is_kept(old))
        ):
            self.snapshots.drop(old)
        stream.snapshot = new = self.snapshots.take(at, slot)
        if new is not None:
            new.is_used = at in stream.wanted
            self._attach(stream)

    def _attach(self, stream: RequestStream) -> None:
        """Lets the prefix tree hold a request's newest snapshot, once it has the pages before."""
        new, size = stream.snapshot, self.limits.page_size
        if new is None or new.page is not None or new.num_tokens > stream.num_registered * size:
            return
        page = stream.pages[new.num_tokens // size - 1]
        stream.snapshot = self.snapshots.attach(new, page)

    def _removed(self, page: int) -> None:
        """Forgets what is kept of a page that leaves the prefix tree."""
        self.host.forget(page)
        self.snapshots.forget(page)

    def _plan_prompts(self, plan: StepPlan, prompts: list[RequestStream], budget: int) -> StepPlan:
        """Plans one call for chunks of prompts: first those under way, then newly admitted ones."""
        length, rows = 0, []
        source = iter(prompts)
        while True:
            room = self._piece_rows(length, budget)
            if rows and rows[0].stream.request.scores_prompt:
                room = 1  # whose prompt is scored has a call for itself
            stream = next(source, None) if len(rows) < room else None
            if stream is not None and rows and stream.request.scores_prompt:
                continue
            if stream is None and len(rows) < room:
                if rows and self.waiting and self.waiting[0].request.scores_prompt:
                    break
                stream = self._admit(plan.copies)
            if stream is None:
                break
            left = stream.total - stream.computed
            if left == 1:
                # Whose pages are on their way gives up none: drafts may need more.
                self._plan_answer(stream, plan, may_draft=False)
                budget -= 1
                continue
            if not rows:
                length = self._chunk_length(left, budget)
            count = min(left, length)
            ends = [each for each in stream.wanted if stream.computed < each]
            if ends:
                count = min(count, min(ends) - stream.computed)
            rows.append(self._row(stream, count=count, is_sampled=count == left))
        rows = rows[: self._unpadded(len(rows), length)]
        return dataclasses.replace(plan, chunks=rows, chunk_length=length)

    def _unpadded(self, count: int, length: int) -> int:
        """Returns how many of ``count`` rows a prompt call takes: fewer if it would compute much
        padding otherwise. The others come a step later, which takes less time.
        """
        smaller = [size for size in self.limits.row_sizes if size <= count]
        padding = (self.limits.rows(count) - count) * length
        if not smaller or padding < _MUCH_PADDING or self.limits.has_states:
            return count  # the states that a row goes on from might be gone by then
        return smaller[-1]

    def _chunk_length(self, left: int, budget: int) -> int:
        """Returns tokens per row of a prompt call, by what is left of the first row's prompt."""
        fitting = [
            size for size in self.limits.chunk_sizes if size * self.limits.rows(1) <= budget
        ] or [self.limits.chunk_sizes[0]]
        return next((size for size in fitting if size >= left), fitting[-1])

    def _piece_rows(self, length: int, budget: int) -> int:
        """Returns how many rows a prompt call of this many tokens per row may have."""
        if budget < self.limits.chunk_sizes[0]:
            return 0
        if not length:
            return 1
        fitting = [
            rows
            for rows in self.limits.row_sizes
            if rows <= max(self.limits.max_piece_rows, self.limits.row_sizes[0])
            and rows * length <= budget
        ]
        return fitting[-1] if fitting else 1

    def _admit(self, copies: list[tuple[int, int]]) -> RequestStream | None:
        """Admits the first waiting request with pages for its tokens; None if it has to wait."""
        if not self.waiting or not self._slots:
            return None
        stream = self.waiting[0]
        if stream.unread:
            return None  # it gave up its pages, and its last rows are not read yet
        stream.kind = self._kind(stream)
        if not self._begin(stream, copies):
            return None
        self.waiting.pop(0)
        stream.slot = heapq.heappop(self._slots)
        bisect.insort(self.running, stream, key=lambda each: each.number)
        return stream

    def _begin(self, stream: RequestStream, copies: list[tuple[int, int]]) -> bool:
        """Gives a request without pages those of its tokens; False, and none, if there are too
        few, or if another request is about to compute the same.
        """
        size, total = self.limits.page_size, stream.total
        pages, cached = [], 0
        if self.limits.share_prefixes and not stream.request.scores_prompt:
            found = self.tree.match(stream.tokens, kind=stream.kind, limit=total - 1)
            pages, cached = [*found.pages], found.num_tokens
        restored = self.host.num_tokens(stream)
        if self.limits.has_states:
            cached = self._to_state(stream, pages, cached, restored)
        elif restored <= cached:
            restored = 0
        whole = cached // size
        needed = -(-total // size) - whole
        spare = 0
        if stream.slot is None:
            spare = -(-len(self.running) * min(_TOKENS_AHEAD, size) // size)
        if len(pages) > whole and (restored or needed + spare > self._num_available):
            # The host has more of this page; or a page to copy from is one more than there may be.
            self.allocator.release(pages.pop())
            cached = whole * size
        if needed + spare > self._num_available or self._is_computed_elsewhere(
            stream, max(cached, restored)
        ):
            self.allocator.release_all(pages)
            if stream.slot is not None:
                self._preempt(stream)
            return False
        fresh = [self._take_page() for _ in range(needed)]
        if len(pages) > whole:
            # It goes on within a page that others read.
            copies.append((pages[whole], fresh[0]))
            self.allocator.release(pages.pop())
        stream.pages = (*pages, *fresh)
        stream.computed, stream.num_registered = max(cached, restored), whole
        stream.num_finite = 0
        if len(stream.tokens) == len(stream.request.prompt_ids) and stream.saved is None:
            stream.num_cached = cached
        if not restored:
            self._drop_saved_state(stream)
        self._restores += self.host.restore(stream, whole, restored)
        return True

    def _to_state(self, stream: RequestStream, pages: list[int], cached: int, restored: int) -> int:
        """Returns how many of the cached tokens have their states kept, or come before those that
        the host restores; releases further pages.

        Where the request leaves what is cached, others may too: there its states will be kept.
        """
        size = self.limits.page_size
        whole = cached // size
        if restored:
            assert stream.saved is not None
            whole = min(whole, restored // size)
            self.allocator.release_all(pages[whole:])
            del pages[whole:]
            stream.begins_from, stream.wanted = stream.saved.state, set()
            return whole * size
        # A request that runs may not be planned at once, and the snapshot be gone by then.
        found = self.snapshots.latest(pages[:whole]) if stream.slot is None else None
        known = 0 if found is None else found.num_tokens // size
        self.allocator.release_all(pages[known:])
        del pages[known:]
        stream.begins_from = found
        stream.wanted = {whole * size} if whole > known else set()
        return known * size

    def _is_reached_elsewhere(self, stream: RequestStream, cached: int) -> bool:
        """Whether a running request is about to reach where this one leaves it, further than states
        are kept; that request then keeps them there.
        """
        size = self.limits.page_size
        first = cached // size * size
        for other in self.running:
            new, is_prompt = other.snapshot, other.total - other.computed > 1
            # Pages of its newest snapshot are not in the tree yet.
            ahead = new.num_tokens if new is not None and new.page is None else 0
            if other is stream or other.kind != stream.kind or not (is_prompt or ahead):
                continue
            if stream.tokens[first : first + size] != other.tokens[first : first + size]:
                continue  # without reading what both have before
            common = self._num_common(stream, other) // size * size
            if common <= cached or other.request.scores_prompt:
                continue
            if is_prompt and other.computed <= common:
                other.wanted.add(common)
                return True
            if cached < ahead <= common:
                return True
        return False

    def _num_common(self, stream: RequestStream, other: RequestStream) -> int:
        """Returns how many first tokens of a waiting request another has, but for its last."""
        known = stream.common.get(other.number)
        if known is None:
            equal = map(operator.eq, stream.tokens[: stream.total - 1], other.tokens)
            known = len([*itertools.takewhile(bool, equal)])
            stream.common[other.number] = known
        return known

    def _is_computed_elsewhere(self, stream: RequestStream, cached: int) -> bool:
        """Whether a running request has the same first tokens, for more pages than the tree has."""
        if not self.limits.share_prefixes or stream.request.scores_prompt:
            return False
        if self.limits.has_states:
            return self._is_reached_elsewhere(stream, cached)
        size = self.limits.page_size
        whole = cached - cached % size
        ahead = stream.tokens[: whole + size]
        if len(ahead) < whole + size or stream.total - 1 < whole + size:
            return False
        return any(
            other is not stream
            and other.kind == stream.kind
            and other.num_registered * size <= whole
            and other.tokens[: whole + size] == ahead
            for other in self.running
        )

    @property
    def _num_available(self) -> int:
        return self.allocator.num_free + self.allocator.num_idle

    def _take_page(self) -> int:
        if not self.allocator.num_free:
            self.tree.evict()
        return self.allocator.allocate()

    def _reserve(self, stream: RequestStream, num_tokens: int) -> bool:
        """Allocates pages for a request's first tokens; False if this request was preempted."""
        needed = -(-num_tokens // self.limits.page_size) - len(stream.pages)
        if needed <= 0:
            return True
        while needed > self._num_available:
            youngest = next(s for s in reversed(self.running) if s not in self._planned)
            self._preempt(youngest)
            if youngest is stream:
                return False
        stream.pages += tuple(self._take_page() for _ in range(needed))
        return True

    def _preempt(self, stream: RequestStream) -> None:
        """Takes a running request's pages, and puts it back among the waiting ones."""
        self.num_preemptions += 1
        copies = self.host.save(stream, tree=self.tree, needs_all=self.limits.has_states)
        if self.limits.has_states and stream.saved is not None:
            assert stream.slot is not None
            state = self.snapshots.save(stream.computed, stream.slot)
            if state is None:
                self.host.drop(stream)
            else:
                stream.saved = dataclasses.replace(stream.saved, state=state)
        self._saves += copies
        self._give_up_pages(stream)
        self._leave(stream)
        bisect.insort(self.waiting, stream, key=lambda each: each.number)

    def _leave(self, stream: RequestStream) -> None:
        assert stream.slot is not None
        self.running.remove(stream)
        heapq.heappush(self._slots, stream.slot)
        stream.slot = None

    def _give_up_pages(self, stream: RequestStream) -> None:
        self._leave_states(stream)
        self.allocator.release_all(stream.pages)
        stream.pages = ()
        stream.computed = stream.num_registered = 0

    def _drop_saved_state(self, stream: RequestStream) -> None:
        if stream.saved is not None and stream.saved.state is not None:
            self.snapshots.drop(stream.saved.state)

    def _leave_states(self, stream: RequestStream) -> None:
        """Drops a request's snapshot unless the prefix tree holds it."""
        if stream.snapshot is not None and stream.snapshot.page is None:
            self.snapshots.drop(stream.snapshot)
        stream.snapshot = stream.begins_from = None
        stream.wanted, stream.common = set(), {}

    def _register(self, stream: RequestStream, num_tokens: int) -> None:
        """Puts the full pages of a request's first tokens into the prefix tree.

        Their keys and values are known to be finite. Until then no other request may read them:
        one number that is not spoils those of tokens before it, too, in the layers behind, as
        masked values are multiplied by 0.
        """
        size = self.limits.page_size
        if self.limits.share_prefixes and num_tokens // size > stream.num_registered:
            pages, start = [*stream.pages], stream.num_registered
            self.tree.insert(stream.tokens[:num_tokens], pages, kind=stream.kind, start=start)
            stream.pages, stream.num_registered = tuple(pages), num_tokens // size
        self._attach(stream)

    def end(self, stream: RequestStream) -> None:
        """Removes a request, whether it waits or runs, and frees its pages."""
        stream.is_over = True
        if stream.slot is None:
            self.waiting.remove(stream)
            self._drop_saved_state(stream)
            self.host.drop(stream)
            return
        self._give_up_pages(stream)
        self._leave(stream)

    def take(
        self, row: PlannedRow, tokens: Sequence[int], num_accepted: int = 0
    ) -> tuple[int, ...]:
        """Takes a row's results, which are finite: adds sampled tokens to its request, and returns
        the tokens that were added. Others may read its full pages from now on.

        Args:
            tokens: sampled after the row's first token and after each draft; empty if the row does
                not sample.
            num_accepted: number of leading drafts that equal the samples.
        """
        stream = row.stream
        stream.unread -= 1
        stream.pending -= row.is_sampled
        if stream.is_over:
            return ()
        taken = tuple(tokens)[: 1 + num_accepted]
        stream.tokens += taken
        num_known = row.start + (1 + num_accepted if row.num_drafts else row.count)
        if stream.slot is not None:
            self._trust(stream, row.start + row.count)
            self._register(stream, num_known)
            if row.num_drafts:
                stream.computed = num_known  # what follows is overwritten
        elif row.num_drafts and stream.saved is not None and stream.saved.state is not None:
            stream.saved = dataclasses.replace(stream.saved, num_tokens=num_known)
        return taken

    def _trust(self, stream: RequestStream, num_tokens: int) -> None:
        """Marks pages as finite, up to the given number of tokens, after a row's results were. The
        last page may have more tokens by now.
        """
        size = self.limits.page_size
        num_pages = num_tokens // size if stream.unread else -(-num_tokens // size)
        if num_pages > stream.num_finite:
            self.allocator.trust(stream.pages[stream.num_finite : num_pages])
        stream.num_finite = num_tokens // size

    def _pages(self, stream: RequestStream, start: int, end: int) -> tuple[int, ...]:
        """Returns those of a request's pages that hold the given positions."""
        size = self.limits.page_size
        return stream.pages[start // size : -(-end // size)]
