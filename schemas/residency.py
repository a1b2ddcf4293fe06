"""Residency: where a prompt may be computed, and where its beginning may be known.

A *label* names ground that an operator vouches for: a jurisdiction, a contract, a building. Places
carry labels and requests want them, and these are the rules:

- A region carries the labels that mesh.toml gives it. A replica carries those of its region, or
  fewer if its agent is configured so; none carries a label that the file doesn't give its region.
- A request may go only to places that carry at least one of the labels it wants; one that wants
  none may go anywhere. Its labels, its key's and those that its region is confined to narrow each
  other: what counts is the intersection of all that are given, and if that is empty it goes
  nowhere.
- A region that is *confined* sends nothing that entered there, labelled or not, to a place that
  carries none of the labels it is confined to, and publishes no prefix to such a region.
- Prefixes of a request that wants labels are published only if every region that would receive them
  carries one of these.

"At least one" because labels of one request are alternatives ("Germany or France"): where two
things must hold, the operator gives the ground that has both a label of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NewType

from schemas.ids import RegionId, checked_name

Label = NewType("Label", str)

LABELS_MAX = 16  # of one request, region or key
TEXT_CHARS_MAX = 1024
NOTHING: frozenset[Label] = frozenset()

Labels = tuple[Label, ...]
Ranges = tuple[tuple[RegionId, Labels], ...]


def parse_labels(text: str) -> Labels:
    """The labels in a comma-separated list, sorted. Raises ValueError that says what is wrong."""
    if len(text) > TEXT_CHARS_MAX:
        raise ValueError(f"a list of labels has at most {TEXT_CHARS_MAX} characters")
    return checked_labels([part.strip() for part in text.split(",")])


def checked_labels(names: Iterable[str]) -> Labels:
    """These labels, sorted, each once. Raises ValueError that says what is wrong."""
    labels = sorted({Label(checked_name("label", name)) for name in names})
    if len(labels) > LABELS_MAX:
        raise ValueError(f"at most {LABELS_MAX} labels")
    return tuple(labels)


def labels_text(labels: Iterable[Label]) -> str:
    """The form that `parse_labels` reads."""
    return ",".join(sorted(labels))


@dataclass(frozen=True, slots=True)
class Ground:
    """mesh.toml's labels of every region, which regions are confined to which, and which take no
    client's request without a label."""

    carried: Ranges = ()
    confined: Ranges = ()
    label_required: tuple[RegionId, ...] = ()

    @property
    def labels(self) -> frozenset[Label]:
        """Every label that some region carries."""
        return frozenset(label for _, labels in self.carried for label in labels)

    def carried_by(self, region: RegionId) -> frozenset[Label]:
        """A region's labels; none for a region that the file doesn't know."""
        return frozenset(dict(self.carried).get(region, ()))

    def confined_to(self, region: RegionId) -> frozenset[Label]:
        """What that region's requests are confined to; nothing where they may go anywhere."""
        return frozenset(dict(self.confined).get(region, ()))

    def may_send(self, speaker: RegionId, listener: RegionId) -> bool:
        """Whether prompts and prefixes of `speaker` may be sent to `listener` at all."""
        confined_to = self.confined_to(speaker)
        return not confined_to or not confined_to.isdisjoint(self.carried_by(listener))

    def may_hold(self, region: RegionId, home: RegionId, wanted: Labels) -> bool:
        """Whether a prompt that entered in `home` and wants one of these may be in `region`."""
        labels = narrowed(wanted, self.confined_to(home))
        return labels is None or not labels.isdisjoint(self.carried_by(region))

    def sent(self, speaker: RegionId, listener: RegionId) -> Labels:
        """The labels under which `speaker` may send prompts to `listener`, sorted."""
        carried, confined_to = self.carried_by(listener), self.confined_to(speaker)
        return tuple(sorted(carried & confined_to if confined_to else carried))

    def listeners(self, region: RegionId) -> tuple[RegionId, ...]:
        """The other regions that receive what this one publishes of its prefixes."""
        others = (other for other, _ in self.carried if other != region)
        return tuple(other for other in others if self.may_send(region, other))


OPEN_GROUND = Ground()


def narrowed(*given: Iterable[Label]) -> frozenset[Label] | None:
    """The intersection of those that are not empty; None, anywhere, if all are."""
    found: frozenset[Label] | None = None
    for labels in map(frozenset, given):
        if labels:
            found = labels if found is None else found & labels
    return found


def ground(
    carried: Mapping[RegionId, Labels],
    confined: Mapping[RegionId, Labels] | None = None,
    label_required: Iterable[RegionId] = (),
) -> Ground:
    """The ground of these regions; every region of the mesh must be in `carried`."""
    kept = {region: labels for region, labels in (confined or {}).items() if labels}
    return Ground(
        tuple(sorted(carried.items())), tuple(sorted(kept.items())), tuple(sorted(label_required))
    )
