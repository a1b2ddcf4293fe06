"""`[models."NAME"]` of mesh.toml: where requests for a model go, and what holds for it alone.

A name that only says where its requests go is an alias: with one target, or with several and their
shares, as of a canary. What concerns the placing of requests is written with the model that serves
them, so that it holds by whatever name they came.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from schemas.exchange import SLO_MS_MAX
from schemas.ids import MODEL_CHARS_MAX, ModelId, ValidModelId
from schemas.settings import (
    WHOLE,
    Advice,
    ContinueStreams,
    Option,
    PolicyName,
    QueueDelayS,
    Table,
    UnitRatio,
)

MODELS_MAX = 256  # tables; the router's own estimates are kept for as many models
TARGETS_MAX = 8  # of one alias
SHADOWS_MAX = 4  # of one model
SHARES_SUM_ERROR = 1e-6  # of decimal fractions added up

# In a file `to` may be one name: that has it all.
_AsShares = BeforeValidator(lambda to: {to: 1.0} if isinstance(to, str) else to)
_NAME_OR_SHARES = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MODEL_CHARS_MAX},
            {
                "type": "object",
                "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1},
                "minProperties": 1,
                "maxProperties": TARGETS_MAX,
            },
        ]
    }
)
TO_ADVICE = Advice(
    'write a model\'s name, or shares of up to 8 that make 1, like { "a" = 0.95, "b" = 0.05 }'
)


class ModelTable(Table):
    """`[models."NAME"]`: what holds for one name that clients ask for or engines serve."""

    to: Annotated[
        Annotated[
            dict[ValidModelId, UnitRatio],
            Field(min_length=1, max_length=TARGETS_MAX),
            _AsShares,
            _NAME_OR_SHARES,
        ]
        | None,
        TO_ADVICE,
        Option("The model that serves its requests, or several and their shares of conversations."),
    ] = None
    shadow: Annotated[
        Annotated[dict[ValidModelId, UnitRatio], Field(max_length=SHADOWS_MAX)],
        Advice('write up to 4 models and their shares, like { "c" = 0.01 }'),
        Option("Models that are sent copies of a share of its conversations' requests."),
    ] = Field(default_factory=dict)
    slo_ttft_ms: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=SLO_MS_MAX), WHOLE] | None,
        Option("Objective of its requests that name none, as `x-mesh-slo-ttft-ms`."),
    ] = None
    policy: Annotated[
        PolicyName | None, Option("How its requests are placed, whatever their class.")
    ] = None
    queue_delay_s_max: Annotated[
        QueueDelayS | None, Option("In place of `[routing]`'s, for its requests; 0: none.")
    ] = None
    hold_max: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=1_000_000), WHOLE] | None,
        Option("Most of its requests that a router holds, of all that it may hold."),
    ] = None
    continue_streams: Annotated[
        ContinueStreams | None,
        Option(
            "Whether another engine goes on with a stream that breaks: off, exact, or seeded (also "
            "requests that sample with a seed)."
        ),
    ] = None

    @property
    def is_alias(self) -> bool:
        return self.to is not None


# What belongs to the model that serves.
OF_SERVED = ("policy", "queue_delay_s_max", "hold_max", "continue_streams")


def model_problems(models: dict[ModelId, ModelTable]) -> Iterator[tuple[ModelId, str, str]]:
    """Mistakes between keys and tables: the table's name, the key, and what to do."""
    for name, table in models.items():
        targets = table.to or {}
        if table.is_alias and abs(sum(targets.values()) - 1.0) > SHARES_SUM_ERROR:
            yield name, "to", f"the shares make {sum(targets.values()):g}; they must make 1"
        for key, named in (("to", targets), ("shadow", table.shadow or {})):
            for target in named:
                if target == name:
                    yield name, key, "names itself; name another model"
                elif target in models and models[target].is_alias:
                    yield name, key, f'"{target}" is an alias; name a model that engines serve'
        if table.is_alias:
            for key in OF_SERVED:
                if getattr(table, key) is not None:
                    yield name, key, "belongs to the table of the model that serves the requests"
