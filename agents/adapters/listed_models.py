"""What an engine lists at `/v1/models`: its models, their cards, adapters, states and aliases."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import orjson

from agents.adapters.engine_call import UnexpectedAnswer
from agents.adapters.loaded_pages import LATEST, state_of
from agents.config import MODELS_MAX
from agents.core.engine_pages import FaultKind
from agents.core.loaded_models import NO_STATES, States
from schemas.ids import MODEL_CHARS_MAX, ModelId
from schemas.state import CARD_CHARS_MAX, CARDS_MAX, ModelCard

MODELS_PATH = "/v1/models"
NO_ALIASES: Mapping[ModelId, ModelId] = {}
NO_CARDS: dict[ModelId, ModelCard] = {}


class ListsNoModel(UnexpectedAnswer):
    """Its list of models is a good one, and empty."""

    kind = FaultKind.NO_MODEL


class ListedModels(NamedTuple):
    """What it lists. `cards`: of the first names; `adapters`: of all, those with a parent."""

    names: tuple[ModelId, ...]
    cards: dict[ModelId, ModelCard]
    adapters: frozenset[ModelId] = frozenset()
    states: States = NO_STATES  # of those of which it says whether they are loaded
    aliases: Mapping[ModelId, ModelId] = NO_ALIASES  # of its names: each with the model

    @property
    def base(self) -> tuple[ModelId, ...]:
        """The names that are no adapters, which come and go."""
        return tuple(name for name in self.names if name not in self.adapters)

    @property
    def owner(self) -> str | None:
        """The one that all its models are said to be `owned_by`, which many a kind names itself."""
        owners = {card.owned_by for card in self.cards.values()}
        return owners.pop() if len(owners) == 1 else None


NOT_READ = ListedModels((), NO_CARDS)


def served(data: bytes, url: str) -> ListedModels:
    """The models in a response of `/v1/models`. Raises UnexpectedAnswer if it has none."""
    try:
        listed = orjson.loads(data)["data"] if data.strip() else None
        rows = [row for row in listed or () if _is_model(row["id"])]
    except (ValueError, TypeError, KeyError) as error:
        raise UnexpectedAnswer(f"{url} is no list of models") from error
    if not rows:
        raise ListsNoModel(f"{url} lists no model: pull one, or give --model NAME")
    cards = {ModelId(row["id"]): _card(row) for row in rows[:CARDS_MAX]}
    filled = {model: card for model, card in cards.items() if card != ModelCard()}
    rows = rows[:MODELS_MAX]
    adapters = frozenset(ModelId(row["id"]) for row in rows if row.get("parent") is not None)
    told = ((ModelId(row["id"]), state_of(row.get("status"))) for row in rows)
    states = {name: state for name, state in told if state is not None}
    names = tuple(ModelId(row["id"]) for row in rows)
    aliases = dict(islice(_aliases(rows, names), MODELS_MAX - len(names)))
    states |= {alias: states[of] for alias, of in aliases.items() if of in states}
    for alias, of in islice(aliases.items(), CARDS_MAX - len(cards)):
        card = cards[of] if of in cards else ModelCard()
        filled[alias] = replace(card, root=card.root or of)  # they are one model
    return ListedModels((*names, *aliases), filled, adapters, states, aliases)


def _aliases(
    rows: list[dict[str, Any]], names: tuple[ModelId, ...]
) -> Iterator[tuple[ModelId, ModelId]]:
    """Other names that the engine takes for its models: Ollama's without `:latest`, and those that
    llama-swap names beside them."""
    seen = set(names)
    for row, name in zip(rows, names, strict=True):
        other = [name.removesuffix(LATEST)] if name.endswith(LATEST) else []
        meta = row.get("meta")
        swap = meta.get("llamaswap") if isinstance(meta, dict) else None
        more = swap.get("aliases") if isinstance(swap, dict) else None
        for alias in (*other, *(more if isinstance(more, list) else ())):
            if _is_model(alias) and alias not in seen:
                seen.add(alias)
                yield ModelId(alias), name


def _card(row: Mapping[str, object]) -> ModelCard:
    return ModelCard(
        created=_count(row.get("created")),
        owned_by=_text(row.get("owned_by")),
        root=_text(row.get("root")),
        parent=_text(row.get("parent")),
        max_model_len=_count(row.get("max_model_len")),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= CARD_CHARS_MAX else None


def _is_model(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MODEL_CHARS_MAX
