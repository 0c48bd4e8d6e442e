"""Scheduling without a device: pages hold what rows read, nothing is lost, everyone comes through.

The device is played by a dict: a page is what was written at its places. What "the model" draws is
a function of all tokens before, so that a token out of place changes all that follow.
"""

import collections
import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxinfra.config.presets.models import tiny
from jaxinfra.config.rope import DynamicScaling, RopeConfig
from jaxinfra.errors import ConfigError
from jaxinfra.serving.engine.engine import NgramLookup
from jaxinfra.serving.engine.options import options_on
from jaxinfra.serving.engine.pages import NULL_PAGE, HostPages
from jaxinfra.serving.engine.plan import SchedulerLimits
from jaxinfra.serving.engine.requests import GenerationRequest, RequestStream
from jaxinfra.serving.engine.scheduler import Scheduler

POISON = 9


def drawn_after(tokens: tuple[int, ...]) -> int:
    """What "the model" says; few tokens, so that texts repeat themselves and share beginnings."""
    return hash(tokens) % 4


def continued(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = prompt
    for _ in range(count):
        tokens += (drawn_after(tokens),)
    return tokens[len(prompt) :]


class Key(NamedTuple):
    """Key of a token with all that is before it, of a kind."""

    kind: Hashable
    token: int
    is_bad: bool  # not finite


class Device:
    """Executes plans in order, and checks each."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.size = scheduler.limits.page_size
        self.pages = collections.defaultdict(dict)
        self.host = {}
        self.last = {}
        # A state is its kind with all tokens before, and whether it is bad.
        self.states = {scheduler.limits.empty_state: ((), False)}

    def run(self, plan, *, num_referenced):
        for page, slot in plan.saves:
            self.host[slot] = dict(self.pages[page])
        before = {source: dict(self.pages[source]) for source, _ in plan.copies}
        for source, target in plan.copies:
            self.pages[target] = dict(before[source])
        for page in plan.zeros:
            self.pages[page] = {}
        for slot, page in plan.restores:
            self.pages[page] = dict(self.host[slot])
        for source, target in plan.states:
            limits = self.scheduler.limits
            is_from_host = source in limits.host_state_slots
            assert is_from_host or target in (*limits.snapshot_slots, *limits.host_state_slots)
            self.states[target] = self.states[source]
        return [(row, self.row(row, num_referenced)) for row in plan.rows]

    def row(self, row, num_referenced):
        ids = row.ids or (self.last[row.slot],)
        ids = (*ids[: row.count], *[0] * (row.count - len(ids)))
        # A masked key counts too: its weight of 0 is multiplied with its value.
        held = [each for page in row.pages for each in self.pages[page].values()]
        is_bad = POISON in ids or any(each.is_bad for each in held)
        if self.scheduler.limits.has_states:
            before, is_bad_state = self.states[row.state]
            is_bad |= is_bad_state
        for place, token in enumerate(ids, start=row.start):
            page = row.pages[place // self.size]
            assert page != NULL_PAGE
            assert num_referenced[page] == 1, "a page that others read is not written"
            # In further layers those before a bad token are bad, too.
            key = Key(kind=row.stream.kind, token=token, is_bad=is_bad)
            self.pages[page][place % self.size] = key
        seen = []
        for place in range(row.start + row.count):
            key = self.pages[row.pages[place // self.size]][place % self.size]
            assert key.kind == row.stream.kind, "a page of another kind"
            seen.append(key.token)
        ends = range(row.start + 1, row.start + row.count + 1) if row.num_drafts else [len(seen)]
        tokens = [drawn_after(tuple(seen[:end])) for end in ends]
        num_held = 0
        while num_held < row.num_drafts and ids[num_held + 1] == tokens[num_held]:
            num_held += 1
        if self.scheduler.limits.has_states:
            assert (before or (row.stream.kind,)) == (row.stream.kind, *seen[: row.start]), (
                "states of other tokens"
            )
            kept = row.start + (1 + num_held if row.num_drafts else row.count)
            self.states[row.slot] = (row.stream.kind, *seen[:kept]), is_bad
        if row.is_sampled:
            self.last[row.slot] = tokens[num_held]
        return tokens, num_held, is_bad


def check_invariants(scheduler):
    allocator, tree = scheduler.allocator, scheduler.tree
    holders = collections.Counter(page for s in scheduler.running for page in s.pages)
    for page in range(1, allocator.num_pages):
        assert allocator._references[page] == holders[page] + (page in tree._nodes)
    assert all(not stream.pages for stream in scheduler.waiting)
    assert len({s.slot for s in scheduler.running}) == len(scheduler.running)
    assert all(stream.saved is None for stream in scheduler.running)
    kept = collections.Counter(slot for s in scheduler.waiting if s.saved for slot in s.saved.slots)
    for slot in range(scheduler.limits.num_host_pages):
        assert scheduler.host._users[slot] == kept[slot]
    assert scheduler.host.num_used == len(kept)


def check_snapshots(scheduler):
    """Each slot is free, or held by a page of the tree; without requests by nobody else."""
    snapshots = scheduler.snapshots
    kept = [each.slot for each in snapshots._kept.values()]
    slots = [*scheduler.limits.snapshot_slots, *scheduler.limits.host_state_slots]
    assert sorted([*snapshots._free, *snapshots._free_host, *kept]) == slots
    assert all(page in scheduler.tree for page in snapshots._kept)


def run(scheduler, arrivals, *, cancels=(), delay=1):
    """All arrivals (step, request) to their ends; returns what each has drawn, by number."""
    device, unread, results = Device(scheduler), collections.deque(), {}
    alive, waiting = {}, sorted(enumerate(arrivals), key=lambda each: each[1][0])
    cancels = collections.Counter(cancels)
    for step in range(5000):
        while waiting and waiting[0][1][0] <= step:
            number, (_, request) = waiting.pop(0)
            stream = RequestStream(
                number=number, request=request, tokens=[*request.prompt_ids], limit=0
            )
            scheduler.add(stream)
            alive[number] = stream
        for _ in range(cancels.pop(step, 0)):
            if alive:
                number = min(alive)
                results[number] = None
                scheduler.end(alive.pop(number))
        plan = scheduler.plan()
        check_invariants(scheduler)
        num_tokens = plan.num_tokens - sum(row.count for row in plan.chunks)
        if plan.chunks:
            rows = scheduler.limits.rows(len(plan.chunks))
            assert (rows, plan.chunk_length) in scheduler.limits.chunk_shapes
            assert max(row.count for row in plan.chunks) <= plan.chunk_length
            num_tokens += rows * plan.chunk_length
        assert num_tokens <= scheduler.limits.max_step_tokens
        if not plan.is_empty:
            # A stream's own page may be in the tree too, which reads only what is complete.
            users = collections.Counter(page for row in plan.rows for page in {*row.pages})
            written = {
                row.pages[place // scheduler.limits.page_size]
                for row in plan.rows
                for place in range(row.start, row.start + row.count)
            }
            unread.append(device.run(plan, num_referenced={page: users[page] for page in written}))
        while unread and (len(unread) > delay or plan.is_empty):
            for row, (tokens, held, is_bad) in unread.popleft():
                number = row.stream.number
                if is_bad and number in alive:
                    scheduler.end(alive.pop(number))
                    results[number] = "poisoned"
                    continue
                taken = scheduler.take(row, tokens if row.is_sampled else (), held)
                stream = row.stream
                if taken and len(stream.tokens) >= stream.limit:
                    results[number] = tuple(stream.tokens[len(stream.request.prompt_ids) :])
                    scheduler.end(alive.pop(number))
            if not plan.is_empty:
                break
        if not waiting and not alive and not unread:
            return results
    raise AssertionError("requests wait for ever")


LIMITS = SchedulerLimits(
    num_pages=12,
    page_size=4,
    max_running=4,
    max_step_tokens=24,
    max_positions=40,
    row_sizes=(1, 2, 4),
    chunk_sizes=(4, 8),
    max_piece_rows=2,
)

IDS = st.integers(0, 3)


def requests(ids):
    return st.builds(
        lambda prompt, new: GenerationRequest(prompt_ids=tuple(prompt), max_new_tokens=new),
        st.lists(ids, min_size=1, max_size=30),
        st.integers(1, 12),
    )


def limits():
    return st.builds(
        lambda pages, size, share, long, host, snapshots, states: dataclasses.replace(
            LIMITS,
            num_pages=pages,
            page_size=size,
            share_prefixes=share,
            long_context=long,
            num_host_pages=host,
            has_states=snapshots > 0,
            num_snapshots=snapshots,
            num_host_states=states if snapshots and host else 0,
        ),
        st.integers(12, 24),
        st.sampled_from([4, 5]),
        st.booleans(),
        st.sampled_from([None, 9, 20]),
        st.sampled_from([0, 3, 100]),
        st.sampled_from([0, 1, 2, 6]),
        st.sampled_from([0, 1, 3, 100]),
    )


@hypothesis.given(
    limits=limits(),
    arrivals=st.lists(st.tuples(st.integers(0, 12), requests(IDS)), min_size=1, max_size=10),
    cancels=st.lists(st.integers(0, 30), max_size=3),
    delay=st.integers(0, 2),
    num_drafts=st.sampled_from([0, 0, 3]),
)
# The third request's admission drops the snapshot that the second one goes on from.
@hypothesis.example(
    limits=dataclasses.replace(
        LIMITS,
        share_prefixes=True,
        long_context=9,
        has_states=True,
        num_snapshots=2,
    ),
    arrivals=[
        (0, GenerationRequest(prompt_ids=(3, 0, 3, 1, 0, 0, 0, 0), max_new_tokens=3)),
        (0, GenerationRequest(prompt_ids=(3, 0, 3, 1, 0, 0, 0, 0), max_new_tokens=2)),
        (0, GenerationRequest(prompt_ids=(3, 0, 3, 1, 0, 0), max_new_tokens=1)),
    ],
    cancels=[],
    delay=0,
    num_drafts=3,
)
@hypothesis.settings(max_examples=150)
def test_everyone_gets_what_the_model_says(limits, arrivals, cancels, delay, num_drafts):
    limits = dataclasses.replace(limits, max_step_tokens=24 + 4 * num_drafts)
    propose = NgramLookup(num_drafts=num_drafts) if num_drafts else None
    scheduler = Scheduler(limits, propose=propose)
    results = run(scheduler, arrivals, cancels=cancels, delay=delay)
    assert results.keys() == {*range(len(arrivals))}
    assert sum(result is None for result in results.values()) <= len(cancels)
    for number, (_, request) in enumerate(arrivals):
        if results[number] is not None:
            prompt = request.prompt_ids
            count = min(request.max_new_tokens, limits.context + 1 - len(prompt))
            assert results[number] == continued(prompt, count)
    assert scheduler.allocator.num_in_use == 0
    assert scheduler.allocator.num_idle == len(scheduler.tree)
    assert scheduler.host.num_used == 0
    check_snapshots(scheduler)


@hypothesis.given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), requests(st.sampled_from([0, 1, POISON]))),
        min_size=2,
        max_size=10,
    ),
    cancels=st.lists(st.integers(0, 30), max_size=3),
    num_host_pages=st.sampled_from([0, 3, 100]),
    num_snapshots=st.sampled_from([0, 3]),
    num_drafts=st.sampled_from([0, 3]),
    delay=st.integers(0, 2),
)
@hypothesis.settings(max_examples=60)
def test_poison_stays_with_its_request(
    arrivals, cancels, num_host_pages, num_snapshots, num_drafts, delay
):
    limits = dataclasses.replace(
        LIMITS,
        num_host_pages=num_host_pages,
        num_host_states=2 if num_snapshots and num_host_pages else 0,
        has_states=num_snapshots > 0,
        num_snapshots=num_snapshots,
        max_step_tokens=24 + 4 * num_drafts,
    )
    propose = NgramLookup(num_drafts=num_drafts) if num_drafts else None
    scheduler = Scheduler(limits, propose=propose)
    results = run(scheduler, arrivals, cancels=cancels, delay=delay)
    for number, (_, request) in enumerate(arrivals):
        prompt = request.prompt_ids
        if results[number] is not None:
            clean = continued(prompt, request.max_new_tokens)
            assert results[number] == ("poisoned" if POISON in prompt else clean)
    assert scheduler.allocator.num_in_use == 0


@pytest.mark.parametrize("num_snapshots", [0, 3])
@pytest.mark.parametrize("step", range(4))
def test_who_begins_like_a_poisoned_request_reads_none_of_its_pages(num_snapshots, step):
    states = {"has_states": num_snapshots > 0, "num_snapshots": num_snapshots}
    limits = dataclasses.replace(LIMITS, num_pages=30, chunk_sizes=(4, 8, 16), **states)
    prompt = tuple(n % 4 for n in range(11))
    others = [(step, request(*prompt)), (step, request(*prompt, 3, 3))]
    results = run(Scheduler(limits), [(0, request(*prompt, POISON)), *others])
    assert results == {0: "poisoned", 1: continued(prompt, 4), 2: continued((*prompt, 3, 3), 4)}


def test_a_page_of_one_that_was_cancelled_before_its_poison_was_read_is_zero():
    poisoned, innocent = request(0, 2, 3, 0, 1, 1, POISON), request(1, 1, new=6)
    results = run(Scheduler(LIMITS), [(0, poisoned), (1, innocent)], cancels=[1])
    assert results == {0: None, 1: continued((1, 1), 6)}


@hypothesis.given(
    arrivals=st.lists(st.tuples(st.integers(0, 6), requests(IDS)), min_size=1, max_size=8)
)
@hypothesis.settings(max_examples=30)
def test_plans_repeat(arrivals):
    def shapes():
        scheduler = Scheduler(LIMITS)
        plans, plan = [], scheduler.plan

        def noted():
            plans.append(plan())
            return plans[-1]

        scheduler.plan = noted
        run(scheduler, arrivals)
        return [[(r.stream.number, r.start, r.count, r.pages) for r in p.rows] for p in plans]

    assert shapes() == shapes()


def request(*prompt, new=4):
    return GenerationRequest(prompt_ids=prompt, max_new_tokens=new)


def test_equal_prompts_are_computed_once():
    scheduler = Scheduler(LIMITS)
    prompt = tuple(n % 4 for n in range(14))
    run(scheduler, [(0, request(*prompt))])
    stream = RequestStream(number=1, request=request(*prompt), tokens=[*prompt], limit=0)
    scheduler.add(stream)
    plan = scheduler.plan()
    # All but the last token, within a page that was copied.
    assert stream.num_cached == 13
    assert len(plan.copies) == 1
    assert [row.count for row in plan.rows] == [1]


def test_requests_of_one_step_that_begin_alike_wait_for_the_first():
    scheduler = Scheduler(dataclasses.replace(LIMITS, num_pages=30))
    prompt, counts, plan = tuple(n % 4 for n in range(14)), [], scheduler.plan

    def noted():
        counts.append(planned := plan())
        return planned

    scheduler.plan = noted
    run(scheduler, [(0, request(*prompt))] * 3)
    # The first prompt has 14 tokens. The others share three pages of four tokens with it, which
    # leaves each of them 2 to compute. A request draws four tokens and computes the first three:
    # nothing comes after the last.
    assert sum(each.num_tokens for each in counts) == 14 + 2 + 2 + 3 * 3


@pytest.mark.parametrize(("common", "num_copies"), [(3, 0), (4, 1)])
def test_a_page_is_copied_only_for_a_quarter_of_its_tokens(common, num_copies):
    limits = dataclasses.replace(LIMITS, page_size=16, max_positions=64)
    scheduler = Scheduler(limits)
    run(scheduler, [(0, request(*[1] * 16))])
    prompt = (*[1] * common, *[2] * 16)
    stream = RequestStream(number=1, request=request(*prompt), tokens=[*prompt], limit=0)
    scheduler.add(stream)
    plan = scheduler.plan()
    assert len(plan.copies) == num_copies
    assert stream.num_cached == common * num_copies


@pytest.mark.parametrize(
    ("length", "number", "calls"),
    [(512, 4, [4]), (512, 3, [1, 1, 1]), (512, 2, [1, 1]), (256, 3, [3]), (256, 2, [1, 1])],
)
def test_a_call_of_long_chunks_is_not_mostly_padding(length, number, calls):
    limits = SchedulerLimits(
        num_pages=100,
        page_size=64,
        max_running=4,
        max_step_tokens=4 + 4 * length,
        max_positions=1024,
        row_sizes=(1, 4),
        chunk_sizes=(length,),
        max_piece_rows=4,
    )
    scheduler, counts = Scheduler(limits), []
    plan = scheduler.plan

    def noted():
        counts.append(len((planned := plan()).chunks))
        return planned

    scheduler.plan = noted
    prompts = [(0, request(first, *[3] * (length - 9))) for first in range(number)]
    results = run(scheduler, prompts)
    assert [each for each in counts if each] == calls
    assert [len(results[each]) for each in range(number)] == [4] * number


def test_the_oldest_is_never_preempted():
    scheduler = Scheduler(dataclasses.replace(LIMITS, num_pages=8))
    arrivals = [(0, request(*[n] * 8, new=16)) for n in range(4)]
    results = run(scheduler, arrivals)
    assert scheduler.num_preemptions > 0
    assert [len(results[n]) for n in range(4)] == [16] * 4


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="max_step_tokens=7 is less than 8"):
        dataclasses.replace(LIMITS, max_step_tokens=7)
    with pytest.raises(ConfigError, match="must end at max_running=4"):
        dataclasses.replace(LIMITS, row_sizes=(1, 2))
    with pytest.raises(ConfigError, match="num_pages=1"):
        dataclasses.replace(LIMITS, num_pages=1)


def test_a_new_request_leaves_pages_for_the_next_tokens_of_those_that_run():
    limits = dataclasses.replace(
        LIMITS, page_size=32, num_pages=1 + 6, max_positions=160, share_prefixes=False
    )
    scheduler = Scheduler(limits)
    for number in range(5):
        asked = request(*[number % 4] * 8, new=100)
        scheduler.add(RequestStream(number=number, request=asked, tokens=[*[number] * 8], limit=0))
    while scheduler.plan().chunks:
        pass
    # A page each, and one of 32 tokens for the 16 next ones of every two that run.
    assert len(scheduler.running) == 4
    assert scheduler.allocator.num_free == 2


@pytest.mark.parametrize(
    ("max_running", "max_step_tokens", "shards", "sizes"),
    [
        (64, 4160, 1, (1, 4, 16, 64)),
        (300, 4396, 1, (1, 4, 16, 64, 128, 256, 300)),
        (700, 2748, 1, (1, 2, 4, 16, 64, 128, 256, 384, 512, 640, 700)),
        (600, 1700, 1, (1, 4, 16, 64, 128, 256, 384, 512, 600)),
        (600, 4800, 4, (4, 16, 64, 128, 256, 384, 512, 600)),
    ],
)
def test_programs_of_rows_have_few_sizes_and_room_for_prompts(
    max_running, max_step_tokens, shards, sizes
):
    options = dataclasses.replace(
        options_on("gpu"), max_running=max_running, max_step_tokens=max_step_tokens
    )
    limits = options.limits(tiny(), batch_shards=shards)
    assert limits.row_sizes == sizes
    beside = (max_step_tokens - max_running) // 1024
    assert max(rows for rows, length in limits.chunk_shapes if length == 1024) >= min(beside, 2)


def test_a_page_that_two_requests_share_goes_to_the_host_once():
    host, tree = HostPages(4, page_size=4), {5}

    def preempted(*pages, computed=8):
        stream = RequestStream(number=0, request=request(0), tokens=[0] * 9, limit=20)
        stream.pages, stream.computed = [*pages], computed
        return stream, host.save(stream, tree=tree)

    (one, first), (other, second) = preempted(5, 6, computed=7), preempted(5, 7)
    assert (first, second) == ([(5, 0), (6, 1)], [(7, 2)])
    assert (one.saved.num_tokens, other.saved.slots) == (7, (0, 2))
    host.drop(one)
    assert host.num_used == 2, "the other one still needs the page that they share"
    tree.clear()
    host.forget(5)
    third, copies = preempted(5, 6, 8, computed=9)
    assert [page for page, _ in copies] == [5, 6], "page 5 holds something else; page 8 has no room"
    assert third.saved.num_tokens == 8
    other.pages = [3, 9]
    assert host.restore(other, 1, 8) == [(2, 9)]
    host.drop(third)
    assert (host.num_used, host.num_saved, host.num_restored) == (0, 5, 1)


@pytest.mark.parametrize("has_states", [False, True])
def test_what_the_host_keeps_is_not_computed_again(has_states):
    def computed(num_host_pages):
        states = {"has_states": has_states, "num_host_states": has_states * num_host_pages}
        limits = dataclasses.replace(LIMITS, num_pages=8, num_host_pages=num_host_pages, **states)
        scheduler = Scheduler(dataclasses.replace(limits, share_prefixes=False))
        counts, plan = [], scheduler.plan

        def noted():
            planned = plan()
            counts.append(planned.num_tokens)
            return planned

        scheduler.plan = noted
        run(scheduler, [(0, request(*[n] * 8, new=16)) for n in range(4)])
        assert scheduler.num_preemptions > 0
        return sum(counts)

    assert computed(100) == 4 * (8 + 16 - 1) < computed(0)
    # A state needs all pages before it.
    assert computed(2) == computed(0) if has_states else computed(100) < computed(2) < computed(0)


def test_requests_go_on_from_where_others_left_their_prefix():
    """The second request finds where the two part, waits there, and both others save the prefix."""
    limits = dataclasses.replace(
        LIMITS, num_pages=40, max_positions=60, has_states=True, num_snapshots=4
    )
    scheduler, prefix = Scheduler(limits), tuple(hash((7, i)) % 4 for i in range(22))
    prompts = [(*prefix, *ends) for ends in ((0, 1, 2), (1, 1, 1), (2, 0, 3), (3, 2, 2))]
    arrivals = [(place, request(*prompt)) for place, prompt in enumerate(prompts)]
    results = run(scheduler, arrivals)
    assert [results[place] for place in range(4)] == [continued(p, 4) for p in prompts]
    assert scheduler.snapshots.num_used == 3
    stream = RequestStream(number=9, request=request(*prompts[0]), tokens=[*prompts[0]], limit=0)
    scheduler.add(stream)
    scheduler.plan()
    assert stream.num_cached == 20


def test_dynamic_rotation_is_served_as_far_as_keys_stay():
    def rotated(block):
        rope = RopeConfig(scaling=DynamicScaling(factor=2.0, original_max_positions=64))
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, rope=rope))

    config = tiny().with_blocks(rotated)
    options = dataclasses.replace(options_on("cpu"), max_context=64)
    assert options.limits(config).max_positions == 64
    with pytest.raises(ConfigError, match="set max_context=64"):
        dataclasses.replace(options, max_context=65).limits(config)
