"""Room is made by the least recently used, never by what is kept, and nothing loses its last copy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megloom.compute.state.demotion import Held, Move, Room, make_room
from megloom.compute.state.tiers import Tier
from tests.compute.state.node_store import key

ORDER = (Tier.TMPFS, Tier.DISK, Tier.REMOTE)


def held(number: int, tier: Tier = Tier.TMPFS, *, size: int = 10, is_kept: bool = False) -> Held:
    return Held(key=key(number), tier=tier, size_bytes=size, used=number, is_kept=is_kept)


def room(*copies: Held, tmpfs: int = 30, disk: int | None = None) -> Room:
    return Room(held=copies, budgets={Tier.TMPFS: tmpfs, Tier.DISK: disk, Tier.REMOTE: None}, reserved={})


def test_the_least_recently_used_goes_one_tier_down() -> None:
    moves = make_room(room(held(3), held(1), held(2)), Tier.TMPFS, 15)
    assert moves == (
        Move(key=key(1), source=Tier.TMPFS, target=Tier.DISK),
        Move(key=key(2), source=Tier.TMPFS, target=Tier.DISK),
    )


def test_what_a_lower_tier_has_is_dropped_and_what_is_kept_stays() -> None:
    moves = make_room(room(held(1, is_kept=True), held(2), held(2, Tier.DISK), held(3)), Tier.TMPFS, 10)
    assert moves == (Move(key=key(2), source=Tier.TMPFS, target=None),)


def test_a_full_tier_below_makes_room_first() -> None:
    moves = make_room(room(held(2), held(3), held(4), held(1, Tier.DISK), disk=10), Tier.TMPFS, 5)
    assert moves == (
        Move(key=key(1), source=Tier.DISK, target=Tier.REMOTE),
        Move(key=key(2), source=Tier.TMPFS, target=Tier.DISK),
    )


def test_no_room_is_said_so() -> None:
    assert make_room(room(held(1, is_kept=True), held(2, is_kept=True)), Tier.TMPFS, 20) is None
    assert make_room(room(), Tier.TMPFS, 31) is None, "larger than the tier"
    only_disk = Room(held=[held(1, Tier.DISK)], budgets={Tier.DISK: 10}, reserved={})
    assert make_room(only_disk, Tier.DISK, 1) is None, "the last copy has nowhere to go"
    drafts = Room(held=[], budgets={Tier.DISK: 10}, reserved={Tier.DISK: 8})
    assert make_room(drafts, Tier.DISK, 3) is None and make_room(drafts, Tier.DISK, 2) == ()


copies = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from(ORDER), st.integers(1, 20), st.booleans()),
    unique_by=lambda copy: (copy[0], copy[1]),
    max_size=14,
)


@given(copies, st.integers(10, 60), st.integers(10, 60), st.sampled_from(ORDER[:2]), st.integers(0, 60))
def test_after_the_moves_budgets_hold_and_nothing_kept_moved(
    drawn: list[tuple[int, Tier, int, bool]], tmpfs: int, disk: int, tier: Tier, need: int
) -> None:
    sizes = {number: size for number, _, size, _ in drawn}
    kept = {number for number, _, _, is_kept in drawn if is_kept}
    tiers = {at: {n for n, place, _, _ in drawn if place == at} for at in ORDER}
    limits = {Tier.TMPFS: tmpfs, Tier.DISK: disk}
    over_before = {at: sum(sizes[n] for n in tiers[at]) > limits[at] for at in limits}
    found = [held(n, at, size=sizes[n], is_kept=n in kept) for at in ORDER for n in sorted(tiers[at])]
    moves = make_room(room(*found, tmpfs=tmpfs, disk=disk), tier, need)
    if moves is None:
        movable = sum(sizes[n] for n in tiers[tier] - kept)
        fixed = sum(sizes[n] for n in tiers[tier] & kept)
        below_is_tight = tier == Tier.TMPFS
        assert fixed + need > limits[tier] or (below_is_tight and movable), "room was there"
        return
    everything = set.union(*tiers.values())
    for move in moves:
        number = move.key.version
        assert number not in kept
        tiers[move.source].remove(number)
        if move.target is not None:
            tiers[move.target].add(number)
            if move.target in limits and not over_before[move.target]:
                assert sum(sizes[n] for n in tiers[move.target]) <= limits[move.target]
    assert set.union(*tiers.values()) == everything
    assert sum(sizes[n] for n in tiers[tier]) + need <= limits[tier] or need == 0
