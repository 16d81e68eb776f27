"""How many cycles of the shared-memory data pipe ("wavefronts") one warp instruction takes, from its lane addresses.

The memory is 32 banks of 4 bytes; byte address a lies in bank a // 4 % 32. The lanes of an instruction are served in phases;
a phase takes as many wavefronts as the busiest bank holds distinct 4-byte words of it. Lanes in one word share it, in
stores as in loads. What goes beyond one wavefront a phase is what Nsight Compute counts as bank conflicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from warploom.smem.access import WARP, Access

BANKS = 32
BANK_BYTES = 4


@dataclass(frozen=True)
class Rules:
    """What 64- and 128-bit loads do with lanes at one address, and what lanes that are switched off do.

    A load merges when all lanes n and n^1, or all lanes n and n^2, read the same address; each merged phase then holds twice
    the lanes. NVIDIA's engineers describe it for the whole warp and its active lanes ("Unexpected shared memory bank
    conflict", NVIDIA developer forums, thread 77228). `verify` tells the alternatives apart on hardware.
    """

    merge_scope: str = "warp"  # "warp": all lanes together decide; "phases": those of every two neighbouring phases
    inactive: str = "ignored"  # "ignored": an inactive partner is no obstacle; "breaks": it is
    empty_phase: int = 0  # wavefronts of a phase none of whose lanes is active


RULES = Rules()


@dataclass(frozen=True)
class Phase:
    """Lanes served together, and the distinct 4-byte words that they touch in each bank.

    Attributes:
        lanes: those that are on, by number.
        banks: the words by bank; a word's number is its byte address / 4.
        empty: wavefronts of a phase without an active lane.
    """

    lanes: tuple[int, ...]
    banks: dict[int, tuple[int, ...]]
    empty: int = 0

    @property
    def wavefronts(self) -> int:
        return max(map(len, self.banks.values()), default=self.empty)

    @property
    def ideal(self) -> int:
        return 1 if self.banks else self.empty


@dataclass(frozen=True)
class Prediction:
    """What one instruction costs.

    Attributes:
        access: the instruction.
        phases: in order; those without active lanes are left out.
    """

    access: Access
    phases: tuple[Phase, ...]

    @property
    def wavefronts(self) -> int:
        return sum(phase.wavefronts for phase in self.phases)

    @property
    def ideal(self) -> int:
        """Wavefronts without a conflict: one a phase."""
        return sum(phase.ideal for phase in self.phases)

    @property
    def excess(self) -> int:
        """Wavefronts beyond the ideal: bank conflicts as Nsight Compute counts them."""
        return self.wavefronts - self.ideal

    def to_dict(self) -> dict[str, Any]:
        """What `warploom banks --addresses --json` prints: sums, and each phase."""
        return {
            "phases": len(self.phases),
            "wavefronts": self.wavefronts,
            "ideal": self.ideal,
            "excess": self.excess,
            "wavefronts_by_phase": [phase.wavefronts for phase in self.phases],
        }


def predict(access: Access, addresses: Sequence[int | None], rules: Rules = RULES) -> Prediction:
    """The phases and wavefronts of one instruction.

    Args:
        access: the instruction.
        addresses: a byte address for each lane, None for a lane that is switched off: 32 of them, or as many as the
            instruction reads (8 for ldmatrix.x1, 16 for x2; further ones are not read). Each is a multiple of the width.
        rules: the hardware's, where others are compared with counters.

    Returns:
        A `Prediction`, with wavefronts, their ideal number and the excess.

    Raises:
        ValueError: a wrong number of addresses, one that is negative or not aligned, or a lane off that must be on.
    """
    if len(addresses) not in (WARP, access.lanes):
        takes = f"{access.lanes} or {WARP}" if access.lanes < WARP else str(WARP)
        raise ValueError(f"addresses takes {takes} addresses for {access.name}, got {len(addresses)}")
    lanes = list(addresses[: access.lanes])
    for lane, address in enumerate(lanes):
        if address is None:
            if access.matrix:
                raise ValueError(f"addresses: {access.name} needs every lane, and lane {lane} is switched off")
        elif address < 0 or address % access.width:
            raise ValueError(
                f"addresses takes multiples of {access.width} from 0 for {access.name}, got {address} in lane {lane}"
            )
    groups = [list(range(n, n + access.phase_lanes)) for n in range(0, access.lanes, access.phase_lanes)]
    if access.merges:
        groups = _merged(groups, lanes, rules)
    phases = (_phase(access, group, lanes, rules) for group in groups)
    return Prediction(access, tuple(phase for phase in phases if phase.banks or phase.empty))


def _merged(groups: list[list[int]], lanes: list[int | None], rules: Rules) -> list[list[int]]:
    """Every two neighbouring phases as one where the lanes' addresses pair up."""
    pairs = [groups[n] + groups[n + 1] for n in range(0, len(groups), 2)]
    if rules.merge_scope == "warp":
        return pairs if _pairs_up(range(WARP), lanes, rules) else groups
    merged = []
    for number, pair in enumerate(pairs):
        merged += [pair] if _pairs_up(pair, lanes, rules) else groups[2 * number : 2 * number + 2]
    return merged


def _pairs_up(among: Iterable[int], lanes: list[int | None], rules: Rules) -> bool:
    among = list(among)

    def alike(lane: int, partner: int) -> bool:
        one, other = lanes[lane], lanes[partner]
        if one is None or other is None:
            return rules.inactive == "ignored" or one is other
        return one == other

    return any(all(alike(lane, lane ^ distance) for lane in among) for distance in (1, 2))


def _phase(access: Access, group: list[int], lanes: list[int | None], rules: Rules) -> Phase:
    active = tuple(lane for lane in group if lanes[lane] is not None)
    words: set[int] = set()
    for lane in active:
        address = lanes[lane]
        assert address is not None
        words.update(range(address // BANK_BYTES, (address + access.width - 1) // BANK_BYTES + 1))
    banks: dict[int, tuple[int, ...]] = {}
    for word in sorted(words):
        banks[word % BANKS] = (*banks.get(word % BANKS, ()), word)
    return Phase(active, banks, rules.empty_phase)
