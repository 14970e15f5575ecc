"""What would make a run fit that does not: one changed setting each, with the bytes it gives.

``OPTIONS`` is the list; an option is a function from the run's needs and the room to proposals.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drafttrain.data.codec import CODECS
from drafttrain.extract.plan import store_layout

from .needs import RunNeeds


@dataclass(frozen=True, slots=True)
class Proposal:
    """A changed setting and the bytes of the whole run with it."""

    change: str
    bytes: int
    fits: bool


Option = Callable[[RunNeeds, int], Iterator[Proposal]]


def propose(needs: RunNeeds, room: int) -> list[Proposal]:
    """Everything that makes the run smaller, each change alone.

    Args:
        needs: of the run as it is.
        room: bytes that the whole run may take.
    """
    return [proposal for option in OPTIONS for proposal in option(needs, room)]


def _codec(needs: RunNeeds, room: int) -> Iterator[Proposal]:
    """Every codec that takes fewer bytes, the smallest last."""
    extract = needs.recipe.extract
    sizes = {name: needs.total(extract.model_copy(update={"codec": name})) for name in CODECS}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size < sizes[extract.codec]:
            yield Proposal(f"extract.codec={name}", size, size <= room)


def _no_final(needs: RunNeeds, room: int) -> Iterator[Proposal]:
    extract = needs.recipe.extract
    if extract.final_hidden:
        size = needs.total(extract.model_copy(update={"final_hidden": False}))
        yield Proposal("extract.final_hidden=false", size, size <= room)


def _fewer_taps(needs: RunNeeds, room: int) -> Iterator[Proposal]:
    """The most taps that fit, or one if even that does not."""
    extract = needs.recipe.extract
    layout = store_layout(needs.shape, extract, needs.tables["train"])
    size = 0
    spaced = max(1, needs.shape.num_layers - 3)  # more than these cannot be spaced evenly
    for count in range(min(len(layout.taps) - 1, spaced), 0, -1):
        size = needs.total(extract.model_copy(update={"taps": count}))
        if size <= room or count == 1:
            yield Proposal(f"extract.taps={count}", size, size <= room)
            return


def _fewer_samples(needs: RunNeeds, room: int) -> Iterator[Proposal]:
    """The most training samples that fit, or one if even that does not."""
    few, many = 1, len(needs.tables["train"])
    if many == 1:
        return
    while few + 1 < many:  # the whole does not fit; few does, or is 1
        middle = (few + many) // 2
        few, many = (middle, many) if needs.total(samples=middle) <= room else (few, middle)
    size = needs.total(samples=few)
    yield Proposal(
        f"{few:,} of {len(needs.tables['train']):,} training samples (data.train.N.limit)",
        size,
        size <= room,
    )


def _rolling(needs: RunNeeds, room: int) -> Iterator[Proposal]:
    """The largest budget that fits, or the least that works."""
    extract = needs.recipe.extract
    if extract.features == "online":
        return
    online = needs.total(extract.model_copy(update={"features": "online", "budget": None}))
    least = needs.least_budget(extract)
    # In whole units that a recipe may hold, and no larger than the store that it replaces.
    most = min(max(least, room - online), needs.store(extract, "train"))
    budget = f"{most // 1000}KB" if most // 1000 * 1000 >= least else f"{most}B"
    rolling = extract.model_copy(update={"features": "rolling", "budget": budget})
    size = needs.total(rolling)
    if size < needs.total(extract):
        yield Proposal(f"extract.features=rolling extract.budget={budget}", size, size <= room)


def _online(needs: RunNeeds, room: int) -> Iterator[Proposal]:
    extract = needs.recipe.extract
    if extract.features != "online":
        online = extract.model_copy(update={"features": "online", "budget": None})
        size = needs.total(online)
        yield Proposal("extract.features=online", size, size <= room)


OPTIONS: tuple[Option, ...] = (
    _codec,
    _no_final,
    _fewer_taps,
    _fewer_samples,
    _rolling,
    _online,
)
