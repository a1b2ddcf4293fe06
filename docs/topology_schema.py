"""The JSON Schema of mesh.toml as people write it, for editors: `make schemas`.

The model holds replicas by name, and a file may give their number. What spans tables (overlapping
ports, unlinked regions) is beyond JSON Schema; `topology.load` checks it.
"""

from typing import Any

from docs.describe import DIALECT, Untitled
from docs.documents import HERE, json_text
from infra.topology import REPLICAS_MAX, Topology
from schemas.ids import NAME_PATTERN

FILE = HERE / "json" / "mesh-toml.v1.json"


def document() -> dict[str, Any]:
    schema = Topology.model_json_schema(schema_generator=Untitled)
    region = schema["$defs"]["RegionTable"]["properties"]
    region["routers"]["uniqueItems"] = region["batch_runners"]["uniqueItems"] = True
    number = {"type": "integer", "minimum": 0, "maximum": REPLICAS_MAX}
    region["replicas"] = {
        "anyOf": [number, region["replicas"] | {"uniqueItems": True}],
        "description": "Names, or a number N for <region>-0 … <region>-(N-1).",
    }
    for tables in ("regions", "tenants"):
        schema["properties"][tables]["propertyNames"] = {"pattern": NAME_PATTERN}
    schema["description"] = "One mesh: its regions and the links between them."
    return {"$schema": DIALECT, **schema}


def main() -> None:
    FILE.write_text(json_text(document()), encoding="utf-8")


if __name__ == "__main__":
    main()
