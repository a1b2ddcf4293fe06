"""The JSON Schema of mesh.toml as people write it, for editors: `make schemas`.

The model holds what the file *means*: an address taken apart, replicas by name. An editor needs
what may be *written*, so those three forms are put in by hand, and a test holds them to `load`.
What spans tables (overlapping ports, unlinked regions) no JSON Schema can say; `load` does.
"""

from pathlib import Path
from typing import Any

from infra.topology import REPLICAS_MAX, Topology
from schemas import build
from schemas.describe import DIALECT, Untitled
from schemas.ids import NAME_PATTERN

FILE = Path(build.__file__).with_name("json") / "mesh-toml.v1.json"

NAME: dict[str, Any] = {"type": "string", "pattern": NAME_PATTERN}
ADDRESS: dict[str, Any] = {
    "type": "string",
    "pattern": r"^.+:[0-9]{1,5}$",
    "description": "host:port as others dial it.",
}
REPLICAS: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": REPLICAS_MAX},
        {"type": "array", "items": NAME, "maxItems": REPLICAS_MAX, "uniqueItems": True},
    ],
    "description": "Names, or a number N for <region>-0 … <region>-(N-1).",
}


def document() -> dict[str, Any]:
    """The schema of a mesh.toml."""
    schema = Topology.model_json_schema(schema_generator=Untitled)
    parts = schema["$defs"]
    parts["Address"] = ADDRESS
    parts["Mesh"]["properties"]["name"] = NAME
    parts["Link"]["properties"]["between"]["prefixItems"] = [NAME, NAME]
    region = parts["Region"]["properties"]
    region["replicas"] = REPLICAS
    region["routers"] |= {"items": NAME, "minItems": 1, "uniqueItems": True}
    schema["properties"]["regions"]["propertyNames"] = NAME
    schema["description"] = "One mesh: its regions and the links between them."
    return {"$schema": DIALECT, **schema}


def main() -> None:
    """Write the schema where the others are kept."""
    FILE.write_text(build.json_text(document()), encoding="utf-8")


if __name__ == "__main__":
    main()
